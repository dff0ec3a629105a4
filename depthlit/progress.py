"""What a person sees while a run goes on: a summary at the start, then a bar or quiet lines."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ProgressBar
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

from depthlit.loop import Clock
from depthlit.module import LanguageModel

QUIET_SECONDS = 10.0


def summary(model: LanguageModel, trainer: Trainer) -> str:
    """Parameters by part, shape, residual strategy, schedule and tokens of a run, for a person to read."""
    shape, plan, parts = model.shape, model.plan, model.census
    heads = f"{shape.n_head} heads" + ("" if shape.n_kv_head == shape.n_head else f" ({shape.n_kv_head} key/value)")
    curve = model.schedule
    rows = [
        ("parameters", f"{parts['total']:,}"),
        ("  embedding, head", f"{parts['embedding_and_head']:,}"),
        ("  backbone", f"{parts['backbone']:,}"),
        ("  residual extra", f"{parts['residual']:,}"),
        ("shape", f"{shape.n_layer} layers, width {shape.d_model}, {heads}, feed-forward {shape.d_ff}, "
         f"vocabulary {shape.vocab_size:,}"),
        ("residual", f"{model.residual}"),
    ]  # fmt: skip
    rows += [("", line.strip()) for line in model.residual.describe(shape).splitlines() if line.strip()]
    if plan is not None:
        rows.append(
            ("schedule", f"{plan.max_steps:,} steps; learning rate {model.peak_lr:g} after "
             f"{curve.warmup_steps(plan.total_steps):,} of warm-up, cosine to {model.peak_lr * curve.final:g} "
             f"at step {plan.total_steps:,}")
        )  # fmt: skip
        if plan.tokens_per_step:
            rows.append(
                ("tokens", f"{plan.max_steps * plan.tokens_per_step:,} "
                 f"({plan.max_steps * plan.tokens_per_step / shape.parameters():.3g} per parameter), "
                 f"{plan.tokens_per_step:,} per step")
            )  # fmt: skip
    decayed = ", ".join(sorted({*model.roles.values()} & {*model.optimizer.decayed_roles}))
    rows.append(("weight decay", f"{model.optimizer.weight_decay:g} on {decayed or 'nothing'}"))
    ranks = trainer.world_size
    engine = f"{trainer.strategy.__class__.__name__} on {ranks} {'rank' if ranks == 1 else 'ranks'}"
    precision = "bf16-pure" if trainer.precision == "bf16-true" else trainer.precision
    kept = str(model.decoder.embed.weight.dtype).removeprefix("torch.")
    rows += [("engine", engine), ("precision", f"{precision}: weights and residual stream in {kept}")]
    if trainer.loggers:
        rows.append(("run folder", str(trainer.default_root_dir)))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}".rstrip() for name, value in rows)


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 5h07m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    return f"{whole // 60}m{whole % 60:02d}s" if whole < 3600 else f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Announce(ProgressBar):
    """A bar with loss, tokens per second and time left on a terminal; elsewhere a line now and then.

    Args:
        clock: measures training time, so that validation does not bend the time left.
        bar: whether standard output is a terminal; found out when left out.

    Attributes:
        progress: the bar while there is one; a diagnostic may add a task of its own to it.
    """

    def __init__(self, clock: Clock, bar: bool | None = None) -> None:
        super().__init__()
        self.clock = clock
        self._on_terminal = sys.stdout.isatty() if bar is None else bar
        self._enabled = True
        self.progress: Progress | None = None
        self._first = 0
        self._said = 0.0

    def disable(self) -> None:
        self._enabled = False

    def enable(self) -> None:
        self._enabled = True

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first = trainer.global_step
        if not self._enabled:
            return
        print(summary(pl_module, trainer), flush=True)
        if self._on_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TaskProgressColumn(),
                       TextColumn("{task.description}"))  # fmt: skip
            self.progress = Progress(*columns, refresh_per_second=4)
            self.progress.start()
            self.progress.add_task("", total=trainer.max_steps, completed=self._first)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if not self._enabled or not pl_module.step_closed:
            return
        step = trainer.global_step
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], completed=step, description=self.line(trainer, pl_module))
        elif step in (self._first + 1, trainer.max_steps) or time.monotonic() - self._said > QUIET_SECONDS:
            self._said = time.monotonic()
            print(f"step {step}/{trainer.max_steps}  {self.line(trainer, pl_module)}", flush=True)

    def line(self, trainer: Any, pl_module: Any) -> str:
        """Loss, learning rate, tokens per second and time left."""
        done, left = trainer.global_step - self._first, trainer.max_steps - trainer.global_step
        figures = pl_module.figures
        parts = [f"loss {figures['train/loss']:.4f}", f"lr {figures['optim/lr']:.2e}"]
        if self.clock.tokens_per_sec:
            parts.append(f"{self.clock.tokens_per_sec:,.0f} tokens/s")
        return "  ".join([*parts, f"{duration(self.clock.seconds / done * left)} left"])

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.progress is not None:
            self.progress.update(self.progress.task_ids[0], description="validating")

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.progress is not None and pl_module.figures:
            self.progress.update(self.progress.task_ids[0], description=self.line(trainer, pl_module))
        if not self._enabled or trainer.sanity_checking or "val/loss" not in trainer.callback_metrics:
            return
        loss, ppl = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "ppl"))
        self.print(f"step {pl_module.step}  val/loss {loss:.4f}  val/ppl {ppl:.2f}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """A line above the bar."""
        if self._enabled:
            (self.progress.console.print if self.progress is not None else print)(*args, **kwargs)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self.progress is not None:
            self.progress.stop()
            self.progress = None

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.stop()
