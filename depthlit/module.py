"""The one LightningModule: a decoder, its loss, its optimizer, its schedule and budget."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import SumMetric

from depthlit import cost, runs
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.engines import autocast, gradient_norm, parameters_of, shard, shards_weights
from depthlit.loop import recounted
from depthlit.optim import Budget, OptimizerSettings, Schedule, adamw, parameter_groups, parameter_roles
from depthlit.plain import as_plain, as_settings, as_shape, as_strategy
from depthlit.plan import Plan, resolve
from depthlit.shape import ShapeSpec


class NonFinite(ValueError):
    """A loss or a gradient is NaN or infinite; raised on all ranks alike, before the update."""


@dataclass
class Window:
    """One optimizer step in the making: its micro-batches so far."""

    counted: Tensor  # () targets that count in this step, over all micro-batches and ranks
    nll: list[Tensor]  # () each: sum of the losses of each micro-batch of this rank so far
    tokens: int = 0  # of this rank so far


class LanguageModel(LightningModule):
    """A decoder of one shape and one residual strategy, trained on next-token prediction.

    The gradient of a step is that of  (sum of the losses of all counted targets) / (their number), over all
    micro-batches of the step and all ranks, however unevenly targets are masked: `depthlit.trainer.Trainer` hands each
    micro-batch the number of targets in its whole window, so nothing is corrected afterwards and it holds under every
    engine.

    Args:
        shape: how deep, how wide; on the command line also the name of one, such as 400m-L24.
        residual: how sublayers join the residual stream: the name of a strategy, or the class path of your own.
        optimizer: AdamW by parameter role.
        schedule: the learning rate as a function of the optimizer step.
        budget: how long to train, unless `trainer.max_steps` says so.
        init_seed: of the initial weights. The order of the data has a seed of its own, in the data module.
        vocab_size: of the data, in place of the shape's. The command line links it from the data module.
        nonfinite: what to do when a step's loss or gradient is NaN or infinite. stop: end the run before the update,
            naming the step and the batch, so that the last checkpoint stays good. skip: drop that step's gradient and
            go on.
        recompute: keep the state between blocks only, and compute each block again for backward: less memory, a third
            more time, the same gradients bit by bit.
        compiled: torch.compile nothing; the branches, attention and feed-forward, as two graphs for all layers; or the
            decoder as one graph, which compiles for minutes at many layers. How long it took is printed at the first
            step. Diagnostics run uncompiled.

    Attributes:
        decoder: the network; built by `configure_model`.
        step: optimizer steps completed: the x axis of everything that is logged.
        tokens_seen: training tokens so far, over all ranks.
        figures: of the last optimizer step, by the names under which they are logged.
        plan: how long the run is; known once `fit` has set up.
        census: parameters by part, counted before sharding.
    """

    decoder: Decoder

    def __init__(
        self,
        shape: ShapeSpec,
        residual: ResidualStrategy,
        optimizer: OptimizerSettings = OptimizerSettings(),  # noqa: B008 (frozen)
        schedule: Schedule = Schedule(),  # noqa: B008
        budget: Budget = Budget(),  # noqa: B008
        init_seed: int = 0,
        vocab_size: int | None = None,
        nonfinite: Literal["stop", "skip"] = "stop",
        recompute: bool = False,
        compiled: Literal["no", "branches", "decoder"] = "no",
    ) -> None:
        super().__init__()
        self.shape = as_shape(shape, vocab_size)
        self.residual = as_strategy(residual)
        self.optimizer = as_settings(OptimizerSettings, optimizer)
        self.schedule = as_settings(Schedule, schedule)
        self.budget = as_settings(Budget, budget)
        self.init_seed, self.nonfinite, self.recompute, self.compiled = init_seed, nonfinite, recompute, compiled
        self.plan: Plan | None = None
        self.census: dict[str, int] = {}
        self.roles: dict[str, str] = {}
        self.tokens_seen = 0
        self.skipped_steps = 0
        self.figures: dict[str, float] = {}
        self._step = 0
        self._groups: list[dict[str, Any]] = []
        self._window: Window | None = None
        self._val_nll, self._val_counted = (SumMetric().set_dtype(torch.float64) for _ in range(2))

    # The network

    def configure_model(self) -> None:
        """Build the decoder, once, and shard it under FSDP2. Lightning calls this; from Python, call it yourself."""
        if not hasattr(self, "decoder"):
            self._build()

    def _build(self) -> None:
        engine = self._trainer.strategy if self._trainer is not None else None
        decoder = Decoder(self.shape, self.residual, self.init_seed, join=not shards_weights(engine))
        self.census = cost.parameters(decoder)
        self.roles = parameter_roles(decoder)
        for block in decoder.blocks:
            block.recompute = self.recompute
            if self.compiled == "branches":
                block.attn.compile()
                block.mlp.compile()
        if isinstance(engine, ModelParallelStrategy):
            shard(decoder, engine)
        if self.compiled == "decoder":
            decoder.compile()
        self.decoder = decoder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What `Decoder.forward` takes and gives. Call it through the engine's root: `trainer.strategy.model(...)`."""
        with autocast(self._trainer.strategy if self._trainer is not None else None):
            return self.decoder(*args, **kwargs)

    # The course of training

    @property
    def step(self) -> int:
        """Optimizer steps completed: while fitting the trainer's count, else that of the checkpoint that was loaded."""
        if self._trainer is not None and self._trainer.state.fn == "fit":
            return self._trainer.global_step
        return self._step

    @property
    def step_closed(self) -> bool:
        """Whether the micro-batch that just ended completed an optimizer step."""
        return bool(self.figures) and self._window is None

    @property
    def peak_lr(self) -> float:
        """Learning rate at the top of the curve."""
        return self.residual.learning_rate(self.shape) if self.optimizer.lr is None else self.optimizer.lr

    def learning_rate(self, completed: int) -> float:
        """Learning rate of the optimizer step that follows after `completed` steps, without role factors."""
        if self.plan is None:
            raise ValueError("the learning rate is known once `fit` has resolved the length of the run")
        return self.peak_lr * self.schedule.factor(completed, self.plan.total_steps)

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        if isinstance(trainer.strategy, DeepSpeedStrategy) and not hasattr(self, "decoder"):
            self._build()  # ZeRO-3 would partition weights in `configure_model` before their initial values are set
        if stage != "fit":
            return
        if self.nonfinite == "skip" and isinstance(trainer.strategy, DeepSpeedStrategy):
            raise ValueError(
                "model.nonfinite skip is not possible under DeepSpeed, which owns the gradients; take stop"
            )
        block = getattr(self.trainer.datamodule, "block_size", None)  # type: ignore[attr-defined]
        if block and block > self.shape.max_seq_len:
            raise ValueError(
                f"data.block_size {block} is longer than model.shape.max_seq_len {self.shape.max_seq_len}; "
                "shorten the one or raise the other"
            )
        self.plan = self.resolve_plan()
        trainer.fit_loop.epoch_loop.max_steps = self.plan.max_steps

    def resolve_plan(self) -> Plan:
        """How long to train, from `trainer.max_steps`, else the budget, else `schedule.total_steps`."""
        return resolve(self, self.trainer)

    def configure_optimizers(self) -> Optimizer:
        groups = parameter_groups(self.decoder.named_parameters(), self.roles, self.optimizer)
        self._groups = [{key: group.pop(key) for key in ("role", "lr_factor")} for group in groups]
        for group, kept in zip(groups, self._groups, strict=True):
            kept["weight_decay"] = group["weight_decay"]
        return adamw(groups, self.optimizer, self.peak_lr)

    def on_fit_start(self) -> None:
        for logger in self.trainer.loggers:
            logger.log_hyperparams(self.settings())

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Set this step's learning rate, and the other settings too: a checkpoint brings its own along."""
        # Lightning's own count, by which it decides when figures are due, is off by one after some resumes
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.trainer.global_step
        lr = self.learning_rate(self.trainer.global_step)
        for group, kept in zip(self.trainer.optimizers[0].param_groups, self._groups, strict=True):
            group["lr"] = lr * kept["lr_factor"]
            group["weight_decay"] = kept["weight_decay"]
            group["betas"], group["eps"] = tuple(self.optimizer.betas), self.optimizer.eps

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch["tokens"], batch["targets"]
        if self._window is None:
            self._window = self._open_window(batch)
        window = self._window
        nll = self(tokens, targets, batch.get("documents")).sum()
        window.nll.append(nll.detach())
        window.tokens += tokens.numel()
        # Undo what follows: the engine averages over ranks, Lightning divides by the micro-batches of a step, and so
        # does DeepSpeed once more (with half the gradient it would clip half as much)
        parts = self.trainer.accumulate_grad_batches
        times = 2 if self.trainer.strategy.handles_gradient_accumulation else 1
        return nll * (parts**times * self.trainer.world_size / window.counted)

    def _open_window(self, batch: dict[str, Tensor]) -> Window:
        counted = batch.get("counted")
        if counted is None:
            if self.trainer.accumulate_grad_batches > 1:
                raise ValueError("accumulate_grad_batches needs depthlit.trainer.Trainer, to weight tokens alike")
            counted = (batch["targets"] >= 0).sum()
        return Window(self._summed(counted.clone()).clamp_min(1), [])

    def _summed(self, x: Tensor) -> Tensor:
        """Sum over ranks; changes x."""
        return self.trainer.strategy.reduce(x, reduce_op="sum")

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Close the window: measure and clip the gradient under every engine, and judge whether it may be used."""
        trainer, engine, window = self.trainer, self.trainer.strategy, self._window
        if window is None:
            raise RuntimeError("an optimizer step without micro-batches")
        if engine.handles_gradient_accumulation and len(window.nll) < trainer.accumulate_grad_batches:
            return  # DeepSpeed comes here at every micro-batch
        self._window = None
        wide = torch.float32 if self.device.type == "mps" else torch.float64
        nll = torch.stack(window.nll).to(wide).sum()
        sums = self._summed(torch.stack([nll, nll.new_tensor(window.tokens)]))
        norm = gradient_norm(engine, optimizer)
        told = [*sums, window.counted.to(sums), *([] if norm is None else [norm.to(sums)])]
        total, tokens, counted, *rest = torch.stack(told).tolist()  # the one time the host waits for the device
        loss = total / counted
        self.figures = {"train/loss": loss, "optim/lr": self.learning_rate(trainer.global_step)}
        if rest:
            self.figures["optim/grad_norm"] = rest[0]
        scales_loss = getattr(trainer.precision_plugin, "scaler", None) is not None  # then fp16 overflow is no accident
        finite = math.isfinite(loss) and (scales_loss or all(map(math.isfinite, rest)))
        if not finite:
            self._give_up(window, loss, rest[0] if rest else math.nan, optimizer)
        elif norm is not None and gradient_clip_val:
            if gradient_clip_algorithm == "value":
                self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
            elif rest[0] > gradient_clip_val:
                torch.nn.utils.clip_grads_with_norm_(parameters_of(optimizer), gradient_clip_val, norm)
        self.tokens_seen += int(tokens)
        self.figures["progress/tokens"] = self.tokens_seen
        if self.skipped_steps:
            self.figures["optim/skipped_steps"] = self.skipped_steps

    def _give_up(self, window: Window, loss: float, norm: float, optimizer: Optimizer) -> None:
        """Stop, or drop this step's gradient: the same on all ranks, since loss and norm are sums over all."""
        first = self.trainer.fit_loop.total_batch_idx + 1 - len(window.nll)
        bad = self.trainer.strategy.all_gather(torch.stack(window.nll).isfinite().logical_not().long().unsqueeze(0))
        where = [f"batch {first + i} of rank {rank}" for rank, i in bad.view(-1, len(window.nll)).nonzero().tolist()]
        what = f"the gradient norm is {norm}" if math.isfinite(loss) else f"the loss is {loss}"
        places = ", ".join(where[:3]) or f"batches {first} to {first + len(window.nll) - 1}"
        what = f"step {self.trainer.global_step + 1}: {what} ({places})"
        if self.nonfinite == "stop":
            last = runs.last_checkpoint(Path(self.trainer.default_root_dir))
            good = f", {last} is good" if last else ""
            raise NonFinite(f"{what}; stopped before the update{good}; model.nonfinite skip goes on")
        self.skipped_steps += 1
        if self.trainer.is_global_zero:
            print(f"{what}; step skipped", file=sys.stderr, flush=True)
        for parameter in parameters_of(optimizer):
            parameter.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer: Any = self.trainer
        if not self.step_closed or trainer.global_step % trainer.log_every_n_steps:
            return
        if isinstance(self.trainer.strategy, DeepSpeedStrategy):
            norm = self.trainer.strategy.model.get_global_grad_norm()  # type: ignore[union-attr, operator]
            if norm is not None:
                self.figures["optim/grad_norm"] = float(norm)
        self.record(self.figures)

    def record(self, figures: Mapping[str, float]) -> None:
        """Log figures at the number of optimizer steps completed, from a hook in which Lightning lets one log.

        Straight to the loggers: `log` takes half a millisecond per figure. The one figure `step` that goes through it
        puts everything that others log on the same axis.
        """
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(figures), self.step)
        self.trainer.callback_metrics.update({name: torch.tensor(x) for name, x in figures.items()})
        self.log("step", torch.tensor(float(self.step), dtype=torch.float64), batch_size=1)

    # Evaluation

    def on_validation_epoch_start(self) -> None:
        """The sums are fp64 whatever the precision of the module: a sum in bf16 stands still before long."""
        for metric in (self._val_nll, self._val_counted):
            metric.set_dtype(torch.float64)

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        nll = self(batch["tokens"], batch["targets"], batch.get("documents"))
        self._val_nll.update(nll.double().sum())
        self._val_counted.update((batch["targets"] >= 0).sum())

    test_step = validation_step

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """(B, T) each: `tokens`, `targets` and the loss of every target in nats, `nll`; 0 where it is not counted."""
        nll = self(batch["tokens"], batch["targets"], batch.get("documents"))
        return {"tokens": batch["tokens"], "targets": batch["targets"], "nll": nll}

    def on_validation_epoch_end(self) -> None:
        self._record_loss("val")

    def on_test_epoch_end(self) -> None:
        self._record_loss("test")

    def _record_loss(self, split: str) -> None:
        """Sum of losses / number of targets, over all batches and ranks, divided once."""
        nll, counted = self._val_nll.compute(), self._val_counted.compute()
        self._val_nll.reset()
        self._val_counted.reset()
        if self.trainer.sanity_checking:
            return
        loss = nll / counted
        found = {f"{split}/loss": loss, f"{split}/ppl": loss.exp(), "step": torch.tensor(float(self.step))}
        self.log_dict({name: x.double() for name, x in found.items()}, batch_size=1, sync_dist=True)

    # Checkpoints

    def settings(self) -> dict[str, Any]:
        """All constructor arguments as plain data: strings, numbers, lists and dicts."""
        return {
            "shape": asdict(self.shape),
            "residual": as_plain(self.residual),
            "optimizer": asdict(self.optimizer),
            "schedule": asdict(self.schedule),
            "budget": asdict(self.budget),
            "init_seed": self.init_seed,
            "nonfinite": self.nonfinite,
            "recompute": self.recompute,
            "compiled": self.compiled,
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY] = self.settings()
        checkpoint["tokens_seen"], checkpoint["skipped_steps"] = self.tokens_seen, self.skipped_steps

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._step = checkpoint.get("global_step", 0)
        if self._trainer is not None:
            recounted(checkpoint, self._trainer.accumulate_grad_batches)
        self.tokens_seen = checkpoint.get("tokens_seen", 0)
        self.skipped_steps = checkpoint.get("skipped_steps", 0)
