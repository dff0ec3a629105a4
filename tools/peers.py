"""Other people's residual machinery on our backbone, for benchmarks of the same work; each if its package is there.

A peer is a residual strategy whose routing is the package's own code: the branches, norms and shapes are ours, so that
what differs in time and memory is the routing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import NamedTuple

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


class FlaMixture(nn.Module):
    """The naive operator of `flash-linear-attention`."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.query, self.gain = nn.Parameter(torch.zeros(d_model)), nn.Parameter(torch.ones(d_model))

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        from fla.ops.attnres.naive import naive_attnres

        found = naive_attnres(self.query, list(sources), self.gain, rms_eps=1e-6)
        return found[0] if isinstance(found, tuple) else found


class AttnResMixture(nn.Module):
    """The operator of `attn-res`, which wants its sources stacked and has no gain."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        from attn_res import AttnResOperator

        self.operator = AttnResOperator(d_model)

    def forward(self, sources: tuple[Tensor, ...]) -> Tensor:
        return self.operator(torch.stack(sources))


Mixture = Callable[[int], nn.Module]
"""d_model -> a module that mixes sources (B, T, D)."""


class HistoryConnection(Connection):
    def __init__(self, site: Site, mixture: Mixture) -> None:
        super().__init__()
        self.norm = RMSNorm(site.shape.d_model, 1e-12)
        self.mixture = mixture(site.shape.d_model) if site.sublayer else None

    def forward(self, state: History, branch: Callable[[Tensor], Tensor]) -> History:
        x = state.sources[0] if self.mixture is None else self.mixture(state.sources)
        return History((*state.sources, branch(self.norm(x))))


class HistoryExit(Exit):
    def __init__(self, d_model: int, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture(d_model)

    def lens(self, state: History) -> Tensor:
        return self.mixture(state.sources)


@dataclass(frozen=True)
class OverHistory(ResidualStrategy):
    """Full Attention Residuals by somebody's operator over all sources."""

    mixture: Mixture

    def entry(self, shape: ShapeSpec) -> Entry:
        return HistoryEntry()

    def connect(self, site: Site) -> Connection:
        return HistoryConnection(site, self.mixture)

    def exit(self, shape: ShapeSpec) -> Exit:
        return HistoryExit(shape.d_model, self.mixture)


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
    "flash-linear-attention (naive)": ("fla", partial(OverHistory, FlaMixture)),
    "attn-res": ("attn_res", partial(OverHistory, AttnResMixture)),
    "hyper-connections": ("hyper_connections", LucidrainsStreams),
}
"""By name: the module that must be importable, and the strategy."""


def installed() -> dict[str, ResidualStrategy]:
    """The peers whose packages are here."""
    return {name: make() for name, (module, make) in PEERS.items() if find_spec(module)}


class Peer(nn.Module):
    """Somebody's whole model as (tokens, targets) -> loss per token, from full logits.

    Args:
        model: token ids -> logits (B, T, V).
    """

    def __init__(self, model: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")


def hugging_face_llama(shape: ShapeSpec) -> nn.Module:
    """`transformers`' Llama of this shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from depthlit.convert import config_of

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            config = LlamaConfig(**{**config_of(shape), "attn_implementation": "sdpa", "use_cache": False})
            self.llama = LlamaForCausalLM(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.llama(input_ids=tokens).logits

    return Peer(Logits())


def lit_gpt(shape: ShapeSpec) -> nn.Module:
    """`litgpt`'s model of this shape, set to Llama's parts."""
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config(
        block_size=shape.max_seq_len, n_layer=shape.n_layer, n_embd=shape.d_model, n_head=shape.n_head,
        n_query_groups=shape.n_kv_head, vocab_size=shape.vocab_size, padded_vocab_size=shape.vocab_size,
        intermediate_size=shape.d_ff, norm_class_name="RMSNorm", norm_eps=shape.norm_eps, bias=False,
        parallel_residual=False, rotary_percentage=1.0, rope_base=int(shape.rope_theta), mlp_class_name="LLaMAMLP",
    )  # fmt: skip
    return Peer(GPT(config))


MODELS: dict[str, tuple[str, Callable[[ShapeSpec], nn.Module]]] = {
    "Hugging Face Llama": ("transformers", hugging_face_llama),
    "LitGPT": ("litgpt", lit_gpt),
}
"""Whole models by name: the module that must be importable, and what makes one."""


def whole_models(shape: ShapeSpec) -> dict[str, nn.Module]:
    """Those whose packages are here."""
    return {name: make(shape) for name, (module, make) in MODELS.items() if find_spec(module)}
