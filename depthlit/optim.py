"""How weights move: roles of parameters, AdamW by role, the learning rate as a closed form, the training budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from depthlit.shape import ShapeSpec

ROLES = ("matrix", "embedding", "head", "norm", "bias", "routing")
"""The roles there always are; a strategy may name more (`Reader.roles`)."""

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.", "_forward_module.")


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW, with decay and learning rate by the role of a parameter.

    Roles: matrix (weights of linear layers), embedding, head, norm (gains), bias, routing (what a connection owns:
    queries, gates, mixing weights), and further ones that a strategy names itself. The role is decided by the module
    that owns a parameter, before anything is sharded; a head tied to the embedding is "embedding".

    Args:
        lr: peak learning rate; left out, the strategy's own for the shape.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled, times the learning rate.
        decayed_roles: the roles that decay; all others do not.
        lr_factors: learning rate of a role relative to the schedule, such as {routing: 0.1}.
        fused: one kernel for all weights. Left out: yes, except for bf16 weights, where the separate roundings of the
            plain version are what `bf16-pure` is there to reproduce.

    Raises:
        ValueError: a number is out of range.
    """

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    decayed_roles: tuple[str, ...] = ("matrix", "embedding", "head")
    lr_factors: dict[str, float] = field(default_factory=dict)
    fused: bool | None = None

    def __post_init__(self) -> None:
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise ValueError(f"optimizer.lr is {self.lr}, it must be positive")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas are {list(self.betas)}, it must be two numbers from 0 to below 1")
        factors = {f"lr_factors.{role}": factor for role, factor in self.lr_factors.items()}
        for name, value in {"eps": self.eps, "weight_decay": self.weight_decay, **factors}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"optimizer.{name} is {value}, it must not be negative")


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, cosine decay, then constant: a function of the optimizer step alone.

    With s the number of the step from 1, N the length and W = warmup N:  s / W up to W, then
    f + (1 - f) (1 + cos(pi (s - W) / (N - W))) / 2 with f = final, and f after N. The first step moves, none is above
    the peak, and a resumed run continues on the same curve. DepthBench's curve (arXiv:2609.32534), one step earlier.

    Args:
        warmup: share of the steps that warm up.
        final: learning rate at the end, relative to the peak.
        total_steps: length N of the curve; left out, the budget's, else `trainer.max_steps`. Set it when a run is to
            be stopped early or gone on with later without bending the curve.

    Raises:
        ValueError: a number is out of range.
    """

    warmup: float = 0.1
    final: float = 0.1
    total_steps: int | None = None

    def __post_init__(self) -> None:
        for name in ("warmup", "final"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"schedule.{name} is {getattr(self, name)}, it must lie between 0 and 1")
        if self.total_steps is not None and self.total_steps < 1:
            raise ValueError(f"schedule.total_steps is {self.total_steps}, it must be at least 1")

    def warmup_steps(self, total: int) -> int:
        """W, at least one step unless `warmup` is 0."""
        return max(1, round(self.warmup * total)) if self.warmup else 0

    def factor(self, completed: int, total: int) -> float:
        """Learning rate relative to the peak of the step that follows after `completed` steps.

        Args:
            completed: optimizer steps made so far, from 0.
            total: length N of the curve.
        """
        step, W = completed + 1, self.warmup_steps(total)
        if step <= W:
            return step / W
        along = min(1.0, (step - W) / (total - W)) if total > W else 1.0
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * along)) / 2


@dataclass(frozen=True)
class Budget:
    """How long to train, as one of three. `trainer.max_steps` wins where it is given.

    Args:
        tokens: training tokens.
        tokens_per_parameter: training tokens per parameter of the Pre-LN model of the shape (embedding and head
            included), so that every strategy at a shape sees the same tokens; 20 in DepthBench (arXiv:2609.32534).
        flops: FLOPs of training, three forwards per step, routing counted.

    Raises:
        ValueError: more than one is given, or a number is not positive.
    """

    tokens: float | None = None
    tokens_per_parameter: float | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) > 1:
            raise ValueError(f"budget: give one of {', '.join(given)}, not several")
        for name, value in given.items():
            if not 0 < value < math.inf:
                raise ValueError(f"budget.{name} is {value}, it must be positive")

    def total_tokens(self, shape: ShapeSpec, flops_per_token: float | None = None) -> float | None:
        """Tokens to train on; None when no budget is given.

        Args:
            shape: of the model.
            flops_per_token: of a training step; only needed for a budget in FLOPs.
        """
        if self.tokens_per_parameter is not None:
            return self.tokens_per_parameter * shape.parameters()
        if self.flops is not None:
            if flops_per_token is None:
                raise ValueError("budget.flops needs the FLOPs of a token")
            return self.flops / flops_per_token
        return self.tokens


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers (FSDP, recomputation, compiling) put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_roles(decoder: nn.Module) -> dict[str, str]:
    """Name -> role of every parameter, by the module that owns it. Call before anything is sharded.

    Args:
        decoder: whose head is its submodule `head`.
    """
    roles: dict[str, str] = {}
    modules = dict(decoder.named_modules())
    for name, _ in decoder.named_parameters():
        owner_name, _, own = name.rpartition(".")
        owner = modules[owner_name]
        named: Mapping[str, str] = getattr(owner, "roles", {})
        if own in named:
            role = named[own]
        elif own == "bias":
            role = "bias"
        elif isinstance(owner, nn.Embedding):
            role = "embedding"
        elif isinstance(owner, nn.Linear):
            role = "head" if plain_name(owner_name) == "head" else "matrix"
        elif isinstance(owner, NORMS) or type(owner).__name__.endswith("Norm"):
            role = "norm"
        else:
            role = "routing"
        roles[plain_name(name)] = role
    return roles


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], roles: Mapping[str, str], settings: OptimizerSettings
) -> list[dict[str, Any]]:
    """One group of AdamW per role, in order of role names, with `role`, `weight_decay` and `lr_factor`.

    Args:
        named: names and parameters, as they are after sharding.
        roles: from `parameter_roles`, before it.
        settings: what decays and how fast it learns.

    Raises:
        ValueError: the settings name a role that no parameter has and that is none of `ROLES`.
    """
    groups: dict[str, list[nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            groups.setdefault(roles[plain_name(name)], []).append(parameter)
    known = {*ROLES, *roles.values()}
    for key, listed in (("decayed_roles", settings.decayed_roles), ("lr_factors", tuple(settings.lr_factors))):
        for role in listed:
            if role not in known:
                raise ValueError(f"optimizer.{key} names the role {role!r}; there are: {', '.join(sorted(known))}")
    return [
        {
            "params": parameters,
            "role": role,
            "weight_decay": settings.weight_decay if role in settings.decayed_roles else 0.0,
            "lr_factor": settings.lr_factors.get(role, 1.0),
        }
        for role, parameters in sorted(groups.items())
    ]


def adamw(groups: list[dict[str, Any]], settings: OptimizerSettings, lr: float) -> torch.optim.AdamW:
    """AdamW over the groups (Loshchilov and Hutter, Decoupled Weight Decay Regularization, arXiv:1711.05101)."""
    parameters = [p for group in groups for p in group["params"]]
    fused = settings.fused
    if fused is None:
        fused = all(p.dtype in (torch.float32, torch.float64) for p in parameters)
    beta1, beta2 = settings.betas
    return torch.optim.AdamW(groups, lr=lr, betas=(beta1, beta2), eps=settings.eps, weight_decay=0.0, fused=fused)
