"""From a diagnostic that is due to an answer in the run folder: windows, turns on all ranks, errors, files, figures."""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from depthlit.answer import Answer, pixels, png, replacing
from depthlit.decoder import Decoder
from depthlit.ranks import agree, gathered, world
from depthlit.subject import Batch, NotApplicable, Share, Subject, as_array, merged, on_cpu
from depthlit.untouched import progress, untouched

if TYPE_CHECKING:
    from depthlit.diagnostic import Diagnostic

Part = tuple[int, dict[str, Any]]
"""The number of a batch, and what was measured on it."""


class Asking:
    """What one diagnostic remembers of its questions under one trainer.

    Attributes:
        kept: the first validation batches, where the data module cannot give windows.
        last: optimizer step of the last question, -1 before the first.
        spent: seconds in this training.
    """

    def __init__(self, diagnostic: Diagnostic) -> None:
        self.diagnostic = diagnostic
        self.kept: list[dict[str, Tensor]] = []
        self.last = -1
        self._said: set[str] = set()  # notes
        self._text: dict[str, Tensor] | None = None  # the windows
        self.begin()

    def begin(self) -> None:
        """Start the clock."""
        self._started, self.spent = time.monotonic(), 0.0

    def keep(self, batch: Batch, first: bool) -> None:
        """Take note of a validation batch, the first of its epoch or a later one, until there are enough windows."""
        if first:
            self.kept = []
        if sum(len(kept["tokens"]) for kept in self.kept) < self.diagnostic.windows:
            self.kept.append({key: value.cpu() for key, value in batch.items() if isinstance(value, Tensor)})

    def batches(self, trainer: L.Trainer, decoder: Decoder) -> tuple[list[dict[str, Tensor]], str]:
        """All batches, the same on every rank, and where they come from. No longer than the network is trained on."""
        ask, data = self.diagnostic, trainer.datamodule  # type: ignore[attr-defined]
        length = min(ask.length, decoder.shape.max_seq_len, getattr(data, "block_size", ask.length))
        with torch.inference_mode(False):
            if hasattr(data, "windows"):
                if self._text is None:
                    self._text = {k: v.cpu() for k, v in data.windows(ask.windows, length, ask.seed).items()}
                return split(self._text, ask.batch_size), "windows of the data module"
            return [
                {key: value[:, :length].clone() for key, value in part.items()}
                for theirs in gathered(self.kept)
                for batch in theirs
                for part in split(batch, ask.batch_size)
            ], "first validation batches"

    def run(self, trainer: L.Trainer, module: L.LightningModule, step: int) -> None:
        """Ask. All ranks take the same turns here, whatever happens on one of them."""
        ask, start, device = self.diagnostic, time.monotonic(), trainer.strategy.root_device
        decoder = cast(Decoder, module.decoder)
        rank, size = world()
        folder = Path(trainer.default_root_dir) / "analysis" / f"step_{step:07d}"
        batches, source = self.batches(trainer, decoder)
        if not batches:
            rank_zero_warn(f"{ask.name} has no validation text to ask about at step {step}; left out")
            return
        share = [i for i in range(len(batches)) if i % size == rank]
        rounds = -(-len(batches) // size)
        mine: list[Batch] = []
        for turn in range(rounds):
            batch = {key: value.to(device) for key, value in batches[share[turn] if turn < len(share) else 0].items()}
            if turn >= len(share):  # the others still have a batch: go through the same motions without a voice
                batch["targets"] = torch.full_like(batch["targets"], -1)
            mine.append(batch)
        parts: list[Part] = []
        answer: Answer | None = None
        error: BaseException | None = None
        with ExitStack() as around:
            around.enter_context(untouched(module, ask.seed))
            around.enter_context(trainer.precision_plugin.forward_context())
            blocks = rounds * ask.steps(tuple(range(decoder.shape.n_layer)))
            advance = around.enter_context(progress(trainer, ask.name, blocks))
            subject = Subject(cast(nn.Module, trainer.strategy.model), decoder, advance, folder)
            subject.abreast = ask.abreast
            around.enter_context(subject.counting())
            failed: list[str] = []
            for turn, windows in enumerate(mine):
                try:
                    part = ask.measure(subject, windows)
                    if turn < len(share):
                        parts.append((share[turn], on_cpu(part)))
                except Exception as problem:
                    error = problem
                if failed := agree(error):
                    break
            if not failed:
                parts = sorted((part for theirs in gathered(parts) for part in theirs), key=lambda part: part[0])
                tokens = sum(int((batch["targets"] >= 0).sum()) for batch in batches)
                try:
                    more = ask.together(subject, Share(mine, tokens, size))
                    answer = answered(ask, subject, parts, more, batches, source, step)
                except Exception as problem:
                    error = problem
                failed = agree(error)
            if len(failed) == size and isinstance(error, NotApplicable):
                answer, failed = blank(ask, subject, batches, source, step, str(error)), []
        if answer is None:
            self._fail(failed, error, step)
            return
        self.last = step
        answer.cost = {"seconds": time.monotonic() - start, "block_evaluations": subject.evaluations}
        trainer.callback_metrics.update({ask.metric(key): torch.tensor(value) for key, value in answer.numbers.items()})
        if trainer.is_global_zero:
            try:
                self._publish(trainer, answer, folder)
            except Exception as problem:
                self._fail([f"rank 0: {type(problem).__name__}: {problem}"], problem, step)
        self.spent += time.monotonic() - start
        if device.type == "cuda":  # the peak of training will be reached again; that of the diagnostic must not stand
            torch.cuda.reset_peak_memory_stats(device)

    def _fail(self, failed: Sequence[str], error: BaseException | None, step: int) -> None:
        where = "".join(traceback.format_exception(error)) if error is not None else ""
        line = f"{self.diagnostic.name} failed at step {step} and was left out: {'; '.join(failed)}"
        if self.diagnostic.on_error == "stop":
            raise RuntimeError(line) from error
        rank_zero_warn(f"{line}\n{where}")

    def _publish(self, trainer: L.Trainer, answer: Answer, folder: Path) -> None:
        """Save, load, draw, log, in this order: the figure comes from the files."""
        ask, saved = self.diagnostic, Answer.load(answer.save(folder))
        unfinished(folder, ask.name).unlink(missing_ok=True)
        numbers = {ask.metric(key): value for key, value in answer.numbers.items()}
        for logger in trainer.loggers:
            logger.log_metrics({**numbers, ask.metric("seconds"): answer.cost["seconds"]}, answer.step)
        for note in answer.notes:
            if note not in self._said:
                self._said.add(note)
                _say(trainer, f"{ask.name}: {note}")
        figure = ask.draw(saved) if saved.values else None
        if figure is None:
            return
        image = png(figure)
        with replacing(folder / f"{ask.name}.png") as file:
            file.write(image)
        for logger in trainer.loggers:
            if hasattr(getattr(logger, "experiment", None), "add_image"):
                logger.experiment.add_image(  # type: ignore[attr-defined]
                    f"depth/{ask.name}", pixels(image), answer.step, dataformats="HWC"
                )

    def report(self, trainer: L.Trainer, all_of_them: Sequence[Asking]) -> None:
        """The last of the diagnostics says what all of them took."""
        whole = time.monotonic() - self._started
        if all_of_them[-1] is self and whole > 0:
            each = ", ".join(f"{one.diagnostic.name} {one.spent:.1f}" for one in all_of_them)
            share = sum(one.spent for one in all_of_them)
            _say(trainer, f"Diagnostics took {share:.1f} s of {whole:.1f} s ({share / whole:.1%}): {each}")


def split(batch: Batch, n: int) -> list[dict[str, Tensor]]:
    """A batch as several of at most n windows."""
    return [{key: value[i : i + n] for key, value in batch.items()} for i in range(0, len(batch["tokens"]), n)]


def blank(
    ask: Diagnostic, subject: Subject, batches: Sequence[Batch], source: str, step: int, note: str = ""
) -> Answer:
    """An answer without findings: what was asked, of whom, about what; and why there is none."""
    return Answer(
        name=ask.name,
        diagnostic=f"{type(ask).__module__}.{type(ask).__qualname__}",
        definition=ask.definition(),
        options=ask.options(),
        model={"strategy": str(subject.strategy), "shape": dict(vars(subject.shape))},
        step=step,
        windows=ask.about(batches, source),
        notes=[note] if note else [],
    )


def answered(
    ask: Diagnostic, subject: Subject, parts: Sequence[Part], more: dict[str, Any], batches: Sequence[Batch],
    source: str, step: int,
) -> Answer:  # fmt: skip
    """What was measured batch by batch, and what was found for all together, as one answer."""
    values = merged([part for _, part in parts], [len(batches[i]["tokens"]) for i, _ in parts])
    values |= {key: as_array(value) for key, value in more.items()}
    answer = blank(ask, subject, batches, source, step)
    for key, value in ask.derive(values, subject).items():
        if isinstance(value, str):
            answer.notes.append(value)
        else:
            values[key] = as_array(value)
    answer.values = {key: value for key, value in values.items() if value.ndim}
    answer.numbers = {key: float(value) for key, value in values.items() if not value.ndim}
    return answer


def unfinished(folder: Path, name: str) -> Path:
    """Where a long diagnostic may keep what it has so far; gone once its answer is saved."""
    return folder / f".{name}.unfinished"


def _say(trainer: L.Trainer, line: str) -> None:
    """Print a line above the trainer's bar; nothing where the trainer shows none."""
    if trainer.is_global_zero and trainer.progress_bar_callback is not None:
        trainer.progress_bar_callback.print(line)
