"""Designs that differ from Pre-LN by norms, constants and gates: equations, initial weights, presets, counts."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import build, tokens_for
from torch import Tensor, nn

from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.interventions import tapped
from depthlit.layers import Context
from depthlit.residuals import KEEL, LNS, DeepNorm, LayerScale, PostLN, PreLN, ReZero, SandwichLN
from depthlit.shape import ShapeSpec

SHAPE = ShapeSpec(n_layer=3, d_model=12, n_head=3, n_kv_head=1, d_ff=20, vocab_size=17, norm_eps=1e-3)
L, D = SHAPE.n_layer, SHAPE.d_model
Step = Callable[[int, Tensor, Callable[[Tensor], Tensor], dict[str, Tensor]], Tensor]


# ------------------------------------------------------------------------------------------------ equations


def rms(x: Tensor, gain: Tensor) -> Tensor:
    """Channel by channel."""
    mean_square = sum(x[..., c] ** 2 for c in range(D)) / D
    return torch.stack([gain[c] * x[..., c] / (mean_square + SHAPE.norm_eps) ** 0.5 for c in range(D)], -1)


def layer_norm(x: Tensor, gain: Tensor, bias: Tensor | None = None) -> Tensor:
    mean = sum(x[..., c] for c in range(D)) / D
    variance = sum((x[..., c] - mean) ** 2 for c in range(D)) / D
    rows = [gain[c] * (x[..., c] - mean) / (variance + SHAPE.norm_eps) ** 0.5 for c in range(D)]
    return torch.stack(rows if bias is None else [row + bias[c] for c, row in enumerate(rows)], -1)


def post_ln(k: int, h: Tensor, F: Any, w: dict[str, Tensor]) -> Tensor:
    return rms(h + F(h), w["norm.weight"])


def sandwich(k: int, h: Tensor, F: Any, w: dict[str, Tensor]) -> Tensor:
    return h + rms(F(rms(h, w["norm.weight"])), w["post.weight"])


def lns(factor: Callable[[int], float]) -> Step:
    return lambda k, h, F, w: h + F(factor(k // 2 + 1) * rms(h, w["norm.weight"]))


def deep_norm(norm: Callable[..., Tensor]) -> Step:
    return lambda k, h, F, w: norm(math.sqrt(math.sqrt(2 * L)) * h + F(h), *w.values())


def keel(alpha: float, plain: int) -> Step:
    def step(k: int, h: Tensor, F: Any, w: dict[str, Tensor]) -> Tensor:
        y = F(rms(h, w["norm.weight"]))
        if k < plain:
            return h + y
        return rms((alpha if k >= 2 else 1.0) * h + y, w["post.weight"])

    return step


def re_zero(k: int, h: Tensor, F: Any, w: dict[str, Tensor]) -> Tensor:
    x = rms(h, w["norm.weight"]) if "norm.weight" in w else h
    return h + w["gate"][0] * F(x)


def layer_scale(k: int, h: Tensor, F: Any, w: dict[str, Tensor]) -> Tensor:
    y = F(rms(h, w["norm.weight"]))
    return torch.stack([h[..., c] + w["scale"][c] * y[..., c] for c in range(D)], -1)


CASES: list[tuple[ResidualStrategy, Step]] = [
    (PostLN(), post_ln),
    (SandwichLN(), sandwich),
    (SandwichLN(embedding_norm=True), sandwich),
    (LNS(), lns(lambda l: 1 / math.sqrt(l))),
    (LNS(scale="depth"), lns(lambda l: 1 / math.sqrt(L))),
    (LNS(scale=0.3), lns(lambda l: 0.3)),
    (DeepNorm(), deep_norm(layer_norm)),
    (DeepNorm(norm="layernorm_bias"), deep_norm(layer_norm)),
    (DeepNorm(norm="rmsnorm"), deep_norm(rms)),
    (KEEL(), keel(2 * L, plain=2)),
    (KEEL(preset="depthbench"), keel(2 * L, plain=1)),
    (KEEL(alpha="n_layer"), keel(L, plain=2)),
    (KEEL(alpha=0.7, first_block="preln_attn_only"), keel(0.7, plain=1)),
    (ReZero(), re_zero),
    (ReZero(norm=False), re_zero),
    (LayerScale(), layer_scale),
]


@pytest.mark.parametrize("strategy, step", CASES, ids=[str(case[0]) for case in CASES])
def test_equals_its_equation(strategy: ResidualStrategy, step: Step) -> None:
    """Forward and all gradients; the branches are the package's own, everything else is spelled out here."""
    decoder, twin = (build(strategy, SHAPE, seed=5, random=True) for _ in range(2))
    tokens = tokens_for(SHAPE, 2, 5)
    context = Context.of(SHAPE, tokens, torch.float64)
    h = twin.embed(tokens)
    if isinstance(strategy, SandwichLN) and strategy.embedding_norm:
        h = rms(h, twin.entry.norm.weight)
    for k in range(2 * L):
        block = twin.blocks[k // 2]
        join = block.join_mlp if k % 2 else block.join_attn
        branch = block.mlp if k % 2 else (lambda x, attn=block.attn: attn(x, context))
        h = step(k, h, branch, dict(join.named_parameters()))
    expected = rms(h, twin.norm.weight) @ twin.head.weight.T

    logits = decoder(tokens)
    assert float((logits - expected).detach().abs().max() / expected.detach().abs().max()) < 1e-12
    weigh = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weigh).sum().backward()
    (expected * weigh).sum().backward()
    for (name, a), b in zip(decoder.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and b.grad.abs().max() > 0, name
        assert float((a.grad - b.grad).abs().max() / b.grad.abs().max()) < 1e-9, name


@pytest.mark.parametrize("strategy", [case[0] for case in CASES], ids=str)
def test_the_future_is_not_seen(strategy: ResidualStrategy) -> None:
    decoder, tokens = build(strategy, SHAPE, random=True), tokens_for(SHAPE)
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % SHAPE.vocab_size
    a, b = decoder(tokens), decoder(other)
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=1e-12, atol=1e-12)
    assert float((a[:, 4:] - b[:, 4:]).detach().abs().amax(-1).min()) > 1e-9


@pytest.mark.parametrize("strategy", [case[0] for case in CASES], ids=str)
def test_bf16_is_finite_and_near(strategy: ResidualStrategy) -> None:
    decoder, tokens = build(strategy, SHAPE, random=True), tokens_for(SHAPE, 4, 9)
    exact = decoder(tokens[:, :-1], tokens[:, 1:]).detach()
    narrow = build(strategy, SHAPE, random=True).bfloat16()
    loss = narrow(tokens[:, :-1], tokens[:, 1:])
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in narrow.parameters())
    assert float((loss - exact).detach().abs().mean()) < 0.2


# ------------------------------------------------------------------------------------------------ initial weights


def deviation(weight: Tensor) -> float:
    """Standard deviation before the cut at 3 std, which takes 1.34 % of it."""
    return float(weight.detach().double().std()) / 0.98658


@pytest.mark.parametrize("preset", ["paper", "depthbench"])
def test_deepnorm_initial_weights(preset: str) -> None:
    shape = ShapeSpec(n_layer=6, d_model=256, n_head=4, n_kv_head=2, vocab_size=50)
    decoder = Decoder(shape, DeepNorm(preset=preset), seed=0)  # type: ignore[arg-type]
    beta = (8 * 6) ** (-1 / 4)
    for block in decoder.blocks:
        assert block.join_attn.alpha == block.join_mlp.alpha == pytest.approx((2 * 6) ** (1 / 4))
        for name, weight in [*block.attn.named_parameters(), *block.mlp.named_parameters()]:
            gain = 1.0 if name in ("q.weight", "k.weight") else beta
            rows, columns = weight.shape
            std = gain * (math.sqrt(2 / (rows + columns)) if preset == "paper" else 0.02)
            assert deviation(weight) == pytest.approx(std, rel=0.015), name
            assert float(weight.detach().abs().max()) <= 3 * std * (1 + 1e-6)
            assert float(weight.detach().abs().max()) > 2.8 * std
    for weight in (decoder.embed.weight, decoder.head.weight):
        assert deviation(weight) == pytest.approx(0.02, rel=0.03)


def test_deepnorm_initial_weights_are_set_once_however_often_drawn() -> None:
    decoder = Decoder(SHAPE, DeepNorm(), seed=3)
    before = {name: weight.detach().clone() for name, weight in decoder.named_parameters()}
    decoder.init_weights(seed=3)
    assert all(torch.equal(weight, before[name]) for name, weight in decoder.named_parameters())


@pytest.mark.parametrize("n_layer, first", [(12, 0.1), (18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6), (48, 1e-6)])
def test_layer_scale_starts_by_depth(n_layer: int, first: float) -> None:
    decoder = Decoder(ShapeSpec(n_layer, 4, n_head=1, vocab_size=3), LayerScale(), seed=0)
    scales = [weight for name, weight in decoder.named_parameters() if name.endswith(".scale")]
    assert len(scales) == 2 * n_layer and all(torch.equal(s, torch.full((4,), first)) for s in scales)


def test_gates_start_where_told() -> None:
    for strategy, name, value in ((ReZero(), "gate", 0.0), (ReZero(init=0.5), "gate", 0.5)):
        decoder = Decoder(SHAPE, strategy, seed=0)
        gates = [p for n, p in decoder.named_parameters() if n.endswith(name)]
        assert len(gates) == 2 * L and all(p.shape == (1,) and p.item() == value for p in gates)
    decoder = Decoder(SHAPE, LayerScale(init=0.25), seed=0)
    assert all(torch.equal(b.join_mlp.scale, torch.full((D,), 0.25)) for b in decoder.blocks)


def test_rezero_is_the_embedding_at_first_and_only_gates_learn() -> None:
    decoder = build(ReZero(), SHAPE)
    tokens = tokens_for(SHAPE)
    expected = decoder.head(decoder.norm(decoder.embed(tokens)))
    logits = decoder(tokens)
    assert torch.equal(logits, expected)
    logits.square().sum().backward()
    for name, weight in decoder.named_parameters():
        moved = bool(weight.grad.abs().max() > 0)  # type: ignore[union-attr]
        assert moved == (not name.startswith("blocks.") or name.endswith(".gate")), name


# ------------------------------------------------------------------------------------------------ ties, settings


@pytest.mark.parametrize(
    "strategy",
    [LNS(scale=1.0), ReZero(init=1.0), LayerScale(init=1.0), KEEL(alpha=1.0)],
    ids=lambda s: type(s).__name__,
)
def test_is_preln_where_it_should_be(strategy: ResidualStrategy) -> None:
    shape = ShapeSpec(1, 12, n_head=3, vocab_size=17) if isinstance(strategy, KEEL) else SHAPE
    tokens = tokens_for(shape)
    a, b = build(strategy, shape)(tokens), build(PreLN(), shape)(tokens)
    torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)
    assert not torch.allclose(build(PostLN(), shape)(tokens), b)


def test_lns_of_one_block_is_preln() -> None:
    shape = ShapeSpec(1, 12, n_head=3, vocab_size=17)
    tokens = tokens_for(shape)
    assert torch.equal(build(LNS(), shape)(tokens), build(PreLN(), shape)(tokens))


def test_lns_factor_survives_the_meta_device() -> None:
    with torch.device("meta"):
        decoder = Decoder(SHAPE, LNS())
    decoder.to_empty(device="cpu")
    assert not list(decoder.buffers())
    assert [block.join_attn.factor for block in decoder.blocks] == [1.0, 2**-0.5, 3**-0.5]
    assert [block.join_mlp.factor for block in decoder.blocks] == [1.0, 2**-0.5, 3**-0.5]


def test_presets() -> None:
    assert DeepNorm().init == "xavier" and DeepNorm(preset="depthbench").init == "normal"
    assert DeepNorm(preset="depthbench", init="xavier").init == "xavier"
    assert KEEL().first_block == "preln" and KEEL(preset="depthbench").first_block == "preln_attn_only"
    assert DeepNorm().norm == DeepNorm(preset="depthbench").norm == "layernorm"


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: LNS(scale="layer"), "LNS has no scale 'layer'"),
        (lambda: KEEL(alpha="sublayers"), "KEEL has no alpha 'sublayers'"),
        (lambda: KEEL(preset="authors"), "KEEL has no preset 'authors'; known: paper, depthbench"),
    ],
)
def test_says_what_is_wrong(make: Callable[[], ResidualStrategy], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("strategy, rate", [(DeepNorm(), 1e-3), (LNS(), 1e-2), (KEEL(), 2e-3), (PostLN(), 2e-3)])
def test_learning_rates_of_depthbench(strategy: ResidualStrategy, rate: float) -> None:
    assert strategy.learning_rate(ShapeSpec(24, 1024)) == rate
    assert strategy.learning_rate(ShapeSpec(28, 2048, n_kv_head=8, d_ff=6144)) == 5e-4


# ------------------------------------------------------------------------------------------------ counts, numbers

COUNTS: list[tuple[ResidualStrategy, Callable[[int, int], int]]] = [
    (PostLN(), lambda L, d: 0),
    (SandwichLN(), lambda L, d: 2 * d * L),
    (SandwichLN(embedding_norm=True), lambda L, d: 2 * d * L + d),
    (LNS(), lambda L, d: 0),
    (DeepNorm(), lambda L, d: 0),
    (DeepNorm(preset="depthbench"), lambda L, d: 0),
    (DeepNorm(norm="layernorm_bias"), lambda L, d: 2 * d * L),
    (KEEL(), lambda L, d: (2 * L - 2) * d),
    (KEEL(preset="depthbench"), lambda L, d: (2 * L - 1) * d),
    (ReZero(), lambda L, d: 2 * L),
    (ReZero(norm=False), lambda L, d: 2 * L - 2 * d * L),
    (LayerScale(), lambda L, d: 2 * d * L),
]


@pytest.mark.parametrize("strategy, extra", COUNTS, ids=[str(case[0]) for case in COUNTS])
@pytest.mark.parametrize("shape", [ShapeSpec(24, 1024), ShapeSpec(1, 64), ShapeSpec(40, 1792, n_kv_head=8, d_ff=5376)])
def test_extra_parameters(strategy: ResidualStrategy, extra: Callable[[int, int], int], shape: ShapeSpec) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(shape, strategy).parameters())
    assert count - shape.parameters() == extra(shape.n_layer, shape.d_model)


def test_keel_sums_wide_for_a_bf16_stream() -> None:
    """At alpha = 600, alpha h + y in bf16 would round y away; in fp32, then normed, it moves the rounded stream."""
    shape = ShapeSpec(2, 64, n_head=1, vocab_size=5)
    join = Decoder(shape, KEEL(alpha=600.0), seed=0).blocks[1].join_mlp.bfloat16()
    draw = torch.Generator().manual_seed(0)
    h, y = (torch.randn(1, 200, 64, generator=draw).bfloat16() for _ in range(2))
    out = join(h, lambda x: y)
    assert out.dtype == torch.bfloat16
    total = 600 * h.double() + y.double()
    exact = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.equal(out, exact.float().bfloat16())
    narrow = 600 * h + y
    assert not torch.equal(nn.functional.rms_norm(narrow, (64,), None, 1e-6), out)


def test_gates_are_multiplied_wide() -> None:
    """In bf16, 1 + g y with g y = 0.75 / 256 rounds up only if the product is not rounded first."""
    for strategy in (ReZero(init=0.01), LayerScale(init=0.01)):
        join = Decoder(SHAPE, strategy, seed=0).blocks[0].join_attn.bfloat16()
        draw = torch.Generator().manual_seed(0)
        h, y = (torch.randn(50, 4, D, generator=draw).bfloat16() for _ in range(2))
        gate = torch.tensor(0.01).bfloat16().double()
        out = join(h, lambda x, y=y: y)
        assert torch.equal(out, (h.double() + gate * y.double()).float().bfloat16())
        assert not torch.equal(out, h + gate.bfloat16() * y)


# ------------------------------------------------------------------------------------------------ views


def test_flow_is_given_where_the_stream_is_linear() -> None:
    tokens = tokens_for(SHAPE)
    for strategy, step in CASES:
        decoder = build(strategy, SHAPE, random=True)
        h = decoder.embed(tokens)
        for i in range(L):
            for kind in ("attn", "mlp"):
                flow = getattr(decoder.blocks[i], f"join_{kind}").flow(h)
                if step is re_zero:
                    gate = getattr(decoder.blocks[i], f"join_{kind}").gate
                    assert flow is not None and torch.equal(flow.write, gate) and flow.write.shape == (1,)
                elif isinstance(strategy, LNS):
                    assert flow is not None and flow.read.tolist() == [1] == flow.write.tolist()
                else:
                    assert flow is None, strategy
                if flow is not None:
                    assert flow.carry is not None and flow.carry.tolist() == [[1]]


def test_telemetry_shows_the_gates() -> None:
    tokens = tokens_for(SHAPE)
    seen: list[dict[str, Tensor]] = []
    decoder = build(ReZero(), SHAPE, random=True)
    with tapped(decoder, lambda reader, state: seen.append(reader.telemetry(state))):
        decoder(tokens)
    assert [float(figures["gate"]) for figures in seen[:-1]] == [float(b.join_attn.gate) for b in decoder.blocks]
    scaled = build(LayerScale(), SHAPE, random=True)
    figures, scale = scaled.blocks[1].join_mlp.telemetry(scaled.embed(tokens)), scaled.blocks[1].join_mlp.scale
    assert float(figures["gate"]) == pytest.approx(float(scale.mean()))
    assert float(figures["gate_abs"]) == pytest.approx(float(scale.abs().mean()))
    assert float(figures["gate_std"]) == pytest.approx(float((scale - scale.mean()).square().mean().sqrt()))
    assert not figures["gate"].requires_grad
