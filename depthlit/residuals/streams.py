"""What HC and mHC share: M residual streams H (B, T, M, D), read, mixed and written by coefficients.

    x = read . H        H <- carry H + write F(N(x))

The coefficients are the connection's `flow`; its `forward` is this equation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Counting, Entry, Exit, Flow, Reader, ResidualStrategy, Site
from depthlit.layers import RMSNorm
from depthlit.mixers import streams
from depthlit.shape import ShapeSpec

ReadOut = Literal["sum", "mean", "norm_then_sum"]


def check(strategy: ResidualStrategy) -> None:
    """Refuse settings that are none of their named choices, and fewer than one stream or iteration."""
    name = type(strategy).__name__
    for setting, hint in get_type_hints(type(strategy)).items():
        value, options = getattr(strategy, setting), [hint, *get_args(hint)]
        choices = [c for option in options if get_origin(option) is Literal for c in get_args(option)]
        if choices and value not in choices:
            raise ValueError(f"{name} has no {setting} {value!r}; known: {', '.join(choices)}")
    for setting in {"streams", "sinkhorn_iterations"} & vars(strategy).keys():
        if getattr(strategy, setting) < 1:
            raise ValueError(f"{name} needs {setting} >= 1, not {getattr(strategy, setting)}")


def gathered(H: Tensor, read_out: ReadOut) -> Tensor:
    """(B, T, M, D) -> (B, T, D)"""
    return H.mean(-2) if read_out == "mean" else H.sum(-2)


def gathered_and_normed(H: Tensor, read_out: ReadOut, norm: nn.Module) -> Tensor:
    """(B, T, M, D) -> (B, T, D), behind the final norm."""
    return norm(H).sum(-2) if read_out == "norm_then_sum" else norm(gathered(H, read_out))


def inverse_rms(square: Tensor, eps: float) -> Tensor:
    """1 / sqrt(square + eps) of a mean square; 0 where it is 0, where any factor gives 0 and 1 / sqrt(eps) would only
    blow up gradients."""
    return torch.where(square > 0, (square + eps).rsqrt(), 0.0)


@torch.no_grad()
def spread(H: Tensor) -> Tensor:
    """How different the streams are: rms distance from their mean over their rms, averaged over tokens. 0: equal."""
    H = H.double()
    apart, size = (H - H.mean(-2, keepdim=True)).square().sum((-2, -1)), H.square().sum((-2, -1))
    return (apart / size.clamp_min(torch.finfo(size.dtype).tiny)).sqrt().mean()


class StreamEntry(Entry):
    """Copies the embedding into every stream."""

    def __init__(self, streams: int) -> None:
        super().__init__()
        self.streams = streams

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-2).repeat_interleave(self.streams, -2)

    def write(self, x: Tensor) -> Tensor:
        return x.new_ones(self.streams)


class StreamReader(Reader):
    """Sum or mean of the streams."""

    def __init__(self, read_out: ReadOut) -> None:
        super().__init__()
        self.read_out = read_out

    def lens(self, H: Tensor) -> Tensor:
        return gathered(H, self.read_out)

    def normed(self, H: Tensor, norm: nn.Module) -> Tensor:
        return gathered_and_normed(H, self.read_out, norm)

    def probe(self, H: Tensor) -> Tensor:
        return H.flatten(-2)


class StreamExit(StreamReader, Exit):
    """What the streams come to."""

    def flow(self, H: Tensor) -> Flow:
        M = H.shape[-2]
        return Flow(H.new_full((M,), 1 / M if self.read_out == "mean" else 1.0))

    def telemetry(self, H: Tensor) -> dict[str, Tensor]:
        return {"stream_spread": spread(H)}


class StreamConnection(StreamReader, Connection):
    """Everything but the coefficients.

    A subclass computes them in `routed`, which returns H and the flow, and says in `project_flops` what that costs.
    """

    def __init__(self, site: Site, streams: int, read_out: ReadOut, divide_out: bool) -> None:
        super().__init__(read_out)
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.d_model, self.streams, self.divide_out = site.shape.d_model, streams, divide_out
        self.first = site.sublayer % streams  # the stream that is read first
        self.project_flops = 0

    def routed(self, H: Tensor) -> tuple[Tensor, Flow]:
        raise NotImplementedError(f"{type(self).__name__} must define routed(state)")

    def flow(self, H: Tensor) -> Flow:
        """Read (B, T, M), carry (B, T, M, M), write (B, T, M), or without (B, T); fp32 or wider."""
        return self.routed(H)[1]

    def forward(self, H: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        H, (read, carry, write) = self.routed(H)
        x, carried = streams.mix(H, read, cast(Tensor, carry))
        return streams.write(carried, cast(Tensor, write), branch(self.norm(x)), H.dtype)

    def init_branch(self, branch: nn.Module) -> None:
        """Divide the out-projection by sqrt(M), where the settings say so."""
        if self.divide_out:
            cast(nn.Linear, branch.out).weight.div_(self.streams**0.5)

    def flops(self, counting: Counting = "exact") -> float:
        """The projection of the coefficients, one read, M x M mixing, one write: at M = 4 and dynamic, the 96 D (HC)
        and 240 D (mHC) of DepthBench, App. D."""
        M, D = self.streams, self.d_model
        return self.project_flops + 2 * M * D + 2 * M * M * D + 2 * M * D

    @torch.no_grad()
    def telemetry(self, H: Tensor) -> dict[str, Tensor]:
        """Means over tokens.

        stream_spread: 0 where all streams are equal. read_entropy: in nats, of the shares |read|; log M if all streams
        are read alike. read_own: the share of the stream that this sublayer reads at first. write_mean. off_diagonal:
        the share of |carry| that changes streams. carry_gain: largest absolute row or column sum, at most 1 if doubly
        stochastic. carry_residual: largest distance of a row or column sum from 1.
        """
        read, carry, write = self.flow(H)
        assert carry is not None and write is not None
        share = read.abs() / read.abs().sum(-1, keepdim=True).clamp_min(torch.finfo(read.dtype).tiny)
        size = carry.abs()
        gain = torch.maximum(size.sum(-1).amax(-1), size.sum(-2).amax(-1))
        residual = torch.maximum((carry.sum(-1) - 1).abs().amax(-1), (carry.sum(-2) - 1).abs().amax(-1))
        kept = size.diagonal(dim1=-2, dim2=-1).sum(-1) / size.sum((-2, -1)).clamp_min(torch.finfo(size.dtype).tiny)
        return {
            "stream_spread": spread(H),
            "read_entropy": -torch.xlogy(share, share).sum(-1).mean(),
            "read_own": share[..., self.first].mean(),
            "write_mean": write.mean(),
            "off_diagonal": (1 - kept).mean(),
            "carry_gain": gain.mean(),
            "carry_residual": residual.mean(),
        }


class OverStreams:
    """The ends of a strategy of several streams, which names it before `ResidualStrategy`."""

    streams: int
    read_out: ReadOut

    def entry(self, shape: ShapeSpec) -> Entry:
        return StreamEntry(self.streams)

    def exit(self, shape: ShapeSpec) -> Exit:
        return StreamExit(self.read_out)
