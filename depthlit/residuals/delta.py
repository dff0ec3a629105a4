"""Delta AttnRes: a plain residual stream, with a mixture of what was written on top of what each sublayer reads.

    z_k = h_k + a sum_i p_i v_i,   p = softmax_i( q_k . (g_k * RMSNorm(v_i)) ),   v = e, F_0, ..., F_(k-1)
    h_(k+1) = h_k + F(N(z_k));   read-out N(h)

Delta Attention Residuals, arXiv:2605.18855. The first sublayer has no sources; a = 1 and is no parameter. With "block"
deltas an output joins the sum of its group. h is the sum of all v, so z is computed as sum_i (1 + a p_i) v_i and h is
kept nowhere. At zero queries z is a multiple of h, which the norm takes away: Pre-LN, but for that norm's eps. The
authors' code for blocks subtracts the last delta from the state instead of taking the group's sum; that is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from depthlit.connection import Exit, ResidualStrategy
from depthlit.residuals.groups import Groups, Remainder, check_groups, groups_of
from depthlit.residuals.sources import Mixing, OverSources, StreamExit
from depthlit.shape import ShapeSpec


@dataclass(frozen=True)
class DeltaAttnRes(OverSources, ResidualStrategy):
    """Delta AttnRes: the plain stream plus a softmax over what was written to it (arXiv:2605.18855).

    Args:
        deltas: "sublayer": every output is a source; "block": the sum of each group of sublayers is.
        num_blocks: with "block" deltas the number of groups; 8 if neither this nor `block_size` is given.
        block_size: with "block" deltas the sublayers per group; instead of `num_blocks`.
        remainder: what to do where it does not come out even. "extra": one more, shorter group (paper); "balanced":
            lengths that differ by at most one; "error": refuse.
        gate: factor on the mixture. "none": 1; "zero": learned per sublayer, 0 at first; "sigmoid": the sigmoid of a
            learned number, -2 at first.
        null_source: let the softmax also choose nothing, at score 0.
        key_gain: give the keys' norm a gain.
        key_eps: of the keys' norm.
        query_std: standard deviation of the initial queries.
    """

    deltas: Literal["sublayer", "block"] = "sublayer"
    num_blocks: int | None = None
    block_size: int | None = None
    remainder: Remainder = "extra"
    gate: Literal["none", "zero", "sigmoid"] = "none"
    null_source: bool = False
    key_gain: bool = True
    key_eps: float = 1e-6
    query_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_blocks, self.block_size, self.remainder)
        if self.deltas == "sublayer" and (self.num_blocks or self.block_size):
            raise ValueError("num_blocks and block_size need deltas='block'; with 'sublayer' every output is a source")

    def mixing(self) -> Mixing:
        return Mixing(
            self.key_eps, self.key_gain, self.query_std, on_stream=True, gate=self.gate, null_source=self.null_source
        )

    def groups(self, shape: ShapeSpec) -> Groups:
        if self.deltas == "sublayer":
            return Groups((1,) * shape.n_sublayer)
        return groups_of(shape.n_sublayer, self.num_blocks, self.block_size, self.remainder)

    def exit(self, shape: ShapeSpec) -> Exit:
        return StreamExit()
