"""The mixture of sources over depth: function and gradients against the bare formula, numbers, and what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthlit.mixers import depth
from depthlit.mixers.depth import Source, mix, weights
from depthlit.mixers.loudness import Match, again, loudness
from depthlit.recipe import recipe_of


def ingredients(combined: bool, seed: int = 0, size: tuple[int, ...] = (2, 3, 5)) -> dict[str, Any]:
    """Tensors of unequal norms for five sources: v0, v1, 2 v2 - v1, -v3 and v3."""
    draw = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()

    values = [random(*size) for _ in range(4)]
    with torch.no_grad():
        for v, factor in zip(values, (0.3, 1.0, 2.5, 0.7), strict=True):
            v.mul_(factor)
    scales = [random(*size[:-1]) for _ in range(5)]
    matches = [None, None, random(*size[:-1]), random(*size[:-1]), None] if combined else [None] * 5
    factors = [[(0, 1.0)], [(1, 1.0)], [(2, 2.0), (1, -1.0)], [(3, -1.0)], [(3, 1.0)]] if combined else None
    rows = factors or [[(i % 4, 1.0)] for i in range(5)]
    return {
        "values": values, "scales": scales, "matches": matches, "rows": rows, "constant": 0.7 if combined else 0.0,
        "key": random(size[-1]), "bias": random(5) if combined else None, "null": combined,
    }  # fmt: skip


def leaves(given: dict[str, Any]) -> list[Tensor]:
    found = [*given["values"], *given["scales"], *given["matches"], given["key"], given["bias"]]
    return [x for x in found if x is not None]


def sources(given: dict[str, Any]) -> list[Source]:
    parts = [tuple((given["values"][i], factor) for i, factor in row) for row in given["rows"]]
    return [Source(*each) for each in zip(parts, given["scales"], given["matches"], strict=True)]


def mixed(given: dict[str, Any]) -> Tensor:
    return mix(sources(given), *(given[name] for name in ("key", "bias", "constant", "null")))


def bare(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """z and p by the formula: everything stacked, every step left to autograd."""
    u = torch.stack([sum(factor * given["values"][i] for i, factor in row) for row in given["rows"]])
    score = torch.stack(given["scales"]) * (u * given["key"]).sum(-1)
    if given["bias"] is not None:
        score = score + given["bias"][:, None, None]
    if given["null"]:
        score = torch.cat((score, torch.zeros_like(score[:1])))
    p = score.softmax(0)[:5]
    m = torch.stack([torch.ones_like(p[0]) if m is None else m for m in given["matches"]])
    return ((given["constant"] + m * p)[..., None] * u).sum(0), p


@pytest.fixture(params=[8, 2], ids=["at once", "in parts"])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With 2, gradients of four values are made in two parts, as those of many are by default."""
    monkeypatch.setattr(depth, "AT_ONCE", request.param)
    return request.param


@pytest.mark.parametrize("combined", [False, True])
def test_mix_is_the_formula(combined: bool, at_once: int) -> None:
    given = ingredients(combined)
    z, (expected, p) = mixed(given), bare(given)
    torch.testing.assert_close(z, expected, rtol=1e-13, atol=1e-14)
    shares = weights(sources(given), given["key"], given["bias"], given["null"])
    torch.testing.assert_close(shares, p.movedim(0, -1), rtol=1e-13, atol=1e-14)
    g = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(5))
    for own, wanted in zip(
        torch.autograd.grad(z, leaves(given), g), torch.autograd.grad(expected, leaves(given), g), strict=True
    ):
        torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("combined", [False, True])
def test_gradcheck(combined: bool, at_once: int) -> None:
    given = ingredients(combined, size=(1, 2, 3))
    inputs = leaves(given)

    def of(*tensors: Tensor) -> Tensor:
        swap = {id(x): y for x, y in zip(inputs, tensors, strict=True)}
        changed = {
            name: [swap.get(id(x), x) for x in x_] if isinstance(x_, list) else swap.get(id(x_), x_)
            for name, x_ in given.items()
        }
        return mixed(changed)

    assert torch.autograd.gradcheck(of, inputs)
    a, b = given["values"][:2]
    for one in (1.0, -1.0):
        assert torch.autograd.gradcheck(lambda x, f=one: loudness(((x, f),), 0.1).scale, a)
    assert torch.autograd.gradcheck(lambda x, y: loudness(((x, 2.0), (y, -1.0)), 0.1).scale, (a, b))


def test_loudness() -> None:
    """k and m by the formula, and their gradients: m is a constant."""
    given = ingredients(True)
    a, b = given["values"][1:3]
    target = b.square().mean(-1) * torch.linspace(0.1, 30, 6, dtype=b.dtype).view(2, 3)  # from too soft to too loud
    own = loudness(((b, 2.0), (a, -1.0)), 1e-2, Match(target, 1.5, 0.1))
    u = 2 * b - a
    m = (target.sqrt() / (u.square().mean(-1).sqrt() + 0.1)).clamp(1 / 1.5, 1.5).detach()
    k = m / ((m[..., None] * u).square().mean(-1) + 1e-2).sqrt()
    torch.testing.assert_close(own.match, m, rtol=1e-13, atol=0)
    torch.testing.assert_close(own.square, u.square().mean(-1), rtol=1e-13, atol=0)
    torch.testing.assert_close(own.scale, k, rtol=1e-12, atol=0)
    assert own.match is not None and not own.match.requires_grad and not own.square.requires_grad
    assert own.match.min() == 1 / 1.5 and own.match.max() == 1.5 and len(own.match.unique()) > 2
    g = torch.randn(k.shape, dtype=k.dtype, generator=torch.Generator().manual_seed(5))
    for x, y in zip(torch.autograd.grad(own.scale, (a, b), g), torch.autograd.grad(k, (a, b), g), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-13)
    match = Match(target, 1.5, 0.1)
    straight, shortcut = loudness(((a, -1.0),), 1e-2, match), again(loudness(((a, 1.0),), 1e-2), 1e-2, match)
    torch.testing.assert_close(shortcut, straight, rtol=1e-12, atol=0)
    x, y = (torch.autograd.grad(each.scale, a, g)[0] for each in (straight, shortcut))
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14)


def test_only_what_is_asked_for_gets_a_gradient(at_once: int) -> None:
    """A frozen embedding, and a tensor that takes part twice."""
    given = ingredients(False)
    frozen = given["values"][1].detach()
    given["values"][1] = frozen
    mixed(given).sum().backward()
    assert frozen.grad is None and all(v.grad is not None for v in (given["values"][0], given["values"][2]))


def test_what_backward_keeps(at_once: int) -> None:
    """References to the values and scales, the query, and one dot product per token and source: nothing of size D."""
    given = ingredients(False, size=(2, 3, 64))
    kept: dict[int, Tensor] = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        mixed(given)
    own = {x.data_ptr() for x in leaves(given)}
    assert sum(x.numel() for p, x in kept.items() if p not in own) == 5 * 2 * 3


def test_the_recipe_makes_the_mixture_again() -> None:
    given = ingredients(True)
    z = mixed(given)
    recipe = recipe_of(z)
    assert recipe is not None
    recipe.plan.reserve()
    assert torch.equal(recipe.plan.run(recipe.ingredients), z)


def test_routing_is_never_narrower_than_fp32() -> None:
    given = ingredients(False, size=(2, 3, 64))
    values, key = [v.bfloat16() for v in given["values"]], given["key"].float().detach()
    rounded = [Source(((v, 1.0),), loudness(((v, 1.0),), 1e-6).scale) for v in values]
    exact = [Source(((v.double(), 1.0),), torch.rsqrt(v.double().square().mean(-1) + 1e-6)) for v in values]
    with torch.autocast("cpu", torch.bfloat16):
        p, z = weights(rounded, 3 * key), mix(rounded, 3 * key)
    wanted = weights(exact, 3 * key)
    assert p.dtype == torch.float32 and z.dtype == torch.bfloat16 and wanted.dtype == torch.float64
    torch.testing.assert_close(p.double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(z.double(), mix(exact, 3 * key), rtol=2**-8, atol=1e-6)
