"""Other people's residual machinery on our backbone, for benchmarks of the same work; each if its package is there.

A peer is a residual strategy whose routing is the package's own code: the branches, norms and shapes are ours, so that
what differs in time and memory is the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Entry, Exit, ResidualStrategy, Site
from depthlit.layers import RMSNorm
from depthlit.shape import ShapeSpec


class History(NamedTuple):
    sources: tuple[Tensor, ...]


class HistoryEntry(Entry):
    def forward(self, x: Tensor) -> History:
        return History((x,))


def naive(sources: tuple[Tensor, ...], query: Tensor, gain: Tensor) -> Tensor:
    from fla.ops.attnres.naive import naive_attnres

    found = naive_attnres(query, list(sources), gain, rms_eps=1e-6)
    return found[0] if isinstance(found, tuple) else found


class HistoryConnection(Connection):
    def __init__(self, site: Site) -> None:
        super().__init__()
        D = site.shape.d_model
        self.norm = RMSNorm(D, 1e-12)
        self.query = nn.Parameter(torch.zeros(D)) if site.sublayer else None
        self.gain = nn.Parameter(torch.ones(D)) if site.sublayer else None

    def forward(self, state: History, branch: Callable[[Tensor], Tensor]) -> History:
        x = state.sources[0]
        if self.query is not None and self.gain is not None:
            x = naive(state.sources, self.query, self.gain)
        return History((*state.sources, branch(self.norm(x))))


class HistoryExit(Exit):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query, self.gain = nn.Parameter(torch.zeros(d_model)), nn.Parameter(torch.ones(d_model))

    def lens(self, state: History) -> Tensor:
        return naive(state.sources, self.query, self.gain)


@dataclass(frozen=True)
class FlaAttentionResiduals(ResidualStrategy):
    """`flash-linear-attention`: its naive operator over all sources."""

    def entry(self, shape: ShapeSpec) -> Entry:
        return HistoryEntry()

    def connect(self, site: Site) -> Connection:
        return HistoryConnection(site)

    def exit(self, shape: ShapeSpec) -> Exit:
        return HistoryExit(shape.d_model)


class FoldedEntry(Entry):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(4, 0)  # the package folds streams into the batch: (B s) T D


class FoldedConnection(Connection):
    def __init__(self, site: Site) -> None:
        super().__init__()
        from hyper_connections import HyperConnections

        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.streams = HyperConnections(4, dim=site.shape.d_model, layer_index=site.sublayer)

    def forward(self, state: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        x, add = self.streams(state)
        return add(branch(self.norm(x)))


class FoldedExit(Exit):
    def lens(self, state: Tensor) -> Tensor:
        return state.unflatten(0, (-1, 4)).sum(1)


@dataclass(frozen=True)
class LucidrainsStreams(ResidualStrategy):
    """`hyper-connections`: its own four streams."""

    def entry(self, shape: ShapeSpec) -> Entry:
        return FoldedEntry()

    def connect(self, site: Site) -> Connection:
        return FoldedConnection(site)

    def exit(self, shape: ShapeSpec) -> Exit:
        return FoldedExit()


PEERS: dict[str, tuple[str, Callable[[], ResidualStrategy]]] = {
    "flash-linear-attention (naive)": ("fla", FlaAttentionResiduals),
    "hyper-connections": ("hyper_connections", LucidrainsStreams),
}
"""By name: the module that must be importable, and the strategy."""


def installed() -> dict[str, ResidualStrategy]:
    """The peers whose packages are here."""
    return {name: make() for name, (module, make) in PEERS.items() if find_spec(module)}


def hugging_face_llama(shape: ShapeSpec) -> Any:
    """`transformers`' Llama of this shape as (tokens, targets) -> loss per token; None if it is not installed."""
    if not find_spec("transformers"):
        return None
    from transformers import LlamaConfig, LlamaForCausalLM

    from depthlit.convert import config_of

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(**{**config_of(shape), "attn_implementation": "sdpa", "use_cache": False})
            self.model = LlamaForCausalLM(config)

        def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
            logits = self.model(input_ids=tokens).logits
            return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")

    return Llama()
