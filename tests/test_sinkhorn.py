"""Doubly stochastic matrices: sums, fixed points, gradients."""

from collections.abc import Callable

import pytest
import torch
from stream_steps import M, rand
from torch import Tensor
from torch.autograd import gradcheck

from depthlit.mixers.sinkhorn import rounded, sinkhorn
from depthlit.recipe import recomputed


@pytest.mark.parametrize("scale", [1.0, 10.0, 30.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sinkhorn_sums(scale: float, dtype: torch.dtype) -> None:
    """Any logits: finite, not negative, the sums normalised last are 1; all sums are, once rounded."""
    z = (scale * torch.randn(M, M, 2000, generator=torch.Generator().manual_seed(0))).to(dtype).requires_grad_()
    for order, last in (("paper", 1), ("liger", 0)):
        m = sinkhorn(z, 20, order)
        assert m.dtype == dtype and m.isfinite().all() and m.min() >= 0
        assert (m.sum(last) - 1).abs().max() < 1e-3
        for matrix in (m, rounded(m)):
            (gradient,) = torch.autograd.grad(matrix.square().sum(), z, retain_graph=True)
            assert gradient.isfinite().all()
        exact = rounded(m)
        assert exact.min() >= 0
        for dim in (0, 1):
            assert (exact.sum(dim) - 1).abs().max() < (1e-12 if dtype == torch.float64 else 1e-5)
    if scale == 1:
        assert (sinkhorn(z, 20) - rounded(sinkhorn(z, 20))).abs().max() < 1e-3
        assert (sinkhorn(z, 500) - sinkhorn(z, 500, "liger", eps=0)).abs().max() < 1e-5


def test_sinkhorn_keeps_doubly_stochastic() -> None:
    """Permutations and mixtures of them stay what they are; adding to a row or a column of logits changes nothing."""
    p = 0.5 * torch.eye(M).double() + 0.3 * torch.eye(M).double().roll(1, 0) + 0.05
    torch.testing.assert_close(sinkhorn(p.log(), 5), p)
    torch.testing.assert_close(rounded(p), p)
    z = rand(M, M, grad=False)
    moved = z + rand(M, 1, seed=1, grad=False) + rand(1, M, seed=2, grad=False)
    torch.testing.assert_close(sinkhorn(moved, 500), sinkhorn(z, 500))


@pytest.mark.parametrize("run", [
    lambda z: (sinkhorn(z, 20),), lambda z: (sinkhorn(z, 20, "liger"),), lambda z: (rounded(sinkhorn(z, 3, "liger")),),
])  # fmt: skip
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_gradients_of_recomputed_sinkhorn(run: Callable[[Tensor], tuple[Tensor, ...]], scale: float) -> None:
    z = scale * rand(M, M, 3, grad=False)
    assert gradcheck(lambda z: recomputed(run, z), (z.requires_grad_(),), atol=1e-6)
