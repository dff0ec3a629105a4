"""MoDA: attention also sees the keys and values that earlier sublayers left at the same token.

    h <- h + F(N(h));   attention of block l: one softmax over {q_t k_j, j <= t} and {q_t kappa_{t,i}, i < 2 l}

Mixture-of-Depths Attention, arXiv:2603.15619. Slots of a block: its own k and v, and a projection of what its
feed-forward reads. The paper is silent on rotary positions of depth keys. Turning both sides at one token cancels, so
`both` and `none` are one function, computed as `both`; DepthBench (arXiv:2609.32534) turns the query alone. The paper
prefers Post-LN, DepthBench Pre-LN, the default here. A skipped block leaves no slot, so it takes no share of the
softmax. `flow` and `lens` speak of the stream h; what passes through keys and values is a second, separate path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

from torch import Tensor, nn

from depthlit.connection import Connection, Counting, Entry, Exit, Flow, ResidualStrategy, Site
from depthlit.depth_attention import depth_attention
from depthlit.layers import BoundAttention, Context, RMSNorm, rotate
from depthlit.shape import ShapeSpec


class Memory(NamedTuple):
    h: Tensor  # (B, T, D)
    keys: tuple[Tensor, ...] = ()  # one (B, H_kv, T, C) per slot
    values: tuple[Tensor, ...] = ()
    places: Context | None = None  # of the tokens, from the first attention on: a feed-forward is not told

    def left(self, h: Tensor, key: Tensor, value: Tensor) -> Memory:
        return self._replace(h=h, keys=(*self.keys, key), values=(*self.values, value))


class MemoryConnection(Connection):
    """Pre-LN h + F(N(h)) or Post-LN N(h + F(h)), of the stream h."""

    def __init__(self, site: Site, strategy: MoDA) -> None:
        super().__init__()
        self.post = strategy.norm == "post"
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.turn_keys = strategy.depth_rope != "q_only"

    def read(self, h: Tensor) -> Tensor:
        return h if self.post else self.norm(h)

    def write(self, h: Tensor, y: Tensor) -> Tensor:
        return self.norm(h + y) if self.post else h + y

    def lens(self, state: Memory) -> Tensor:
        return state.h

    def flow(self, state: Memory) -> Flow | None:
        one = state.h.new_ones(1)
        return None if self.post else Flow(read=one, carry=one[:, None], write=one)


class AttentionMemory(MemoryConnection):
    def __init__(self, site: Site, strategy: MoDA) -> None:
        super().__init__(site, strategy)
        self.leaves = strategy.memory != "none"
        self.n_slot = {"full": site.sublayer, "attention": site.block, "none": 0}[strategy.memory]
        self.d_model = site.shape.d_model

    def flops(self, counting: Counting = "exact") -> float:
        """A dot product and a sum per slot in every head. DepthBench leaves MoDA out of its counts."""
        return 4 * self.n_slot * self.d_model

    def forward(self, state: Memory, branch: Callable[[Tensor], Tensor]) -> Memory:
        attn = cast(BoundAttention, branch)
        x = self.read(state.h)
        q, k, v = attn.project(x)
        if not state.keys:
            y = attn.attend(q, k, v)
            key = attn.rotate(k) if self.turn_keys and self.leaves else k
        else:
            turned = attn.rotate(k)
            key = turned if self.turn_keys else k
            mask = attn.context.mask
            y, keys, values = depth_attention(attn.rotate(q), turned, v, state.keys, state.values, mask)
            state = state._replace(keys=keys, values=values)
        h = self.write(state.h, attn.merge(y).to(x.dtype))
        return state._replace(places=attn.context).left(h, key, v) if self.leaves else state._replace(h=h)


class FeedForwardMemory(MemoryConnection):
    def __init__(self, site: Site, strategy: MoDA) -> None:
        super().__init__(site, strategy)
        shape = site.shape
        self.head_dim = shape.head_dim
        self.leaves = strategy.memory == "full" and not site.is_last  # nobody reads what the last block leaves
        if self.leaves:
            self.k = nn.Linear(shape.d_model, shape.d_kv, bias=False)
            self.v = nn.Linear(shape.d_model, shape.d_kv, bias=False)

    def flops(self, counting: Counting = "exact") -> float:
        """The projections of the slot that is left."""
        return 2 * (self.k.weight.numel() + self.v.weight.numel()) if self.leaves else 0

    def forward(self, state: Memory, branch: Callable[[Tensor], Tensor]) -> Memory:
        x = self.read(state.h)
        h = self.write(state.h, branch(x))
        if not self.leaves:
            return state._replace(h=h)
        k, v = self.split(self.k(x)), self.split(self.v(x))
        return state.left(h, rotate(k, cast(Context, state.places)) if self.turn_keys else k, v)

    def split(self, x: Tensor) -> Tensor:
        """(B, T, H_kv C) -> (B, H_kv, T, C)"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MemoryEntry(Entry):
    def forward(self, x: Tensor) -> Memory:
        return Memory(x)


class MemoryExit(Exit):
    def lens(self, state: Memory) -> Tensor:
        return state.h


@dataclass(frozen=True)
class MoDA(ResidualStrategy):
    """Mixture-of-Depths Attention: attention also reads keys and values of earlier sublayers (arXiv:2603.15619).

    Args:
        preset: `paper`, or `depthbench`, which sets what is left open below.
        norm: `pre` (Pre-LN, the default of both presets) or `post` (Post-LN, which the paper found better with MoDA).
        depth_rope: `both` (paper) or `none`: query and depth key stand at the same place, so their rotation cancels;
            `q_only` (depthbench): the query alone is rotated, which makes depth scores depend on the position.
        memory: `full`: attention and feed-forward leave keys and values; `attention`: only attention does, without
            any new weight; `none`: nothing is left, which is plain Pre-LN or Post-LN.
    """

    presets: ClassVar = {"paper": {"depth_rope": "both"}, "depthbench": {"depth_rope": "q_only"}}

    preset: Literal["paper", "depthbench"] = "paper"
    norm: Literal["pre", "post"] = "pre"
    depth_rope: Literal["both", "none", "q_only"] | None = None
    memory: Literal["full", "attention", "none"] = "full"

    def entry(self, shape: ShapeSpec) -> Entry:
        return MemoryEntry()

    def connect(self, site: Site) -> Connection:
        return AttentionMemory(site, self) if site.is_attention else FeedForwardMemory(site, self)

    def exit(self, shape: ShapeSpec) -> Exit:
        return MemoryExit()
