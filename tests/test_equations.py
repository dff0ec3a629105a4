"""Every strategy computes its paper's equation: logits and all gradients equal a naive fp64 reference (reference.py).

Weights are random and far from their special initial values: zero queries and unit scales would hide almost any error.
"""

from functools import partial
from typing import Any

import pytest
import reference
import torch
from cases import CASES, Reference
from models import CLASSES, build, label, tokens_for
from reference import Net
from torch import Tensor

from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.shape import ShapeSpec

SHAPES = (
    ShapeSpec(n_layer=4, d_model=24, n_head=6, n_kv_head=2, d_ff=40, vocab_size=19),
    ShapeSpec(n_layer=3, d_model=16, n_head=2, d_ff=24, vocab_size=11, rope_theta=500.0, norm_eps=1e-3),
    ShapeSpec(n_layer=1, d_model=20, n_head=5, n_kv_head=1, vocab_size=7, tie_embeddings=True, norm_eps=1e-4),
)


def relative_error(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


LANDED = [
    (getattr(residuals, name)(**settings), equation) for name, settings, equation in CASES if name in residuals.__all__
]


@pytest.mark.parametrize("strategy, equation", LANDED, ids=label)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"L{s.n_layer}d{s.d_model}")
def test_equals_the_equation(strategy: ResidualStrategy, equation: Reference, shape: ShapeSpec) -> None:
    decoder = build(strategy, shape, seed=shape.d_model, random=True)
    tokens = tokens_for(shape, 2, 6)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    weights = {n: p.detach().clone().requires_grad_() for n, p in decoder.named_parameters()}
    expected = equation(Net(weights, shape, inputs))
    assert relative_error(decoder(inputs), expected) < 1e-9

    nll = -expected.log_softmax(-1).gather(-1, targets[..., None]).mean()
    loss = decoder(inputs, targets)
    assert relative_error(loss.mean(), nll) < 1e-10
    loss.mean().backward()
    wanted = torch.autograd.grad(nll, list(weights.values()))
    for (n, p), gradient in zip(decoder.named_parameters(), wanted, strict=True):
        assert p.grad is not None and gradient.abs().max() > 0, n
        assert relative_error(p.grad, gradient) < 1e-9, n


def test_every_strategy_has_a_reference() -> None:
    assert {cls.__name__ for cls in CLASSES} == {name for name, _, _ in CASES}


WRONG: dict[str, tuple[str, dict[str, Any], Reference]] = {
    "eps of the keys": ("FullAttnRes", {}, partial(reference.full_attn_res, key_eps=1e-5)),
    "eps behind a mixture": ("BlockAttnRes", {}, partial(reference.block_attn_res, norm_eps=1e-6)),
    "border of a group": ("BlockAttnRes", {"block_size": 3}, partial(reference.block_attn_res, block_size=2)),
    "cap of the match": ("WAV", {"block_size": 4, "max_match": 1.3}, partial(reference.wav, block_size=4, rho=1.4)),
    "eps of the match": ("WAV", {"block_size": 4}, partial(reference.wav, block_size=4, match_eps=1e-5)),
    "bases exchanged": ("WAV", {"block_size": 4}, partial(reference.wav, block_size=4, details=("split", "phase"))),
    "eps of the streams": ("HC", {}, partial(reference.hyper_connections, streams=4, eps=1e-6)),
    "order of Sinkhorn": ("MHC", {}, partial(reference.m_hyper_connections, order="liger")),
    "one iteration less": ("MHC", {}, partial(reference.m_hyper_connections, iterations=19)),
    "eps of the flat norm": ("MHC", {}, partial(reference.m_hyper_connections, eps=1e-6)),
    "depth keys turned": ("MoDA", {}, partial(reference.moda, post_norm=False, depth_rope="q_only")),
    "highway": ("KEEL", {}, partial(reference.keel, alpha="n_layer", plain=2)),
    "layer": ("LNS", {}, partial(reference.lns, scale="depth")),
}


@pytest.mark.parametrize("name, settings, equation", WRONG.values(), ids=WRONG)
def test_a_wrong_equation_is_noticed(name: str, settings: dict[str, Any], equation: Reference) -> None:
    decoder = build(getattr(residuals, name)(**settings), SHAPES[0], random=True)
    tokens = tokens_for(SHAPES[0], 2, 6)
    weights = {n: p.detach() for n, p in decoder.named_parameters()}
    assert relative_error(decoder(tokens), equation(Net(weights, SHAPES[0], tokens))) > 1e-7
