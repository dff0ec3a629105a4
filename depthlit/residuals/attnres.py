"""Attention Residuals: every sublayer chooses its input among the embedding and all that was written before it.

    z_k = sum_i p_i v_i,   p = softmax_i( q_k . (g_k * RMSNorm(v_i)) ),   v = e, F_0, ..., F_(k-1);   F_k = F(N(z_k))

Kimi Team, Attention Residuals, arXiv:2603.15031. Block AttnRes sums the outputs of a group of sublayers into one
source; the group that is still open takes part with its sum so far, and the embedding is in no group. The exit mixes
with a query of its own. At zero queries z is the mean, and the norm behind it makes that Pre-LN, provided its eps is
small beside the mean square of a mean of many sources: hence the 1e-12. The first sublayer reads the embedding and has
no query. DepthBench (arXiv:2609.32534) has eps 1e-5 in keys and behind mixtures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

from depthlit.connection import ResidualStrategy, State, SwapRule
from depthlit.residuals.groups import Groups, Remainder, check_groups, groups_of
from depthlit.residuals.held import next_output
from depthlit.residuals.sources import Mixing, OverSources
from depthlit.shape import ShapeSpec

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "paper": {"key_eps": 1e-6, "norm_eps": 1e-12, "probe": "mixture"},
    "depthbench": {"key_eps": 1e-5, "norm_eps": 1e-5, "probe": "block"},
}

SWAPS: Mapping[str, SwapRule] = {"depthbench": SwapRule(handed_on=("query", "gain"), stays=("border",))}
"""DepthBench's swap: the query that reads what a block has written goes with that block, and groups stay."""


@dataclass(frozen=True)
class FullAttnRes(OverSources, ResidualStrategy):
    """Attention Residuals over every single output: a softmax over depth (arXiv:2603.15031).

    Args:
        preset: "paper" or "depthbench"; fills in what is left out below.
        key_gain: give the keys' norm a gain.
        key_eps: of the keys' norm: 1e-6, DepthBench 1e-5.
        norm_eps: of the norms behind a mixture: 1e-12, so that zero queries are Pre-LN; DepthBench 1e-5.
        query_std: standard deviation of the initial queries; 0 is critical according to the paper.
        probe: what angles and norms look at. "mixture": what the next reader mixes; "block": that at the border of a
            group, within one the sum so far (DepthBench). Every sublayer is a border here.
    """

    preset: Literal["paper", "depthbench"] = "paper"
    key_gain: bool = True
    key_eps: float | None = None
    norm_eps: float | None = None
    query_std: float = 0.0
    probe: Literal["mixture", "block"] | None = None

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS
    skip_rules: ClassVar[Mapping[str, Callable[[State], State]]] = {"next_output": next_output}
    swap_rules: ClassVar[Mapping[str, SwapRule]] = SWAPS

    def mixing(self) -> Mixing:
        return Mixing(cast(float, self.key_eps), self.key_gain, self.query_std)

    def groups(self, shape: ShapeSpec) -> Groups:
        return Groups((1,) * shape.n_sublayer)


@dataclass(frozen=True)
class BlockAttnRes(OverSources, ResidualStrategy):
    """Attention Residuals over sums of groups of sublayers, called blocks in the paper (arXiv:2603.15031).

    Args:
        preset: "paper" or "depthbench"; fills in what is left out below.
        num_blocks: number of groups, counted without the embedding; 8 if neither this nor `block_size` is given.
        block_size: sublayers per group, attention and feed-forward each one; instead of `num_blocks`.
        remainder: what to do where it does not come out even. "extra": one more, shorter group (paper); "balanced":
            lengths that differ by at most one; "error": refuse.
        key_gain: give the keys' norm a gain.
        key_eps: of the keys' norm: 1e-6, DepthBench 1e-5.
        norm_eps: of the norms behind a mixture: 1e-12, so that zero queries are Pre-LN; DepthBench 1e-5.
        query_std: standard deviation of the initial queries; 0 is critical according to the paper.
        probe: what angles and norms look at. "mixture": what the next reader mixes; "block": that at the border of a
            group, within one the sum so far (DepthBench).
    """

    preset: Literal["paper", "depthbench"] = "paper"
    num_blocks: int | None = None
    block_size: int | None = None
    remainder: Remainder = "extra"
    key_gain: bool = True
    key_eps: float | None = None
    norm_eps: float | None = None
    query_std: float = 0.0
    probe: Literal["mixture", "block"] | None = None

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = PRESETS
    skip_rules: ClassVar[Mapping[str, Callable[[State], State]]] = {"next_output": next_output}
    swap_rules: ClassVar[Mapping[str, SwapRule]] = SWAPS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_blocks, self.block_size, self.remainder)

    def mixing(self) -> Mixing:
        return Mixing(cast(float, self.key_eps), self.key_gain, self.query_std)

    def groups(self, shape: ShapeSpec) -> Groups:
        return groups_of(shape.n_sublayer, self.num_blocks, self.block_size, self.remainder)
