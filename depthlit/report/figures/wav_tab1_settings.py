"""With which settings the runs were made. WAV, Table 1, whose body is not public."""

from depthlit.report import by_depth
from depthlit.report.entry import Entry, Material, Piece, Table

SETTINGS = {
    "corpus": "data.path", "steps": "trainer.max_steps", "context": "data.block_size", "batch": "data.batch_size",
    "weight decay": "model.optimizer.weight_decay",
    "precision": "trainer.precision",
}  # fmt: skip


def make(material: Material) -> Piece:
    """A row per study and corpus."""
    rows = []
    for panel in by_depth.panels(material):
        first = panel.cells[0].first
        seeds = sorted({run.seed for cell in panel.cells for run in cell.runs})
        said = [str(first.settings.get(key)) for key in SETTINGS.values()]
        depths, seeds_said = (", ".join(map(str, numbers)) for numbers in (panel.depths, seeds))
        rows.append(
            [panel.title, depths, first.shape.d_model, first.shape.n_head, f"{first.rate:g}", *said, seeds_said]
        )
    return Piece(
        tables=[Table("Settings", ["study", "layers", "width", "heads", "peak rate", *SETTINGS, "seeds"], rows)]
    )


ENTRY = Entry(
    "wav", "Table 1", "Settings",
    needs="runs of several depths at equal width",
    studies=("wav", "wav-cpu"),
    make=make,
)  # fmt: skip
