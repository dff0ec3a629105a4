"""A question put to the network at validation boundaries, and its answer kept.

A diagnostic of your own is a class with `measure`, in any file of yours:

    class StreamLength(Diagnostic):
        \"\"\"How long the state is at every depth: the mean over tokens of |z_l|.\"\"\"

        def measure(self, subject, batch):
            return {"length": torch.stack([z.norm(dim=-1).mean() for z in subject.states(batch)])}

and `--trainer.callbacks+=my_file.StreamLength`. It is asked about fixed windows of validation text, on a schedule, on
any number of ranks; its numbers are logged and saved, and training goes on as if it had not run.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, cast

import lightning as L
import numpy as np
from matplotlib.figure import Figure
from torch import Tensor, nn

from depthlit.answer import Answer
from depthlit.asking import Asking, answered, blank, split
from depthlit.decoder import Decoder, Order
from depthlit.subject import (
    Batch,
    Mean,
    NotApplicable,
    Samples,
    Share,
    Subject,
    on_cpu,
    per_unit,
    token_mean,
)
from depthlit.untouched import untouched

__all__ = [
    "Answer",
    "Batch",
    "Diagnostic",
    "Mean",
    "NotApplicable",
    "Samples",
    "Share",
    "Subject",
    "per_unit",
    "token_mean",
]


class Diagnostic(L.Callback):
    """A question put to the network at validation boundaries; write `measure`, and `draw` if there is a figure.

    Args:
        every: ask at every n-th validation; 0: only as the next two options say.
        fractions: ask at the first validation at or after each of these fractions of `trainer.max_steps`.
        at_end: ask at the end of training.
        windows: how many windows of validation text to ask about.
        length: tokens per window, at most the model's longest context.
        seed: of the choice of windows.
        batch_size: windows that go through the network at once.
        abreast: changed orders of the layers that go through a layer as one batch, where several are asked about.
        name: of the files and of the group in TensorBoard; the name of the class if left out.
        scale: [low, high] of the figure's colours or values, to compare runs; the data's own if left out.
        on_error: "warn" reports an error in the diagnostic and goes on training, "stop" stops.
    """

    draws: ClassVar[str] = ""
    """The array whose range is the scale of the figure."""

    def __init__(
        self,
        every: int = 1,
        fractions: Sequence[float] = (),
        at_end: bool = True,
        windows: int = 8,
        length: int = 256,
        seed: int = 0,
        batch_size: int = 4,
        abreast: int = 4,
        name: str | None = None,
        scale: Sequence[float] | None = None,
        on_error: Literal["warn", "stop"] = "warn",
    ) -> None:
        who = type(self).__name__
        for key, number, least in (
            ("every", every, 0), ("windows", windows, 1), ("length", length, 1), ("batch_size", batch_size, 1),
            ("abreast", abreast, 1),
        ):  # fmt: skip
            if number < least:
                raise ValueError(f"{who}: {key} is {number}; it must be at least {least}")
        if not all(0 < f <= 1 for f in fractions):
            raise ValueError(f"{who}: fractions are {list(fractions)}; each must be above 0 and at most 1")
        if scale is not None and (len(scale) != 2 or not scale[0] < scale[1]):
            raise ValueError(f"{who}: scale is {list(scale)}; it must be [low, high]")
        if name is not None and (not name or set(name) & set("/\\") or name.startswith(".")):
            raise ValueError(f"{who}: name is {name!r}; it names files, so it must have no / or \\ and no . in front")
        self.every, self.fractions, self.at_end = every, tuple(fractions), at_end
        self.windows, self.length, self.seed, self.batch_size = windows, length, seed, batch_size
        self.abreast = abreast
        self.name, self.scale, self.on_error = name or who, scale and tuple(scale), on_error
        self._validations = 0  # so far in this training
        self._fraction = 0.0  # of training at the last of them
        self._loaded: int | None = None  # step of the checkpoint that `validate` has loaded
        self.asking = Asking(self)

    # ------------------------------------------------------------------------------------- what a user writes

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        """Answer for one batch of windows. Call the network equally often whatever they hold: all ranks do so together.

        Returns:
            By name: `Mean` for what is an average over tokens; `Samples` for what is kept per window or document; or
            a plain tensor or number, which is averaged over the windows.

        Raises:
            NotApplicable: the question has no answer for this strategy.
        """
        raise NotImplementedError(f"{type(self).__name__} must define measure(subject, batch)")

    def together(self, subject: Subject, share: Share) -> dict[str, Any]:
        """Answer for all windows at once, for what is no average over batches; must be the same on every rank."""
        return {}

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        """Further arrays and numbers, made from the averages of the measured ones. Scalars are logged."""
        return {}

    def draw(self, answer: Answer) -> Figure | None:
        """A figure of a saved answer; it may use the answer and the constructor's arguments, nothing else."""
        return None

    def check(self, decoder: Decoder) -> None:
        """Refuse before training starts, by a ValueError, what could not be answered later."""

    def metric(self, key: str) -> str:
        """The name under which a number is logged."""
        return f"depth/{self.name}/{key}"

    def about(self, batches: Sequence[Batch], source: str) -> dict[str, Any]:
        """What was asked about, for the record: where the text comes from, how much of it, and its unit."""
        return {
            "source": source, "count": sum(len(batch["tokens"]) for batch in batches), "seed": self.seed,
            "length": batches[0]["tokens"].shape[1],
            "unit": "document" if "documents" in batches[0] else "window",
            "tokens": sum(int((batch["targets"] >= 0).sum()) for batch in batches),
        }  # fmt: skip

    def steps(self, order: Order) -> int:
        """How many times a block runs per batch; for the progress bar."""
        return len(order)

    # ------------------------------------------------------------------------------------- from Python

    def ask(self, model: nn.Module, batch: Batch | Tensor, step: int = 0) -> Answer:
        """Ask about a model at hand, without a trainer.

        Args:
            model: a decoder, or a LightningModule with a `decoder`.
            batch: windows with targets, or bare tokens (B, T + 1).
            step: for the record.
        """
        if isinstance(batch, Tensor):
            batch = {"tokens": batch[:, :-1], "targets": batch[:, 1:]}
        decoder = model if isinstance(model, Decoder) else cast(Decoder, model.decoder)
        self.check(decoder)
        subject = Subject(model, decoder)
        subject.abreast = self.abreast
        device = next(decoder.parameters()).device
        batches = [{key: value.to(device) for key, value in part.items()} for part in split(batch, self.batch_size)]
        start = time.monotonic()
        with untouched(model, self.seed), subject.counting():
            try:
                parts = [(i, on_cpu(self.measure(subject, part))) for i, part in enumerate(batches)]
                tokens = sum(int(subject.counted(part).sum()) for part in batches)
                more = self.together(subject, Share(list(batches), tokens, 1))
                answer = answered(self, subject, parts, more, batches, "given", step)
            except NotApplicable as reason:
                answer = blank(self, subject, batches, "given", step, str(reason))
        answer.cost = {"seconds": time.monotonic() - start, "block_evaluations": subject.evaluations}
        return answer

    # ------------------------------------------------------------------------------------- when

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._loaded = checkpoint.get("global_step")

    def state_dict(self) -> dict[str, Any]:
        return {"validations": self._validations, "fraction": self._fraction, "asked": self.asking.last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._validations, self._fraction = state_dict["validations"], state_dict["fraction"]
        self.asking.last = state_dict["asked"]

    @property
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    def on_validation_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:  # fmt: skip
        if trainer.sanity_checking or hasattr(trainer.datamodule, "windows"):  # type: ignore[attr-defined]
            return
        self.asking.keep(batch, first=batch_idx == 0 and dataloader_idx == 0)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.sanity_checking:
            return
        if trainer.state.fn != "fit":  # Lightning then counts from 0, so the checkpoint tells the step
            step = self._loaded or trainer.global_step or getattr(pl_module, "step", 0)
            self.asking.run(trainer, pl_module, cast(int, step))
        elif self._due(trainer):
            self.asking.run(trainer, pl_module, trainer.global_step)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """The end of training may lie between two validations."""
        if self.at_end and self.asking.last != trainer.global_step:
            self.asking.run(trainer, pl_module, trainer.global_step)
        self._loaded = None
        asked = [callback for callback in trainer.callbacks if isinstance(callback, Diagnostic)]  # type: ignore[attr-defined]
        self.asking.report(trainer, [diagnostic.asking for diagnostic in asked])

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.fractions and trainer.max_steps < 1:
            raise ValueError(f"{self.name}: fractions need trainer.max_steps; set it, or use `every`")
        self.check(cast(Decoder, pl_module.decoder))
        if hasattr(trainer.datamodule, "windows"):  # type: ignore[attr-defined]
            self.asking.batches(
                trainer, cast(Decoder, pl_module.decoder)
            )  # too few windows are no reason to stop later
        self.asking.begin()

    def _due(self, trainer: L.Trainer) -> bool:
        step, total, before = trainer.global_step, trainer.max_steps, self._fraction
        if step == self.asking.last:
            return False
        self._validations += 1
        self._fraction = step / total if total > 0 else 0.0
        return (
            (self.every > 0 and self._validations % self.every == 0)
            or any(before < fraction <= self._fraction for fraction in self.fractions)
            or (self.at_end and 0 < total <= step)
        )

    # ------------------------------------------------------------------------------------- for the record

    def options(self) -> dict[str, Any]:
        """The constructor's arguments, as they are kept under the same names."""
        names: dict[str, None] = {}
        for cls in type(self).__mro__:
            if "__init__" in vars(cls) and issubclass(cls, Diagnostic):
                given = inspect.signature(cls.__init__).parameters.values()
                names |= dict.fromkeys(p.name for p in given if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        return {key: getattr(self, key) for key in names if key != "self" and hasattr(self, key)}

    def definition(self) -> str:
        """The question as the docstrings of the class and of its module put it."""
        module = inspect.getmodule(type(self))
        words = (type(self).__doc__, module.__doc__ if module is not None else None)
        return "\n\n".join(inspect.cleandoc(text).partition("\nArgs:")[0].strip() for text in words if text)


def distinct(callbacks: Sequence[L.Callback]) -> list[L.Callback]:
    """The callbacks without diagnostics that are there twice alike, as when one config is laid over a run's own.

    Raises:
        ValueError: two diagnostics of one name differ.
    """
    kept: list[L.Callback] = []
    known: dict[str, Diagnostic] = {}
    for callback in callbacks:
        if isinstance(callback, Diagnostic):
            twin = known.setdefault(callback.name, callback)
            if twin is not callback and (type(twin), twin.options()) == (type(callback), callback.options()):
                continue
            if twin is not callback:
                raise ValueError(f"two diagnostics are called {callback.name} and differ: give one another `name`")
        kept.append(callback)
    return kept
