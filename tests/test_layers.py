"""The shared layers against plain formulas and torch's own, in fp64 and in the narrow types."""

import math

import pytest
import torch
from torch.nn import functional as F

from depthlit.layers import Attention, Context, RMSNorm, SwiGLU, _RMSNorm, rotate
from depthlit.shape import ShapeSpec

SHAPE = ShapeSpec(2, 48, n_head=4, n_kv_head=2, vocab_size=61)


@pytest.mark.parametrize("gain", [True, False])
def test_rms_norm_and_its_gradient(gain):
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(16, dtype=torch.float64, requires_grad=True) if gain else None
    ours = _RMSNorm.apply(x, weight, 1e-3)
    torch.testing.assert_close(ours, F.rms_norm(x, (16,), weight, 1e-3), rtol=1e-13, atol=1e-13)
    inputs = (x, weight) if gain else (x,)
    assert torch.autograd.gradcheck(lambda x, weight=None: _RMSNorm.apply(x, weight, 1e-3), inputs)


def test_rms_norm_is_computed_in_fp32_and_returned_narrow():
    x = (torch.randn(4, 512) * 3).bfloat16()
    norm = RMSNorm(512)
    y = norm(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, F.rms_norm(x.double(), (512,), None, 1e-6).bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert norm(x.float()).dtype == torch.float32


def test_rms_norm_of_zero_is_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    RMSNorm(8, eps=1e-12)(x).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_rotary_phases_are_exact_far_out():
    """The phases of a bf16 model at positions up to 4095, against fp64 (hazard: bf16 phases are off by 0.8)."""
    context = Context.of(SHAPE, torch.zeros(1, 4096), torch.bfloat16)
    speed = torch.tensor([10_000.0 ** (-2 * j / 12) for j in range(6)], dtype=torch.float64)
    angle = torch.arange(4096, dtype=torch.float64)[:, None] * speed
    assert context.cos.dtype == torch.float32
    assert (context.cos.double() - angle.cos()).abs().max() < 1e-6
    assert (context.sin.double() - angle.sin()).abs().max() < 1e-6


def test_rotation_turns_pairs_by_position():
    x = torch.randn(1, 2, 7, 12, dtype=torch.float64)
    y = rotate(x, Context.of(SHAPE, torch.zeros(1, 7), torch.float64))
    for t in range(7):
        for j in range(6):
            angle = t * 10_000.0 ** (-2 * j / 12)
            a, b = x[0, :, t, j], x[0, :, t, j + 6]
            torch.testing.assert_close(y[0, :, t, j], a * math.cos(angle) - b * math.sin(angle))
            torch.testing.assert_close(y[0, :, t, j + 6], b * math.cos(angle) + a * math.sin(angle))


def test_attention_and_swiglu_are_their_formulas():
    attn, mlp = Attention(SHAPE).double(), SwiGLU(SHAPE).double()
    x = torch.randn(2, 6, 48, dtype=torch.float64)
    context = Context.of(SHAPE, x[..., 0], torch.float64)
    y = attn.at(context)(x)
    q, k = (rotate(attn.split(project(x)), context) for project in (attn.q, attn.k))
    v = attn.split(attn.v(x))
    expected = torch.zeros(2, 6, 4, 12, dtype=torch.float64)
    for h in range(4):
        for t in range(6):
            score = (q[:, h, t, None] * k[:, h // 2, : t + 1]).sum(-1) / math.sqrt(12)
            expected[:, t, h] = (score.softmax(-1).unsqueeze(-1) * v[:, h // 2, : t + 1]).sum(1)
    torch.testing.assert_close(y, expected.flatten(-2) @ attn.out.weight.T)
    gate = x @ mlp.gate.weight.T
    torch.testing.assert_close(mlp(x), (gate / (1 + (-gate).exp()) * (x @ mlp.up.weight.T)) @ mlp.out.weight.T)


def test_documents_do_not_see_each_other():
    attn = Attention(SHAPE).double()
    x = torch.randn(1, 9, 48, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 2, 2]])
    together = attn(x, Context.of(SHAPE, documents, torch.float64, documents))
    for part in (slice(0, 4), slice(4, 6), slice(6, 9)):
        alone = attn(x[:, part], Context.of(SHAPE, documents[:, part], torch.float64))
        torch.testing.assert_close(together[:, part], alone)
