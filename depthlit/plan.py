"""How long a run is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from depthlit import cost


@dataclass(frozen=True)
class Plan:
    """How long a run is, resolved from the budget, the schedule and the trainer."""

    max_steps: int  # optimizer steps of this run
    total_steps: int  # length of the learning rate curve
    tokens_per_step: int | None  # None when the data module does not tell its batch


def resolve(model: Any, trainer: Any) -> Plan:
    """How long to train a model, from `trainer.max_steps`, else its budget, else its `schedule.total_steps`.

    Raises:
        ValueError: nothing says how long, or a budget is given and the data module does not tell its batch.
    """
    batch, block = (getattr(trainer.datamodule, name, None) for name in ("batch_size", "block_size"))
    per_step = None
    if batch and block:
        per_step = batch * block * trainer.accumulate_grad_batches * trainer.world_size
    steps = None
    if any(value is not None for value in vars(model.budget).values()):
        if per_step is None:
            raise ValueError(
                "model.budget needs to know the tokens of a step: a data module with batch_size and block_size; "
                "without one give trainer.max_steps"
            )
        flops = None
        if model.budget.flops is not None:
            flops = cost.training_flops(cost.on_meta(model.shape, model.residual), int(block or 0))
        steps = max(1, round((model.budget.total_tokens(model.shape, flops) or 0) / per_step))
    max_steps = trainer.max_steps if trainer.max_steps > 0 else steps or model.schedule.total_steps
    if not max_steps:
        raise ValueError(
            "how long to train? Give trainer.max_steps, or a budget: model.budget.tokens, "
            "model.budget.tokens_per_parameter (20 in DepthBench) or model.budget.flops"
        )
    return Plan(max_steps, model.schedule.total_steps or steps or max_steps, per_step)
