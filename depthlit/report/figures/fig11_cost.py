"""What depth costs at equal parameters: FLOPs, cache, memory, time. DepthBench, Fig. 11."""

from collections.abc import Callable

from depthlit.cost import kv_bytes
from depthlit.report import drawing
from depthlit.report.cells import HELD, Cell
from depthlit.report.entry import Entry, Material, Missing, Piece, Table
from depthlit.report.known import published
from depthlit.report.noise import Mean, mean

TOKENS = 4096


def logged(metric: str, scale: float) -> Callable[[Cell], Mean]:
    """A figure of metrics.csv in the unit shown."""
    return lambda cell: cell.mean(metric).times(scale)


MEASURES: dict[str, Callable[[Cell], Mean]] = {
    f"prefill of {TOKENS} tokens, routing not counted (TFLOP)":
        lambda cell: mean([cell.shape.forward_flops(TOKENS, "last") * 1e-12]),
    f"key-value cache of {TOKENS} tokens (MiB)": lambda cell: mean([kv_bytes(cell.shape, TOKENS) * 2.0**-20]),
    "prefill as measured, with routing (GFLOP)": logged("cost/prefill_flops", 1e-9),
    "peak memory (GiB)": logged("cost/peak_bytes", 2.0**-30),
    "hours per 1B prefill tokens": logged("cost/hours_per_1b_prefill_tokens", 1.0),
    "training (thousand tokens per second)": logged("throughput/tokens_per_sec", 1e-3),
}  # fmt: skip


def make(material: Material) -> Piece:
    """A panel per measure: the first two follow from shapes, the others were logged."""
    piece = Piece()
    for panel in [*material.over_shapes(*HELD[:3]), *material.unscored]:
        found = {what: how for what, how in MEASURES.items() if any(how(cell).n for cell in panel.cells)}
        figure, axes = drawing.grid(len(found), columns=3)
        for one, (what, how) in zip(axes, found.items(), strict=True):
            drawn = drawing.by_design(panel.designs, drawing.depth, how)
            drawing.curves(one, drawn, what, "layers L", what.rpartition("(")[2].rstrip(")"), ticks=panel.depths)
        piece.figures[f"Cost by depth: {panel.title}"] = figure
        rows = [[cell.design, cell.shape.n_layer, *(how(cell) for how in found.values())] for cell in panel.cells]
        digits = dict.fromkeys(found, 2) | {next(iter(MEASURES)): 4}
        piece.tables.append(Table(f"Cost by depth: {panel.title}", ["design", "L", *found], rows, digits))
        if lacking := [what for what in MEASURES if what not in found]:
            piece.gaps.append(f"{panel.title}: no {', '.join(lacking)}")
    if not piece.figures:
        raise Missing("no finished runs of one design at two shapes of equal size")
    flops, cache = published("depthbench", "prefill_tflop"), published("depthbench", "kv_ratio")
    piece.notes.append(
        f"Published at 400M, 4096 tokens: {flops[16]} TFLOP at 16 and {flops[70]} at 70 layers; cache {cache[70]} "
        "times as large. Speed is that of the last logged step, on the machine that trained."
    )
    return piece


ENTRY = Entry(
    "depthbench", "Fig. 11", "Cost by depth at equal parameters",
    needs="runs of several shapes with the callback CostMeter",
    studies=("depthbench-400m", "speed", "speed-cpu"),
    make=make,
)  # fmt: skip
