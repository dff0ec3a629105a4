"""Where figures go: a CSV file and TensorBoard's event files, both on the axis of completed optimizer steps.

A run that is continued writes on where its checkpoint stands; what an abandoned stretch had logged beyond is dropped,
so that every figure's steps stay strictly increasing. `validate` and `test` in the folder of a run write beside its
curves: metrics.validate.csv and validate/.
"""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from depthlit.files import write_text
from depthlit.runs import put_aside

Row = dict[str, str]
METRICS = "metrics.csv"
FLUSH_SECONDS = 10.0


class Place:
    """Decides, once per stage, whether to write into the run folder or beside what is there.

    Args:
        root: the run folder.
        trainer: whose stage it is.
    """

    def __init__(self, root: Path, trainer: Trainer) -> None:
        self.root, self.trainer = root, trainer
        self._stage, self._beside = "", ""

    @property
    def stage(self) -> str:
        """ "fit", "validate", "test" or "predict"."""
        return str(self.trainer.state.fn.value) if self.trainer.state.fn else "fit"

    @property
    def beside(self) -> str:
        """The stage's name where the run folder holds a run's own figures, else ""."""
        if self.stage != self._stage:
            self._stage = self.stage
            self._beside = self.stage if self.stage != "fit" and (self.root / METRICS).exists() else ""
        return self._beside

    @rank_zero_only
    def clear(self) -> None:
        """For a run that begins: put aside what one has left here that has no checkpoint to go on from."""
        if aside := put_aside(self.root):
            print(f"{self.root} holds figures of a run without a checkpoint; they are now in {aside}", flush=True)


class MetricsFile(Logger):
    """metrics.csv: one line per optimizer step, one column per figure, empty where a step lacks it.

    Every call is on disk when it returns. The file is whole at every moment.
    """

    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place
        self._path = place.root / METRICS
        self._ready = ""  # the stage for which the file is open
        self._columns: list[str] = ["step"]
        self._last: Row = {}
        self._last_at = 0  # where the last line begins

    name = version = ""

    @rank_zero_only
    def go_on_from(self, step: int) -> None:
        """Drop the lines of steps after this one; with 0 begin a file of its own."""
        self._ready, path = "", self.place.root / METRICS
        if not step:
            self.place.clear()
        elif path.exists():
            self._open(path)
            self._rewrite([row for row in rows_of(path) if int(row["step"]) <= step])

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """They are in config.yaml."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        new = {name: repr(float(x)) for name, x in metrics.items() if name not in ("epoch", "step")}
        if not new:
            return
        if self._ready != self.place.stage:
            self._ready, beside = self.place.stage, self.place.beside
            self._open(self.place.root / (f"metrics.{beside}.csv" if beside else METRICS))
        at = str(int(step or 0))
        row = {"step": at, **new}
        earlier = self._last and int(self._last["step"]) > int(at)
        if earlier or not set(row) <= set(self._columns):
            rows = {row["step"]: row for row in rows_of(self._path)}
            rows[at] = {**rows.get(at, {}), **row}
            self._columns += [name for name in row if name not in self._columns]
            self._rewrite([rows[key] for key in sorted(rows, key=int)])
            return
        same = self._last.get("step") == at
        row = {**self._last, **row} if same else row
        with open(self._path, "r+b") as file:
            self._last_at = self._last_at if same else file.seek(0, os.SEEK_END)
            file.seek(self._last_at)
            file.write(self._text([row]).encode())
            file.truncate()
        self._last = row

    def _open(self, path: Path) -> None:
        self._path, self._columns, self._last = path, ["step"], {}
        if path.exists():
            rows = rows_of(path)
            with open(path, newline="", encoding="utf-8") as file:
                self._columns = next(csv.reader(file), ["step"])
            self._rewrite(rows)
        else:
            self._rewrite([])

    def _rewrite(self, rows: list[Row]) -> None:
        """Write the whole file under another name, then rename it."""
        head = self._text([], header=True) + self._text(rows[:-1])
        write_text(self._path, head + self._text(rows[-1:]))
        self._last, self._last_at = (rows[-1] if rows else {}), len(head.encode())

    def _text(self, rows: list[Row], header: bool = False) -> str:
        text = io.StringIO()
        writer = csv.DictWriter(text, self._columns, restval="", lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()


def rows_of(path: Path) -> list[Row]:
    """Lines of a metrics file as column -> text, without empty cells; a line cut short by a crash is left out.

    Raises:
        ValueError: it is another kind of file.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            columns = next(reader, ["step"])
            whole = [line for line in reader if len(line) == len(columns) and line[0].isdecimal()]
    except (UnicodeDecodeError, csv.Error):
        columns = []
    if columns[:1] != ["step"]:
        raise ValueError(f"{path} does not hold a run's figures, step by step; move it away")
    return [{name: cell for name, cell in zip(columns, line, strict=True) if cell != ""} for line in whole]


class EventFiles(TensorBoardLogger):
    """TensorBoard event files straight in the run folder."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.root, name="", version="", default_hp_metric=False)
        self.place = place
        self._stage, self._flushed = "", 0.0

    def go_on_from(self, step: int) -> None:
        """Have TensorBoard drop what was logged after this step; with 0 everything."""
        self._experiment = None
        if not step:
            self.place.clear()
        self._kwargs["purge_step"] = step + 1 if step else 0
        # TensorBoard reads files in the order of their names, which tell the second: no two in the same one
        if self._newest() >= int(time.time()):
            time.sleep(1.01 - time.time() % 1)

    def _newest(self) -> int:
        """Second at which the last event file of the run folder was begun."""
        names = [path.name.split(".") for path in self.place.root.glob("events.out.tfevents.*")]
        return max((int(parts[3]) for parts in names if len(parts) > 3 and parts[3].isdigit()), default=0)

    @property
    def log_dir(self) -> str:
        return str(self.place.root / self.place.beside)

    @property
    def experiment(self) -> SummaryWriter:
        if self.place.stage != self._stage:
            self._stage, self._experiment = self.place.stage, None
            if self._stage != "fit":
                self._kwargs.pop("purge_step", None)
        return super().experiment

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics({name: x for name, x in metrics.items() if name != "epoch"}, step)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Show settings in the HPARAMS tab, beside the run's final losses."""
        flat = dict(flattened(params))
        for summary in hparams(flat, {"val/loss": 0.0, "train/loss": 0.0}):
            self.experiment._get_file_writer().add_summary(summary)

    @rank_zero_only
    def save(self) -> None:
        """Lightning calls this after every figure; the disk is asked now and then."""
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """All figures so far are on disk when this returns."""
        self._flushed = time.monotonic()
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._experiment is not None:
            self._experiment.flush()
            self._experiment.close()
            self._experiment = None


def flattened(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """[("shape/n_layer", 8), ...] of nested settings, with values TensorBoard can show."""
    if isinstance(tree, Mapping):
        return [item for key, value in tree.items() for item in flattened(value, f"{path}/{key}" if path else str(key))]
    return [(path, tree if isinstance(tree, bool | int | float | str) else str(tree))]
