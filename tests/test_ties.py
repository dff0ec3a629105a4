"""Members of one family are the same function where they should be: equal logits and gradients with shared weights.

Weights of equal names are shared and random; a strategy's own weights stand at their initial values, unless a tie says
otherwise. Every eps is tiny: behind a mixture of k sources a norm's eps weighs k^2 times as much (`BEHIND_A_MIXTURE`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import CLASSES, TINY, build, set_eps, tokens_for, with_weights_of
from torch import Tensor

from depthlit import residuals
from depthlit.decoder import Decoder

ONE_BLOCK = replace(TINY, n_layer=1)
Spec = tuple[str, dict[str, Any]]


def gates_at_one(decoder: Decoder) -> None:
    fill(decoder, "gate", 1.0)


def no_details(decoder: Decoder) -> None:
    fill(decoder, "bias", -torch.inf)


@torch.no_grad()
def fill(decoder: Decoder, name: str, value: float) -> None:
    found = [p for n, p in decoder.named_parameters() if n.endswith(f".{name}")]
    assert found
    for p in found:
        p.fill_(value)


PRE_LN: Spec = ("PreLN", {})
TIES: dict[str, tuple[Spec, Spec, Any, Callable[[Decoder], None] | None]] = {
    "LNS in its first layer is Pre-LN": (("LNS", {}), PRE_LN, ONE_BLOCK, None),
    "LNS without scaling is Pre-LN": (("LNS", {"scale": 1.0}), PRE_LN, TINY, None),
    "KEEL's first block is Pre-LN": (("KEEL", {}), PRE_LN, ONE_BLOCK, None),
    "ReZero with open gates is Pre-LN": (("ReZero", {}), PRE_LN, TINY, gates_at_one),
    "LayerScale at one is Pre-LN": (("LayerScale", {"init": 1.0}), PRE_LN, TINY, None),
    "MoDA's first block is Pre-LN": (("MoDA", {}), PRE_LN, ONE_BLOCK, None),
    "MoDA's first block is Post-LN": (("MoDA", {"norm": "post"}), ("PostLN", {}), ONE_BLOCK, None),
    "MoDA without memory is Pre-LN": (("MoDA", {"memory": "none"}), PRE_LN, TINY, None),
    "MoDA: turning both is turning none": (("MoDA", {}), ("MoDA", {"depth_rope": "none"}), TINY, None),
}


def of(spec: Spec, shape: Any, random: bool = False) -> Decoder:
    return set_eps(build(getattr(residuals, spec[0])(**spec[1]), shape, random=random), 1e-14)


def compare(one: Decoder, other: Decoder, tokens: Tensor) -> tuple[float, float]:
    """Largest relative difference of the logits, and of the gradients of weights that both have."""

    def off(a: Tensor, b: Tensor) -> float:
        return float((a - b).detach().norm() / b.detach().norm())

    for decoder in (one, other):
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    a, b = dict(one.named_parameters()), dict(other.named_parameters())
    shared = [name for name in b if name in a and a[name].shape == b[name].shape]
    assert len(shared) > 5
    gradients = [(a[name].grad, b[name].grad) for name in shared]
    return (
        off(one(tokens), other(tokens)),
        max(off(x, y) for x, y in gradients if x is not None and y is not None),
    )


@pytest.mark.parametrize("one, other, shape, change", TIES.values(), ids=TIES)
def test_family_ties(one: Spec, other: Spec, shape: Any, change: Callable[[Decoder], None] | None) -> None:
    b = of(other, shape, random=True)
    a = with_weights_of(of(one, shape), b)
    if change is not None:
        change(a)
    logits, gradients = compare(a, b, tokens_for(TINY))
    assert logits < 1e-9 and gradients < 1e-8


STARTS_AS_PRE_LN = {"PreLN", "HC", "MHC", "FullAttnRes", "BlockAttnRes"}


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls.__module__.startswith("depthlit.")])
def test_who_starts_as_pre_ln_and_who_does_not(cls: type) -> None:
    """At its own initial weights, with the random backbone of Pre-LN."""
    plain = of(PRE_LN, TINY, random=True)
    logits, _ = compare(with_weights_of(of((cls.__name__, {}), TINY), plain), plain, tokens_for(TINY))
    assert logits < 1e-9 if cls.__name__ in STARTS_AS_PRE_LN else logits > 1e-2
