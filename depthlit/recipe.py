"""Remaking instead of keeping: a tensor may carry the recipe by which backward makes it again.

A mixture of streams or sources is cheap to make from tensors that are alive anyway. Whoever makes one attaches the
recipe; an autograd function that needs it in backward (`keep` in place of `ctx.save_for_backward`, `kept` in place of
`ctx.saved_tensors`) then saves the ingredients, and not the mixture.

    x = remember(mix(v, p), mix, v, p)        # mix is a plain function of tensors
    keep(ctx, x, gain)                        # in forward: saves v, p, gain
    x, gain = kept(ctx)                       # in backward: x = mix(v, p), made once for all who kept it

Ingredients are saved the ordinary way, so checkpointing, offloading and version checks see them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor


class Plan:
    """How to make a tensor from its ingredients, some of which have plans of their own. Holds none of them."""

    def __init__(self, make: Callable[..., Any], parts: list[Plan | None]) -> None:
        self.make, self.parts = make, parts
        self.users = self.waiting = 0
        self.made: Any = None

    def reserve(self) -> None:
        """Announce one more who will ask in backward."""
        if not self.users:
            for part in self.parts:
                if part is not None:
                    part.reserve()
        self.users += 1
        self.waiting = self.users

    def size(self) -> int:
        """Number of ingredients."""
        return sum(1 if part is None else part.size() for part in self.parts)

    def run(self, ingredients: list[Tensor]) -> Any:
        """The tensor; made when it is first asked for, forgotten when the last who reserved has it."""
        made = self.made
        if made is None:
            left = iter(ingredients)
            made = self.make(*(_take(part, left) for part in self.parts))
        self.waiting -= 1
        self.made = made if self.waiting > 0 else None
        if self.waiting <= 0:
            self.waiting = self.users
        return made


def _take(plan: Plan | None, left: Iterator[Tensor]) -> Any:
    return next(left) if plan is None else plan.run([next(left) for _ in range(plan.size())])


class Recipe:
    """A plan with its ingredients, attached to the tensor that was made by it."""

    def __init__(self, plan: Plan, ingredients: list[Tensor], version: int) -> None:
        self.plan, self.ingredients, self.version = plan, ingredients, version


def recipe_of(x: Any) -> Recipe | None:
    """The recipe that x carries; None if there is none, or if x was changed in place since."""
    recipe = getattr(x, "_recipe", None)
    return recipe if recipe is not None and recipe.version == x._version else None


def remember(x: Tensor, make: Callable[..., Tensor], *parts: Tensor | None) -> Tensor:
    """Attach to x = make(*parts) how it was made; `make` is a module-level function that holds no tensors."""
    if x.requires_grad and not torch.compiler.is_compiling():
        plan, ingredients = _spread(parts)
        x._recipe = Recipe(Plan(make, plan), ingredients, x._version)  # type: ignore[attr-defined]
    return x


def remember_all(each: Sequence[Tensor], make: Callable[..., Sequence[Tensor]], *parts: Tensor | None) -> None:
    """Attach to several tensors (x, y, ...) = make(*parts) how they were made; backward makes them all at once."""
    if torch.compiler.is_compiling():
        return
    plan, ingredients = _spread(parts)
    together = Plan(make, plan)
    for i, x in enumerate(each):
        x._recipe = Recipe(Plan(itemgetter(i), [together]), ingredients, x._version)  # type: ignore[attr-defined]


def same(alias: Tensor, x: Tensor) -> Tensor:
    """Let an alias of x carry the recipe of x."""
    recipe = recipe_of(x)
    if recipe is not None:
        alias._recipe = recipe  # type: ignore[attr-defined]
    return alias


def _spread(tensors: tuple[Tensor | None, ...]) -> tuple[list[Plan | None], list[Any]]:
    plans: list[Plan | None] = []
    ingredients: list[Any] = []
    for tensor in tensors:
        recipe = recipe_of(tensor)
        plans.append(recipe.plan if recipe else None)
        ingredients.extend(recipe.ingredients if recipe else [tensor])
    return plans, ingredients


def keep(ctx: Any, *tensors: Tensor | None) -> None:
    """`ctx.save_for_backward`, but with the ingredients in place of every tensor that carries a recipe."""
    if torch.compiler.is_compiling():
        ctx.plans = [None] * len(tensors)
        ctx.save_for_backward(*tensors)
        return
    ctx.plans, ingredients = _spread(tensors)
    for plan in ctx.plans:
        if plan is not None:
            plan.reserve()
    ctx.save_for_backward(*ingredients)


def kept(ctx: Any) -> list[Any]:
    """`ctx.saved_tensors`, with every tensor that was not saved made again."""
    left = iter(ctx.saved_tensors)
    with torch.no_grad():
        return [_take(plan, left) for plan in ctx.plans]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.save_for_backward(*inputs)
        return run(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[1:]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_(want) for x, want in zip(ctx.saved_tensors, wanted, strict=True)]
            pairs = [(y, g) for y, g in zip(ctx.run(*inputs), grads, strict=True) if y.requires_grad]
            found = iter(
                torch.autograd.grad(
                    [y for y, _ in pairs], [x for x in inputs if x.requires_grad], [g for _, g in pairs],
                    allow_unused=True,
                )
            )  # fmt: skip
        return None, *(next(found) if want else None for want in wanted)


def recomputed(run: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> tuple[Tensor, ...]:
    """run(*inputs), of which autograd keeps the inputs alone; backward runs it again.

    For many small steps, such as Sinkhorn iterations. Under `torch.compile` it is run plainly: the compiler decides
    itself what to recompute.

    Args:
        run: a function of tensors without randomness that returns a tuple of tensors; what it closes over is constant.
        inputs: every tensor that may need a gradient.
    """
    return run(*inputs) if torch.compiler.is_compiling() else _Recomputed.apply(run, *inputs)
