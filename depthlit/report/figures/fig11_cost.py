"""What depth costs at equal parameters: FLOPs, cache, memory, time. DepthBench, Fig. 11."""

from depthlit.report import drawing
from depthlit.report.drawing import Line
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published

MEASURES = {
    "prefill (GFLOP per sequence)": ("cost/prefill_flops", 1e-9),
    "key-value cache (MiB)": ("cost/kv_bytes", 2.0**-20),
    "peak memory (GiB)": ("cost/peak_bytes", 2.0**-30),
    "hours per 1B prefill tokens": ("cost/hours_per_1b_prefill_tokens", 1.0),
    "training (thousand tokens per second)": ("throughput/tokens_per_sec", 1e-3),
}


def make(material: Material) -> Piece:
    """A panel per measure that was logged."""
    piece = Piece()
    for panel in material.over_shapes():
        there = {what: how for what, how in MEASURES.items() if any(cell.by_seed(how[0]) for cell in panel.cells)}
        if not there:
            continue
        figure, axes = drawing.grid(len(there), columns=3)
        for one, (what, how) in zip(axes, there.items(), strict=True):
            drawn = []
            for name, cells in panel.designs.items():
                heights = [cell.mean(how[0]).times(how[1]) for cell in cells]
                drawn.append(Line(name, cells[0].look, [cell.shape.n_layer for cell in cells], heights))
            drawing.curves(one, drawn, what, "layers L", what, ticks=panel.depths)
        piece.figures[f"Cost by depth: {panel.title}"] = figure
        piece.tables.append(
            Table(
                f"Cost by depth: {panel.title}",
                ["design", "L", *there],
                [
                    [cell.design, cell.shape.n_layer, *(cell.mean(how[0]).times(how[1]) for how in there.values())]
                    for cell in panel.cells
                ],
                dict.fromkeys(there, 2),
            )
        )
        if lacking := [what for what in MEASURES if what not in there]:
            piece.gaps.append(f"{panel.title}: no {', '.join(lacking)}")
    if not piece.figures:
        raise Missing("no finished runs of several shapes with figures of cost")
    flops, cache = published("depthbench", "prefill_tflop"), published("depthbench", "kv_ratio")
    piece.notes.append(
        f"Published at 400M, 4096 tokens: {flops[16]} TFLOP at 16 and {flops[70]} at 70 layers; cache {cache[70]} "
        "times as large. Speed is that of the last logged step, on the machine that trained."
    )
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 11", "Cost by depth at equal parameters",
    needs="runs of several shapes with the callback CostMeter",
    studies=("speed", "speed-cpu"),
    make=make,
)  # fmt: skip
