"""Mixing ahead for many readers, and the rest of their mixtures, against the bare formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from depthlit.mixers import ahead
from depthlit.mixers.ahead import mix_ahead, scores
from depthlit.mixers.depth import Ahead, Source, mix
from depthlit.recipe import recipe_of

READERS = 3


class Given:
    """Sources v0, v1, 2 v2 - v1, -v3 that are mixed ahead for three readers, and v4, which is not."""

    def __init__(self, size: tuple[int, ...], dtype: torch.dtype = torch.float64) -> None:
        self.generator, self.size = torch.Generator().manual_seed(len(size)), size
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.values = [self.random(*size, like=dtype, loud=loud) for loud in (0.3, 1.0, 2.5, 0.7, 1.3)]
        self.rows = [[(0, 1.0)], [(1, 1.0)], [(2, 2.0), (1, -1.0)], [(3, -1.0)]]
        self.scales = [self.random(*size[:-1]) for _ in range(5)]
        self.matches = [None, None, self.random(*size[:-1]), self.random(*size[:-1])]
        self.keys = [self.random(size[-1]) for _ in range(READERS)]
        self.bias = self.random(5, READERS)
        self.constant = 0.7

    def random(self, *shape: int, like: torch.dtype | None = None, loud: float = 1.0) -> Tensor:
        drawn = loud * torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(like or self.wide).requires_grad_()

    @property
    def leaves(self) -> list[Tensor]:
        return [*self.values, *self.scales, *(m for m in self.matches if m is not None), *self.keys, self.bias]

    def early(self) -> list[Source]:
        parts = [tuple((self.values[i], factor) for i, factor in row) for row in self.rows]
        return [Source(*each) for each in zip(parts, self.scales, self.matches, strict=False)]

    def mixed(self, based: bool) -> list[Tensor]:
        """In two phases. With a base, what is ahead counts its constant there."""
        keys = torch.stack(self.keys)
        dots = {id(v): scores(keys, v) for v in self.values[:4]}
        found = mix_ahead(self.early(), dots, self.bias[:4])
        constant = self.constant if based else 0.0
        base = (
            sum(constant * factor * self.values[i].to(self.wide) for row in self.rows for i, factor in row)
            if based
            else None
        )
        late = [Source(((self.values[4], 1.0),), self.scales[4])]
        return [
            mix(late, key, self.bias[4:, r], constant, True, ahead=Ahead(*found[r], None, base))
            for r, key in enumerate(self.keys)
        ]

    def bare(self, based: bool) -> list[Tensor]:
        """By the formula: everything stacked, every step left to autograd."""
        rows = [*self.rows, [(4, 1.0)]]
        u = torch.stack([sum(factor * self.values[i] for i, factor in row) for row in rows])
        m = torch.stack([torch.ones_like(self.scales[0]) if m is None else m for m in [*self.matches, None]])
        found = []
        for r, key in enumerate(self.keys):
            score = torch.stack(self.scales) * (u * key).sum(-1)
            score = score + self.bias[:, r].view(-1, *[1] * (score.dim() - 1))
            p = torch.cat((score, torch.zeros_like(score[:1]))).softmax(0)[:5]
            found.append((((self.constant if based else 0.0) + m * p)[..., None] * u).sum(0))
        return found


@pytest.fixture(params=["whole", "in pieces"], autouse=True)
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """In pieces: one or two tokens at a time, and the gradients of the values in parts of three."""
    if request.param == "in pieces":
        monkeypatch.setitem(ahead.BLOCK, "cpu", 300)
        monkeypatch.setattr(ahead, "AT_ONCE", 3)
    return request.param


@pytest.mark.parametrize("size", [(2, 3, 5), (7, 4)], ids=str)
@pytest.mark.parametrize("based", [False, True])
def test_two_phases_are_the_formula(size: tuple[int, ...], based: bool) -> None:
    given = Given(size)
    own, wanted = given.mixed(based), given.bare(based)
    torch.testing.assert_close(own, wanted, rtol=1e-13, atol=1e-13)
    g = [given.random(*size).detach() for _ in own]
    first, second = (torch.autograd.grad(each, given.leaves, g, allow_unused=True) for each in (own, wanted))
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-12)


def test_a_reader_who_is_never_asked_leaves_the_others_right() -> None:
    given = Given((2, 3, 5))
    own, wanted = (torch.autograd.grad(each[1].sum(), given.values) for each in (given.mixed(True), given.bare(True)))
    torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-13)


def test_scores_far_apart() -> None:
    """No overflow, and who is negligible has a gradient of zero."""
    given = Given((2, 3, 5))
    with torch.no_grad():
        given.bias.copy_(torch.tensor([[800.0], [-800.0], [0.0], [1e4], [0.0]]).expand(5, READERS))
    own, wanted = given.mixed(False), given.bare(False)
    torch.testing.assert_close(own, wanted, rtol=1e-12, atol=1e-12)
    for z in own:
        assert all(x.isfinite().all() for x in torch.autograd.grad(z.sum(), given.values, retain_graph=True))


def test_mixtures_of_bf16_are_made_in_fp32() -> None:
    """The sum at the end alone is rounded, also under autocast, as are the gradients."""
    given, exact = (Given((2, 3, 5), dtype) for dtype in (torch.bfloat16, torch.float64))
    with torch.no_grad():
        for x, y in zip(exact.leaves, given.leaves, strict=True):
            x.copy_(y)
    with torch.autocast("cpu", torch.bfloat16):
        own = given.mixed(True)
    wanted = exact.bare(True)
    for x, y in zip(own, wanted, strict=True):
        assert x.dtype == torch.bfloat16
        torch.testing.assert_close(x.double(), y, rtol=2**-8, atol=1e-6)
    g = [given.random(*given.size).to(torch.bfloat16).detach() for _ in own]
    first = torch.autograd.grad(own, given.values, g)
    second = torch.autograd.grad(wanted, exact.values, [x.double() for x in g])
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=2**-6, atol=2**-6)


def test_backward_keeps_references_and_makes_the_mixtures_again() -> None:
    given = Given((4, 8, 16))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        own = given.mixed(True)
    owned = {v.data_ptr() for v in given.values}
    wide = [x for x in kept if x.shape == given.size and x.data_ptr() not in owned]
    assert not wide and all(recipe_of(z) is not None for z in own)
