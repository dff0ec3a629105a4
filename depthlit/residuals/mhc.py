"""Manifold-constrained Hyper-Connections: M streams, read and written by non-negative weights, mixed by a doubly
stochastic matrix, so that no product of mixings grows.

    z = N(vec(H)) phi                                              one vector of M D values, N without gain
    read = sigmoid(g1 z1 + b1)    write = 2 sigmoid(g2 z2 + b2)    carry = Sinkhorn(mat(g3 z3 + b3))
    H <- carry H + write F(N(read . H))                            carry is indexed (out, in)

Xie et al., mHC: Manifold-Constrained Hyper-Connections, arXiv:2512.24880. The paper does not print the initial phi and
b; see `inits`. Each constraint can be lifted; what takes its place starts as the same function (where phi is drawn:
the same but for the part that depends on the token, which then is not squashed).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Draw, Flow, ResidualStrategy, Site
from depthlit.mixers.sinkhorn import Order, rounded, sinkhorn
from depthlit.mixers.streams import project
from depthlit.recipe import recomputed
from depthlit.residuals.streams import OverStreams, ReadOut, StreamConnection, check, inverse_rms


class Init(NamedTuple):
    """Initial values: logits of the other streams and of the stream (sublayer mod M), or off and on the diagonal."""

    read: tuple[float, float] = (0.0, 0.0)
    write: tuple[float, float] = (0.0, 0.0)
    carry: tuple[float, float] = (0.0, 0.0)
    phi: float = 0.0  # std
    gain: float = 0.01


InitName = Literal["gap8", "gap16", "uniform", "random", "signs", "soft"]


def inits(gap: float) -> dict[InitName, Init]:
    """Where phi is 0, something else must tell the streams apart: they would stay equal for ever."""
    return {
        "gap8": Init(read=(-gap, gap), carry=(-gap, 0)),
        "gap16": Init(read=(-gap, gap), carry=(-gap, gap)),
        "uniform": Init(phi=0.02),
        "random": Init(phi=0.02, gain=1.0),
        "signs": Init(read=(-1, 1), write=(-1, 1), carry=(-gap, 0)),
        "soft": Init(read=(0, 1), write=(1, 1), carry=(0, 1)),
    }


class ManifoldConnection(StreamConnection):
    """One projection for all coefficients of a token. The rows of its weight, the bias and the gains stand in the order
    read, write, carry; the carry row by row, (out, in)."""

    def __init__(self, site: Site, mhc: MHC) -> None:
        super().__init__(site, mhc.streams, mhc.read_out, bool(mhc.divide_out))
        M, self.settings, self.init = self.streams, mhc, inits(mhc.gap)[mhc.init]
        self.eps = cast(float, mhc.eps)
        self.parts = [M, M] if mhc.mixing == "identity" else [M, M, M * M]
        self.project = nn.Linear(M * self.d_model, sum(self.parts), bias=False)
        self.bias, self.gain = (nn.Parameter(torch.empty(n)) for n in (sum(self.parts), len(self.parts)))
        self.project_flops = 2 * M * self.d_model * sum(self.parts)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        own = torch.eye(self.streams)
        places = (own[self.first], self.init.read), (own[self.first], self.init.write), (own, self.init.carry)
        read, write, carry = (torch.where(place > 0, float(on), float(off)) for place, (off, on) in places)
        free = self.settings.reads == "free", self.settings.writes == "free", self.settings.mixing == "free"
        read = read.sigmoid() if free[0] else read
        write = 2 * write.sigmoid() if free[1] else write
        carry = self.doubly_stochastic(carry) if free[2] else carry
        self.bias.copy_(torch.cat((read, write, carry.flatten()))[: len(self.bias)])
        nn.init.constant_(self.gain, self.init.gain)
        nn.init.normal_(self.project.weight, std=self.init.phi)

    def init_own(self, draw: Draw) -> None:
        if self.init.phi:
            draw(self.project.weight, self.init.phi)
        else:
            nn.init.zeros_(self.project.weight)

    def doubly_stochastic(self, logits: Tensor) -> Tensor:
        """(M out, M in, ...) -> the same."""
        mhc = self.settings
        matrix = sinkhorn(logits, mhc.sinkhorn_iterations, cast(Order, mhc.sinkhorn_order))
        return rounded(matrix) if mhc.sinkhorn_rounding else matrix

    def coefficients(self, z: Tensor, square: Tensor, bias: Tensor, gain: Tensor) -> tuple[Tensor, ...]:
        """Read, write (..., M) and carry (..., M out, M in) from z = phi vec(H) (K, ...) and mean squares (...)."""
        mhc, M, bias, gain = self.settings, self.streams, bias.to(z.dtype), gain.to(z.dtype)
        raw = (z * inverse_rms(square, self.eps)).flatten(1)
        parts = zip(bias.unsqueeze(-1).split(self.parts), gain, raw.split(self.parts), strict=True)
        read, write, *carry = (torch.addcmul(b, g, r) for b, g, r in parts)
        read = read.sigmoid() if mhc.reads == "sigmoid" else read
        write = 2 * write.sigmoid() if mhc.writes == "sigmoid" else write
        carry = [matrix.unflatten(0, (M, M)) for matrix in carry]
        if mhc.mixing in ("sinkhorn", "softmax"):
            carry = [self.doubly_stochastic(m) if mhc.mixing == "sinkhorn" else m.softmax(1) for m in carry]

        def tokens_first(c: Tensor) -> Tensor:
            return c.flatten(0, -2).t().contiguous().view(*square.shape, *c.shape[:-1])

        return tuple(tokens_first(c) for c in (read, write, *carry))

    def routed(self, H: Tensor) -> tuple[Tensor, Flow]:
        H, z, square = project(H, self.project.weight, together=True)
        read, write, *carry = recomputed(self.coefficients, z, square, self.bias, self.gain)
        unmixed = torch.eye(self.streams).to(read).expand(*read.shape, -1)
        return H, Flow(read, carry[0] if carry else unmixed, write)


@dataclass(frozen=True)
class MHC(OverStreams, ResidualStrategy):
    """mHC: several streams, mixed by doubly stochastic matrices of the token (arXiv:2512.24880).

    Args:
        preset: "paper" or "depthbench"; fills in what is left out below.
        streams: M copies of the stream.
        init: "gap8": each sublayer reads one stream and keeps all (DepthBench's main runs); "gap16": the same with
            twice the logit on the diagonal, where the mixing hardly learns; "uniform": reads and mixes all alike
            (DepthBench's first runs); "random": the same with gains of 1 (Liger, DeepSeek-V4); "signs": logits of
            +-1 for reads and writes (mhc-lite's repository); "soft": logits of 0 and 1 (lucidrains' package). The
            paper does not say. "gap8", "gap16" and "uniform" start as Pre-LN, "uniform" up to phi.
        gap: size of the logits in "gap8", "gap16" and off the diagonal in "signs".
        reads: "sigmoid" (non-negative) or "free".
        writes: "sigmoid" (between 0 and 2) or "free".
        mixing: "sinkhorn" (doubly stochastic), "softmax" (only rows sum to 1), "free", or "identity" (streams are
            never mixed).
        sinkhorn_iterations: normalisations of columns and rows.
        sinkhorn_order: "paper": exp, then columns and rows in turn; "liger": softmax over rows plus 1e-6 first, ending
            with the columns (Liger, DepthBench).
        sinkhorn_rounding: make all sums exactly 1 afterwards; neither paper nor ports do. Without it, logits that are
            far apart leave one kind of sum off by up to 1.
        read_out: "mean" of the streams or "sum", then the final norm, which makes them equal up to its eps; or
            "norm_then_sum", the final norm on each stream and then the sum.
        divide_out: divide the initial out-projections of attention and feed-forward by sqrt(M). Off in the paper, on in
            DepthBench.
        eps: of the norm, without gain, behind which the coefficients are read: 1e-20 in the paper, 1e-6 in DepthBench.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"sinkhorn_order": "paper", "divide_out": False, "eps": 1e-20},
        "depthbench": {"sinkhorn_order": "liger", "divide_out": True, "eps": 1e-6},
    }

    preset: Literal["paper", "depthbench"] = "paper"
    streams: int = 4
    init: InitName = "gap8"
    gap: float = 8.0
    reads: Literal["sigmoid", "free"] = "sigmoid"
    writes: Literal["sigmoid", "free"] = "sigmoid"
    mixing: Literal["sinkhorn", "softmax", "free", "identity"] = "sinkhorn"
    sinkhorn_iterations: int = 20
    sinkhorn_order: Order | None = None
    sinkhorn_rounding: bool = False
    read_out: ReadOut = "mean"
    divide_out: bool | None = None
    eps: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)

    def connect(self, site: Site) -> Connection:
        return ManifoldConnection(site, self)
