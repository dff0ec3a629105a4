"""HC and mHC: one step against loops over tokens and streams, what they start as, how the streams part."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from models import TINY, build, seats, set_eps, tokens_for, with_weights_of
from stream_steps import SHAPE, VARIANTS, B, D, M, T, connection, naive_step, rand
from torch import Tensor, nn

from depthlit.decoder import Decoder
from depthlit.interventions import tapped
from depthlit.layers import RMSNorm
from depthlit.recipe import recipe_of
from depthlit.residuals import HC, MHC, PreLN
from depthlit.residuals.streams import spread

variants = pytest.mark.parametrize("strategy", VARIANTS, ids=str)
both = pytest.mark.parametrize("strategy", [HC(), MHC()], ids=str)


# ------------------------------------------------------------------------------------------------ one step, by hand


@variants
def test_one_step_is_the_equation(strategy: HC | MHC) -> None:
    """Unequal streams, asymmetric carries; output and every gradient."""
    join, branch = connection(strategy), nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    H, g = rand(B, T, strategy.streams, D), rand(B, T, strategy.streams, D, seed=1, grad=False)
    w = dict(join.named_parameters())
    got, want = join(H, branch), naive_step(w, H, strategy, branch)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    inputs = {"H": H, **w, **dict(branch.named_parameters())}
    a, b = (dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), g), strict=True)) for y in (got, want))
    for name in inputs:
        single = strategy.streams == 1 and isinstance(strategy, MHC)  # softmax over one: no gradient
        assert single or a[name].abs().max() > 0, name
        assert (a[name] - b[name]).norm() <= 1e-9 * b[name].norm(), name


@variants
def test_two_steps_in_a_row(strategy: HC | MHC) -> None:
    """The second step remakes its streams from those of the first."""
    joins = [connection(strategy, k) for k in (2, 3)]
    branch = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    H, g = rand(B, T, strategy.streams, D), rand(B, T, strategy.streams, D, seed=1, grad=False)
    between = joins[0](H, branch)
    assert recipe_of(between) is not None
    got = joins[1](between, branch)
    assert recipe_of(got) is None, "every other state is kept"
    want = naive_step(dict(joins[0].named_parameters()), H, strategy, branch)
    want = naive_step(dict(joins[1].named_parameters()), want, strategy, branch)
    inputs = [H, *joins[0].parameters(), *joins[1].parameters(), *branch.parameters()]
    for a, b in zip(*(torch.autograd.grad(y, inputs, g) for y in (got, want)), strict=True):
        assert (a - b).norm() <= 1e-9 * b.norm()


@pytest.mark.parametrize("strategy", [HC(), HC(dynamic=False), MHC(), MHC(preset="depthbench")], ids=str)
def test_flow_is_what_forward_does(strategy: HC | MHC) -> None:
    join, H, y = connection(strategy), rand(B, T, M, D), rand(B, T, D)
    read, carry, write = join.flow(H)
    seen: list[Tensor] = []
    join.norm.register_forward_pre_hook(lambda module, call: seen.append(call[0]))
    after = join(H, lambda x: y)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(seen[0], (read.unsqueeze(-1) * H).sum(-2), **close)
    carried = torch.einsum("...oi,...id->...od", carry.expand(B, T, M, M), H)
    torch.testing.assert_close(after, carried + write.unsqueeze(-1) * y.unsqueeze(-2), **close)


# ------------------------------------------------------------------------------------------------ at the start


def logits(strategy: Any, seed: int = 0, eps: float = 1e-14) -> Tensor:
    return set_eps(build(strategy, TINY, seed), eps)(tokens_for(TINY))


@pytest.mark.parametrize(
    "strategy",
    [HC(), HC(dynamic=False), HC(tanh=False), HC(streams=1), HC(streams=3), HC(read_out="mean"),
     HC(read_out="norm_then_sum", streams=1),
     *(replace(MHC(), **change) for change in (
         {}, {"init": "gap16"}, {"streams": 1}, {"streams": 3, "gap": 3.0}, {"read_out": "sum"},
         {"sinkhorn_order": "liger"}, {"sinkhorn_rounding": True}, {"reads": "free"}, {"writes": "free"},
         {"mixing": "softmax"}, {"mixing": "free"}, {"mixing": "identity"},
         {"reads": "free", "writes": "free", "mixing": "free"}))],
    ids=str,
)  # fmt: skip
def test_starts_as_pre_ln(strategy: HC | MHC) -> None:
    want = logits(PreLN())
    tolerance = 1e-9
    if isinstance(strategy, MHC) and strategy.mixing == "free":
        tolerance = 1e-6  # the carry itself is a parameter, in fp32
    if isinstance(strategy, MHC) and strategy.sinkhorn_order == "liger":
        tolerance = 1e-4  # its eps is part of the sums
    assert (logits(strategy) - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("init", ["gap8", "gap16", "signs", "soft"])
@pytest.mark.parametrize("change", [{"reads": "free"}, {"writes": "free"}, {"mixing": "free"}], ids=str)
def test_a_lifted_constraint_starts_as_the_same_function(init: Any, change: dict[str, Any]) -> None:
    want = logits(MHC(init=init))
    assert (logits(replace(MHC(init=init), **change)) - want).norm() < 1e-6 * want.norm()


def test_other_starts_are_other_functions() -> None:
    want = logits(PreLN())
    for init, least in (("signs", 1e-3), ("soft", 1e-3), ("random", 1e-6)):
        assert (logits(MHC(init=init)) - want).norm() > least * want.norm(), init


@pytest.mark.parametrize("sublayer", range(6))
def test_first_reads_and_mixing(sublayer: int) -> None:
    H = rand(1, 1, M, D)
    read, carry, write = connection(HC(), sublayer, random=False).flow(H)
    assert read.flatten().tolist() == torch.eye(M)[sublayer % M].tolist()
    assert torch.equal(carry[0, 0], torch.eye(M).double()) and write.flatten().tolist() == [1] * M
    read, carry, write = connection(MHC(), sublayer, random=False).flow(H)
    low = 1 / (1 + math.exp(8))
    assert read[0, 0].argmax() == sublayer % M
    torch.testing.assert_close(read[0, 0].sort().values, torch.tensor([low] * 3 + [1 - low]).double())
    torch.testing.assert_close(write, torch.ones_like(write))
    off = math.exp(-8) / (1 + 3 * math.exp(-8))
    torch.testing.assert_close(carry[0, 0] - off, (1 - 4 * off) * torch.eye(M).double())


@pytest.mark.parametrize("n, d", [(4, 32), (2, 32), (1, 64)])
def test_parameters(n: int, d: int) -> None:
    shape = replace(TINY, d_model=d)
    per_sublayer = {
        HC(streams=n): d * (n + 2) + n * (n + 2) + 2,
        HC(streams=n, dynamic=False): n * (n + 2),
        MHC(streams=n): (n * d + 1) * n * (n + 2) + 3,
        MHC(streams=n, mixing="identity"): (n * d + 1) * 2 * n + 2,
    }
    if n == 4:
        assert (per_sublayer[HC()], per_sublayer[MHC()]) == (6 * d + 26, 96 * d + 27)
    with torch.device("meta"):
        for strategy, count in per_sublayer.items():
            weights = list(Decoder(shape, strategy).parameters())
            assert all(p.is_meta and p.dim() for p in weights)
            assert sum(p.numel() for p in weights) - shape.parameters() == shape.n_sublayer * count


@both
def test_divided_out_projections(strategy: HC | MHC) -> None:
    plain, divided = build(strategy), build(replace(strategy, divide_out=True))
    for a, b in zip(seats(plain), seats(divided), strict=True):
        torch.testing.assert_close(b.branch.out.weight * 2, a.branch.out.weight)
    assert type(strategy)(preset="depthbench").divide_out and not strategy.divide_out


def test_settings_are_checked() -> None:
    for cls, bad, said in (
        (HC, {"read_out": "max"}, "HC has no read_out 'max'; known: sum, mean, norm_then_sum"),
        (MHC, {"mixing": "birkhoff"}, "MHC has no mixing 'birkhoff'; known: sinkhorn, softmax, free, identity"),
        (MHC, {"sinkhorn_order": "rows"}, "MHC has no sinkhorn_order 'rows'; known: paper, liger"),
        (HC, {"streams": 0}, "HC needs streams >= 1, not 0"),
        (MHC, {"sinkhorn_iterations": 0}, "MHC needs sinkhorn_iterations >= 1, not 0"),
    ):
        with pytest.raises(ValueError, match=said):
            cls(**bad)


# ------------------------------------------------------------------------------------------------ how streams part


def spread_after(decoder: Decoder, steps: int) -> float:
    """Spread at the exit after some steps of AdamW."""
    tokens, seen = tokens_for(TINY, 4, 12), []
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
        optimizer.step()
    with torch.no_grad(), tapped(decoder, lambda reader, state: seen.append(reader.telemetry(state)["stream_spread"])):
        decoder(tokens)
    assert len(seen) == TINY.n_layer + 1 and seen[0] == 0
    return float(seen[-1])


@pytest.mark.parametrize("strategy", [HC(), HC(dynamic=False), MHC(), MHC(mixing="identity")], ids=str)
def test_streams_part(strategy: HC | MHC) -> None:
    assert spread_after(build(strategy), 0) < 1e-15
    assert spread_after(build(strategy), 5) > 1e-3


def test_equal_streams_that_nothing_tells_apart_stay_equal() -> None:
    """The trap that `MHC.init` does not offer: phi = 0 and the same logits for all streams."""
    decoder = build(MHC(init="uniform"))
    for seat in seats(decoder):
        nn.init.zeros_(seat.join.project.weight)
    assert spread_after(decoder, 5) == 0
    assert spread_after(build(MHC(init="uniform")), 5) > 0, "a drawn phi parts them, slowly"


@pytest.mark.parametrize("strategy", [HC(), HC(dynamic=False), MHC(), MHC(mixing="softmax")], ids=str)
def test_the_carry_matters(strategy: HC | MHC) -> None:
    """Streams that are mixed and then thrown away would leave these gradients at zero (hyper-connections#8)."""
    decoder, tokens = build(strategy), tokens_for(TINY)
    if isinstance(strategy, MHC):
        spread_after(decoder, 3)  # at first its streams are equal, and no stochastic matrix changes them
        decoder.zero_grad()
    decoder(tokens[:, :-1], tokens[:, 1:]).mean().backward()
    for seat in seats(decoder):
        own = dict(seat.join.named_parameters())
        g = own["carry"].grad if "carry" in own else own["bias"].grad[2 * M :]
        equal = isinstance(strategy, MHC) and seat.sublayer == 0  # copies of the embedding
        assert g is not None and (g.abs().max() > 1e-9 or equal), seat.sublayer


# ------------------------------------------------------------------------------------------------ numbers


@both
def test_routing_is_fp32_in_bf16(strategy: HC | MHC) -> None:
    """bf16 streams and weights, or fp32 ones under autocast: coefficients are fp32 and not rounded on the way."""
    join = connection(strategy).float()
    H = rand(B, T, M, D, grad=False).float()
    exact = join.flow(H)
    with torch.autocast("cpu", torch.bfloat16):
        for a, b in zip(join.flow(H), exact, strict=True):
            assert a.dtype == torch.float32 and torch.equal(a, b)
        assert join(H, lambda x: x).dtype == torch.float32
    half = copy.deepcopy(join).bfloat16()
    rounded_too = copy.deepcopy(half).float()
    for a, b in zip(half.flow(H.bfloat16()), rounded_too.flow(H.bfloat16().float()), strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    state = half(H.bfloat16().requires_grad_(), lambda x: x)
    assert state.dtype == torch.bfloat16
    state.square().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in half.parameters())


@variants
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_streams(strategy: HC | MHC, dtype: torch.dtype) -> None:
    join = connection(strategy).to(dtype)
    H = torch.randn(B, T, strategy.streams, D).to(dtype)
    H[0], H[1, 0, 0] = 0, 0
    after = join(H.requires_grad_(), torch.tanh)
    after.sum().backward()
    assert after.isfinite().all() and H.grad is not None and H.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in join.parameters())


# ------------------------------------------------------------------------------------------------ views


def test_lens_probe_and_read_out() -> None:
    H, norm = rand(B, T, M, D), RMSNorm(D, 1e-6).double()
    for read_out, lens in (("sum", H.sum(-2)), ("mean", H.mean(-2)), ("norm_then_sum", H.sum(-2))):
        hc = HC(read_out=read_out)
        for reader in (connection(hc), hc.exit(SHAPE)):
            assert torch.equal(reader.lens(H), lens) and reader.probe(H).shape == (B, T, M * D)
            want = sum(norm(H[..., m, :]) for m in range(M)) if read_out == "norm_then_sum" else norm(lens)
            torch.testing.assert_close(reader.normed(H, norm), want)
        flow = hc.exit(SHAPE).flow(H)
        assert flow is not None and flow.carry is None
        torch.testing.assert_close(torch.einsum("m,btmd->btd", flow.read, H), lens)
    x = rand(B, T, D)
    entry = HC().entry(SHAPE)
    assert torch.equal(entry(x), torch.stack([x] * M, -2)) and torch.equal(entry.write(x), torch.ones(M).double())


def test_norm_then_sum_looks_through_the_lens() -> None:
    decoder = build(HC(read_out="norm_then_sum"), random=True)
    tokens, seen = tokens_for(TINY), []
    with tapped(decoder, lambda reader, state: seen.append(decoder.head(reader.normed(state, decoder.norm)))):
        assert torch.equal(decoder(tokens), seen[-1])
    other = with_weights_of(build(HC()), decoder)
    assert not torch.allclose(other(tokens), seen[-1])


def test_telemetry() -> None:
    H = rand(B, T, M, D)
    first = connection(MHC(), random=False)
    figures = {k: float(v) for k, v in first.telemetry(H).items()}
    off, low = math.exp(-8) / (1 + 3 * math.exp(-8)), 1 / (1 + math.exp(8))
    shares = [low / (1 + 2 * low)] * 3 + [(1 - low) / (1 + 2 * low)]
    want = {
        "stream_spread": float(spread(H)), "read_entropy": -sum(p * math.log(p) for p in shares),
        "read_own": shares[-1], "write_mean": 1.0, "off_diagonal": 3 * off, "carry_gain": 1.0, "carry_residual": 0.0,
    }  # fmt: skip
    assert figures == pytest.approx(want, abs=1e-12)
    few = connection(MHC(sinkhorn_iterations=1, init="uniform")).telemetry(H)
    assert few["carry_residual"] > 1e-2
    static = connection(HC(dynamic=False)).telemetry(H)
    assert all(v.dim() == 0 and v.isfinite() for v in static.values())
    assert spread(H[..., :1, :].expand(B, T, M, D)) == 0 and spread(torch.zeros(B, T, M, D)) == 0
    apart = torch.eye(M, D).expand(B, T, M, D)
    assert float(spread(apart)) == pytest.approx((1 - 1 / M) ** 0.5)
