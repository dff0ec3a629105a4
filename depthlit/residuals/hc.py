"""Hyper-Connections: M streams; what is read, carried and written depends on the token, a little.

    d = tanh(N(H) W)                                               one row for each stream s, N without gain
    x = sum_s (a[s] + c d[s, read]) H[s]
    H'[t] = sum_s (A[t, s] + c d[s, t]) H[s] + (b[t] + e d[t, write]) F(N(x))

Zhu et al., Hyper-Connections, arXiv:2409.19606. At first W = 0, A = 1, b = 1, c = e = 0.01 and a is 1 for the stream
(sublayer mod M) and 0 else, which is Pre-LN; the paper's A_r is the transpose of A. Weights that multiply a norm's
output are read before it: one matrix product, then one division. N is RMSNorm, as in every public port.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Draw, Flow, ResidualStrategy, Site
from depthlit.layers import at_least_fp32
from depthlit.mixers.streams import project
from depthlit.recipe import recomputed
from depthlit.residuals.streams import OverStreams, ReadOut, StreamConnection, check, inverse_rms


def coefficients(
    z: Tensor, square: Tensor, read: Tensor, carry: Tensor, write: Tensor, alpha: Tensor, beta: Tensor,
    eps: float, tanh: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Read (..., M), carry (..., M out, M in) and write (..., M) from z = W H (2 + M, ..., M) and mean squares."""
    read, carry, write, alpha, beta = (p.to(z.dtype) for p in (read, carry, write, alpha, beta))
    d = z * inverse_rms(square, eps)
    d = d.tanh() if tanh else d
    moved = (alpha * d[2:]).movedim(0, -2).contiguous()
    return torch.addcmul(read, alpha, d[0]), carry + moved, torch.addcmul(write, beta, d[1])


class HyperConnection(StreamConnection):
    """The static coefficients, and the small correction that is read off each stream."""

    def __init__(self, site: Site, hc: HC) -> None:
        super().__init__(site, hc.streams, hc.read_out, bool(hc.divide_out))
        D, M = self.d_model, self.streams
        self.eps, self.tanh = hc.eps, hc.tanh
        self.read, self.write = (nn.Parameter(torch.empty(M)) for _ in range(2))
        self.carry = nn.Parameter(torch.empty(M, M))
        self.dynamic = hc.dynamic
        if self.dynamic:
            self.project = nn.Linear(D, 2 + M, bias=False)  # rows: read, write, carry to stream 0 ... M - 1
            self.scale_alpha, self.scale_beta = (nn.Parameter(torch.empty(1)) for _ in range(2))
            self.project_flops = 2 * M * D * (2 + M)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.read.zero_()[self.first] = 1
        nn.init.eye_(self.carry)
        nn.init.ones_(self.write)
        if self.dynamic:
            for scale in (self.scale_alpha, self.scale_beta):
                nn.init.constant_(scale, 0.01)
            nn.init.zeros_(self.project.weight)

    def init_own(self, draw: Draw) -> None:
        if self.dynamic:
            nn.init.zeros_(self.project.weight)

    def routed(self, H: Tensor) -> tuple[Tensor, Flow]:
        if not self.dynamic:
            return H, Flow(*(at_least_fp32(p) for p in (self.read, self.carry, self.write)))
        H, z, square = project(H, self.project.weight, together=False)
        own = self.read, self.carry, self.write, self.scale_alpha, self.scale_beta
        return H, Flow(*recomputed(partial(coefficients, eps=self.eps, tanh=self.tanh), z, square, *own))


@dataclass(frozen=True)
class HC(OverStreams, ResidualStrategy):
    """Hyper-Connections: several streams, read, mixed and written by weights (arXiv:2409.19606).

    Args:
        preset: "paper" or "depthbench"; fills in what is left out below.
        streams: M copies of the stream.
        dynamic: let the weights depend on the token; otherwise they are M (M + 2) constants per sublayer.
        tanh: bend the part that depends on the token by tanh.
        read_out: "sum" of the streams, then the final norm (paper, late DepthBench); "mean"; or "norm_then_sum", the
            final norm on each stream and then the sum (early DepthBench).
        divide_out: divide the initial out-projections of attention and feed-forward by sqrt(M). Off in the paper, on in
            DepthBench.
        eps: of the norm, without gain, behind which the weights are read.
    """

    preset: Literal["paper", "depthbench"] = "paper"
    streams: int = 4
    dynamic: bool = True
    tanh: bool = True
    read_out: ReadOut = "sum"
    divide_out: bool | None = None
    eps: float = 1e-8

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "paper": {"divide_out": False},
        "depthbench": {"divide_out": True},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self)

    def connect(self, site: Site) -> Connection:
        return HyperConnection(site, self)
