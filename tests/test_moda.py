"""MoDA: one softmax over the past and over what earlier sublayers left at the same token.

The reference is written number by number: rotation, scores, softmax and sums as loops over b, h, t and j in fp64.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from models import build, tokens_for, with_weights_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import depthlit.depth_attention as depth_attention_module
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.depth_attention import CUDA, depth_attention, kernel_for, plain_attention
from depthlit.interventions import rerouted, tapped
from depthlit.residuals import MoDA, PostLN, PreLN
from depthlit.shape import ShapeSpec

SHAPE = ShapeSpec(n_layer=3, d_model=16, n_head=4, n_kv_head=2, d_ff=20, vocab_size=17, norm_eps=1e-3, rope_theta=50.0)
H, H_KV, C, L = SHAPE.n_head, 2, SHAPE.head_dim, SHAPE.n_layer
CASES = [
    MoDA(),
    MoDA(depth_rope="none"),
    MoDA(preset="depthbench"),
    MoDA(norm="post"),
    MoDA(norm="post", depth_rope="q_only"),
    MoDA(memory="attention"),
    MoDA(memory="none", norm="post"),
]
every = pytest.mark.parametrize("strategy", CASES, ids=str)


# ------------------------------------------------------------------------------------------------ the equation


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + SHAPE.norm_eps).sqrt()


def turned(x: Tensor, t: int) -> Tensor:
    """(C,) at position t: channel j pairs with j + C/2, turned by t theta^(-2j/C)."""
    out = list(x)
    for j in range(C // 2):
        angle = t * SHAPE.rope_theta ** (-2 * j / C)
        out[j] = x[j] * math.cos(angle) - x[j + C // 2] * math.sin(angle)
        out[j + C // 2] = x[j] * math.sin(angle) + x[j + C // 2] * math.cos(angle)
    return torch.stack(out)


def joint(
    attn: Any, x: Tensor, slots: list[tuple[Tensor, Tensor]], rope: str, sees: Callable[[int, int], bool]
) -> Tensor:
    """Attention of one sequence x (T, D); slots hold keys and values (T, H_kv C); positions count from 0."""
    T = len(x)
    q, k, v = x @ attn.q.weight.T, x @ attn.k.weight.T, x @ attn.v.weight.T
    rows = []
    for t in range(T):
        heads = []
        for h in range(H):
            group = h // (H // H_KV)
            mine, theirs = slice(h * C, h * C + C), slice(group * C, group * C + C)
            scores, values = [], []
            for j in range(t + 1):
                if sees(t, j):
                    scores.append(turned(q[t, mine], t) @ turned(k[j, theirs], j))
                    values.append(v[j, theirs])
            for kappa, nu in slots:
                ask = q[t, mine] if rope == "none" else turned(q[t, mine], t)
                key = turned(kappa[t, theirs], t) if rope == "both" else kappa[t, theirs]
                scores.append(ask @ key)
                values.append(nu[t, theirs])
            weights = [(score / math.sqrt(C)).exp() for score in scores]
            heads.append(sum(w / sum(weights) * value for w, value in zip(weights, values, strict=True)))
        rows.append(torch.cat(heads))
    return torch.stack(rows) @ attn.out.weight.T


def reference(decoder: Decoder, tokens: Tensor, sees: Callable[[int, int], bool] = lambda t, j: True) -> Tensor:
    """Logits (T, V) of one sequence of tokens (T,), walking decoder.order."""
    strategy = decoder.strategy
    assert isinstance(strategy, MoDA)
    post, slots, h = strategy.norm == "post", [], decoder.embed.weight[tokens]
    for i in decoder.order:
        block = decoder.blocks[i]
        before, after = block.join_attn.norm.weight, block.join_mlp.norm.weight
        x = h if post else rms(h, before)
        h = h + joint(block.attn, x, slots, strategy.depth_rope or "", sees)
        if strategy.memory != "none":
            slots.append((x @ block.attn.k.weight.T, x @ block.attn.v.weight.T))
        h = rms(h, before) if post else h
        x = h if post else rms(h, after)
        if strategy.memory == "full" and i < L - 1:
            slots.append((x @ block.join_mlp.k.weight.T, x @ block.join_mlp.v.weight.T))
        gate = x @ block.mlp.gate.weight.T
        h = h + (gate / (1 + (-gate).exp()) * (x @ block.mlp.up.weight.T)) @ block.mlp.out.weight.T
        h = rms(h, after) if post else h
    return rms(h, decoder.norm.weight) @ decoder.head.weight.T


def error(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@every
def test_equals_its_equation(strategy: MoDA) -> None:
    decoder, twin = (build(strategy, SHAPE, seed=7, random=True) for _ in range(2))
    tokens = tokens_for(SHAPE, 2, 5)
    expected = torch.stack([reference(twin, row) for row in tokens])
    logits = decoder(tokens)
    assert error(logits, expected) < 1e-12
    weigh = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    (logits * weigh).sum().backward()
    (expected * weigh).sum().backward()
    for (name, a), b in zip(decoder.named_parameters(), twin.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None and b.grad.abs().max() > 0, name
        assert error(a.grad, b.grad) < 1e-9, name


def test_rotations_of_both_sides_cancel_and_of_one_do_not() -> None:
    tokens = tokens_for(SHAPE)
    both, none, one = (build(MoDA(depth_rope=r), SHAPE, random=True)(tokens) for r in ("both", "none", "q_only"))  # type: ignore[arg-type]
    assert torch.equal(both, none) and error(one, both) > 1e-2
    torch.testing.assert_close(one[:, 0], both[:, 0])  # at position 0 nothing is turned


@pytest.mark.parametrize("order", [(0, 2), (1, 2), (2, 1, 0), (0, 0, 1, 2), (2,)])
def test_what_is_skipped_leaves_no_slot(order: tuple[int, ...]) -> None:
    """Absent, not zero: a zero key would still take its share of the softmax. Slots are what passed, in any order."""
    decoder, tokens = build(MoDA(), SHAPE, random=True), tokens_for(SHAPE, 1, 4)
    with rerouted(decoder, order):
        assert error(decoder(tokens)[0], reference(decoder, tokens[0])) < 1e-12


def test_documents_keep_to_themselves() -> None:
    """The mask holds in the joint softmax, forward and backward."""
    tokens, documents = tokens_for(SHAPE, 2, 7), torch.tensor([[0, 0, 0, 1, 1, 1, 1], [4, 4, 4, 4, 4, 9, 9]])
    for strategy in CASES[:4]:
        whole, parts = (build(strategy, SHAPE, random=True) for _ in range(2))
        logits = whole(tokens, documents=documents)
        cut = [parts(tokens[b : b + 1, i:j]) for b, i, j in ((0, 0, 3), (0, 3, 7), (1, 0, 5), (1, 5, 7))]
        expected = torch.stack((torch.cat(cut[:2], 1)[0], torch.cat(cut[2:], 1)[0]))
        assert error(logits, expected) < 1e-12
        logits.square().sum().backward()
        expected.square().sum().backward()
        for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
            assert error(a.grad, b.grad) < 1e-9, name  # type: ignore[arg-type]


@every
def test_the_future_is_not_seen(strategy: MoDA) -> None:
    decoder, tokens = build(strategy, SHAPE, random=True), tokens_for(SHAPE)
    other = tokens.clone()
    other[:, 4] = (other[:, 4] + 1) % SHAPE.vocab_size
    a, b = decoder(tokens), decoder(other)
    torch.testing.assert_close(a[:, :4], b[:, :4], rtol=1e-12, atol=1e-12)
    assert float((a[:, 4:] - b[:, 4:]).detach().abs().amax(-1).min()) > 1e-9


@pytest.mark.parametrize(
    "moda, other",
    [(MoDA(memory="none"), PreLN()), (MoDA(memory="none", norm="post"), PostLN())],
    ids=["pre", "post"],
)
def test_without_memory_nothing_is_left_of_it(moda: MoDA, other: ResidualStrategy) -> None:
    tokens, baseline = tokens_for(SHAPE), build(other, SHAPE, random=True)
    assert torch.equal(with_weights_of(build(moda, SHAPE), baseline)(tokens), baseline(tokens))


def test_one_block_is_preln() -> None:
    shape = ShapeSpec(1, 16, n_head=4, vocab_size=17)
    baseline = build(PreLN(), shape, random=True)
    assert torch.equal(with_weights_of(build(MoDA(), shape), baseline)(tokens_for(shape)), baseline(tokens_for(shape)))


# ------------------------------------------------------------------------------------------------ settings, counts


def test_presets() -> None:
    assert MoDA().depth_rope == "both" and MoDA(preset="depthbench").depth_rope == "q_only"
    assert MoDA(preset="depthbench", depth_rope="none").depth_rope == "none"
    assert MoDA().norm == MoDA(preset="depthbench").norm == "pre"
    assert MoDA().learning_rate(ShapeSpec(24, 1024)) == 2e-3


@pytest.mark.parametrize("shape", [ShapeSpec(24, 1024), ShapeSpec(1, 64), ShapeSpec(40, 1792, n_kv_head=8, d_ff=5376)])
@pytest.mark.parametrize("preset", ["paper", "depthbench"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_extra_parameters(
    shape: ShapeSpec, preset: Literal["paper", "depthbench"], norm: Literal["pre", "post"]
) -> None:
    def extra(strategy: MoDA) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in Decoder(shape, strategy).parameters()) - shape.parameters()

    assert extra(MoDA(preset=preset, norm=norm)) == (shape.n_layer - 1) * 2 * shape.d_model * shape.d_kv
    assert extra(MoDA(memory="attention", norm=norm)) == extra(MoDA(memory="none", norm=norm)) == 0


def test_the_400m_model_has_its_published_size() -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in Decoder(ShapeSpec(24, 1024, d_ff=2736), MoDA(preset="depthbench")).parameters())
    assert round(count / 1e6, 2) == 453.64


def test_views_speak_of_the_stream() -> None:
    tokens = tokens_for(SHAPE)
    for strategy in (MoDA(), MoDA(norm="post")):
        decoder, met = build(strategy, SHAPE, random=True), []
        with tapped(decoder, lambda reader, state, met=met: met.append((reader, state))):
            logits = decoder(tokens)
        assert [len(state.keys) for _, state in met] == [0, 2, 4, 5]
        assert all(key.shape == (2, H_KV, tokens.shape[1], C) for key in met[-1][1].keys)
        assert torch.equal(decoder.head(decoder.norm(met[-1][0].lens(met[-1][1]))), logits)
        for reader, state in met[:-1]:
            flow = reader.flow(state)
            assert (flow is None) == (strategy.norm == "post")
            if flow is not None:
                assert [flow.read.tolist(), flow.carry.tolist(), flow.write.tolist()] == [[1], [[1]], [1]]


# ------------------------------------------------------------------------------------------------ the fused function


def random_inputs(
    dtype: torch.dtype, heads: int = 4, kv: int = 2, T: int = 6, c: int = 4, S: int = 3, seed: int = 0
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    draw = torch.Generator().manual_seed(seed)

    def tensor(n: int) -> Tensor:
        x = torch.randn(2, T, n * c, generator=draw, dtype=torch.float64).to(dtype)
        return x.unflatten(-1, (n, c)).transpose(1, 2).requires_grad_()

    q, k, v = tensor(heads), tensor(kv), tensor(kv)
    return [q, k, v], [tensor(kv) for _ in range(S)], [tensor(kv) for _ in range(S)]


MASK = torch.ones(6, 6, dtype=torch.bool).tril() & (
    torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(4)) > 0.4
)
MASK = MASK | torch.eye(6, dtype=torch.bool)


def fused(*inputs: Any) -> Tensor:
    return depth_attention(*inputs)[0]


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_readers_in_a_row_share_a_gradient(kv: int, dtype: torch.dtype) -> None:
    """Readers that hand slots on, one of them to two others: gradients are summed as autograd would sum them."""
    grads = []
    for chained in (True, False):
        projected, keys, values = random_inputs(dtype, kv=kv)
        handed, total = (tuple(keys), tuple(values)), 0.0
        for reader in range(3):
            other = random_inputs(dtype, kv=kv, seed=reader)[0]
            q, k, v = projected if reader == 0 else [x.detach() for x in other]
            y, *after = depth_attention(q, k, v, *handed, None)
            assert all(torch.equal(a, b) for a, b in zip(after[0], keys, strict=True))
            total = total + (y.double() * (1 + reader)).square().sum()
            if reader == 1:  # a side reader, whose slots go nowhere
                total = total + depth_attention(k=k, v=v, q=q.neg(), keys=after[0], values=after[1], mask=None)[0].sum()
            if chained:
                handed = (after[0], after[1])
        grads.append(torch.autograd.grad(total, [*projected, *keys, *values]))  # type: ignore[arg-type]
    for a, b in zip(*grads, strict=True):
        assert error(a, b) < (1e-12 if dtype == torch.float64 else 0.03)


@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "masked"])
@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("slots", [1, 5])
def test_fused_is_plain(mask: Tensor | None, kv: int, slots: int) -> None:
    """Two ways to the same numbers: the kernel with a joint log-sum-exp, and explicit scores left to autograd."""
    results = []
    for attend in (fused, plain_attention):
        projected, keys, values = random_inputs(torch.float64, kv=kv, S=slots)
        y = attend(*projected, keys, values, mask)
        grads = torch.autograd.grad((y * y.detach().roll(1, 2)).sum(), [*projected, *keys, *values])
        results.append((y, *grads))
    for a, b in zip(*results, strict=True):
        assert error(a, b) < 1e-12


@pytest.mark.parametrize("mask", [None, MASK], ids=["causal", "masked"])
def test_gradients_are_those_of_finite_differences(mask: Tensor | None) -> None:
    projected, keys, values = random_inputs(torch.float64)
    everything = [*projected, *keys, *values]

    def function(*tensors: Tensor) -> Tensor:
        return fused(*tensors[:3], tensors[3:6], tensors[6:], mask)

    assert torch.autograd.gradcheck(function, everything, atol=1e-6, rtol=1e-5)


def test_far_scores_do_not_overflow() -> None:
    """Past or depth may own the whole softmax; neither makes a NaN."""
    for past, own in ((200.0, 1.0), (1.0, 200.0), (200.0, 200.0)):
        projected, keys, values = random_inputs(torch.float32)
        q, k, v = projected
        y = fused(q, k * past, v, [x * own for x in keys], values, None)
        wide_keys, wide_values = [x.double() * own for x in keys], [x.double() for x in values]
        expected = plain_attention(q.double(), k.double() * past, v.double(), wide_keys, wide_values, None)
        assert error(y.double(), expected) < 1e-4
        y.sum().backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in [*projected, *keys, *values])


@pytest.mark.parametrize("attend", [fused, plain_attention])
def test_bf16_scores_and_softmax_are_wide(attend: Callable[..., Tensor]) -> None:
    """Many channels and slots in bf16: no further from fp64 than inputs and output rounded to bf16 allow."""
    projected, keys, values = random_inputs(torch.bfloat16, T=32, c=64, S=40)
    with torch.autocast("cpu", torch.bfloat16):
        y = attend(*projected, keys, values, None)
    wide = [[x.detach().double().requires_grad_() for x in group] for group in (projected, keys, values)]
    expected = plain_attention(*wide[0], wide[1], wide[2], None)
    assert y.dtype == torch.bfloat16
    assert float((y.double() - expected).detach().abs().max()) < 2**-8 * float(expected.detach().abs().max())
    y.float().square().sum().backward()
    expected.square().sum().backward()
    for a, b in zip([*projected, *keys, *values], [x for group in wide for x in group], strict=True):
        assert a.grad is not None and a.grad.dtype == torch.bfloat16
        assert float((a.grad.double() - b.grad).norm() / b.grad.norm()) < 0.02  # type: ignore[operator, union-attr]


@every
def test_bf16_is_finite_and_near(strategy: MoDA) -> None:
    decoder, tokens = build(strategy, SHAPE, random=True), tokens_for(SHAPE, 4, 9)
    exact = decoder(tokens[:, :-1], tokens[:, 1:]).detach()
    narrow = build(strategy, SHAPE, random=True).bfloat16()
    loss = narrow(tokens[:, :-1], tokens[:, 1:])
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in narrow.parameters())
    assert float((loss - exact).detach().abs().mean()) < 0.2


def test_recomputing_blocks_changes_no_gradient() -> None:
    tokens = tokens_for(SHAPE)
    kept, recomputed = (build(MoDA(), SHAPE, random=True) for _ in range(2))
    for block in recomputed.blocks:
        block.forward = (lambda run: lambda *inputs: checkpoint(run, *inputs, use_reentrant=False))(block.forward)  # type: ignore[method-assign]
    for decoder in (kept, recomputed):
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(kept.parameters(), recomputed.parameters(), strict=True))  # type: ignore[arg-type]


def test_nothing_of_size_t_by_t_is_kept() -> None:
    """Backward keeps references to what is alive anyway, y, and one number per query; no stacked slots."""
    projected, keys, values = random_inputs(torch.float32, T=64, c=8, S=6)
    alive = {x.untyped_storage().data_ptr() for x in [*projected, *keys, *values]}
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):  # type: ignore[func-returns-value]
        y = fused(*projected, keys, values, None)
    fresh = sum(x.numel() for x in kept if x.untyped_storage().data_ptr() not in alive)
    assert fresh == y.numel() + y.numel() // 8


def test_falls_back_to_explicit_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tokens_for(SHAPE)
    expected = build(MoDA(), SHAPE, random=True)(tokens)
    monkeypatch.setattr(depth_attention_module, "kernel_for", lambda q, mask: None)
    assert error(build(MoDA(), SHAPE, random=True)(tokens), expected) < 1e-12
    assert kernel_for(torch.empty(1, 2, 3, 4, device="meta"), None) is None


@pytest.mark.parametrize("c", [64, 70])
def test_the_cuda_kernel_is_called_as_it_wants(c: int) -> None:
    """Shapes and arguments only, on fake tensors: the numbers need a GPU."""
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 16, c, device="cuda", dtype=torch.bfloat16) for n in (4, 2))
        y, lse, rest = CUDA.forward(q, k, k, None)
        dq, dk, dv = CUDA.backward(y, q, k, k, y, lse, None, rest)
    assert y.shape == dq.shape == q.shape and dk.shape == dv.shape == k.shape and lse.shape == (2, 4, 16)


def test_compiles_to_one_graph_with_the_same_gradients() -> None:
    tokens = tokens_for(SHAPE)
    eager, traced = (build(MoDA(), SHAPE, random=True) for _ in range(2))
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for decoder in (eager, compiled):
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    for (name, a), b in zip(eager.named_parameters(), traced.parameters(), strict=True):
        assert error(b.grad, a.grad) < 1e-12, name  # type: ignore[arg-type]
