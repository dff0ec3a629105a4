"""Multi-resolution block routing: Block AttnRes whose groups also keep details of how their sum came about.

    C = sum_i u_i,   D = sum_i r_i u_i with r_i = +-1;   the details join the sources as D sg(m), with a bias b_D < 0
    m = clip( RMS(C) / (RMS(D) + eps), 1 / rho, rho )

WAV v1, arXiv:2606.06564v1: two details, "phase" (attention minus feed-forward) and "split" (early minus late half).
HAARES, arXiv:2606.06564v2, the same authors' second version: "split" alone. The exit reads the embedding and the sums.
A last, shorter group counts its own length for its halves. Public text leaves open: rho (4 here, our guess), eps, the
number of groups, the initial queries, and for HAARES whether there is a bias (here as in v1); what is not said is taken
from Block AttnRes. While all signs of an open group are alike, a detail is its sum once more: the paper reads it all
the same, so that the first output counts 1 + 2 exp(-2) times; `mask_duplicates` leaves it out. Not Pre-LN at first.
"""

from __future__ import annotations

from dataclasses import dataclass

from depthlit.connection import ResidualStrategy
from depthlit.residuals.groups import Basis, Groups, Remainder, check_details, check_groups, groups_of
from depthlit.residuals.sources import Mixing, OverSources
from depthlit.shape import ShapeSpec


@dataclass(frozen=True)
class WAV(OverSources, ResidualStrategy):
    """WAV v1: sums of groups, and two signed details of each, as sources of a softmax over depth (arXiv:2606.06564v1).

    Args:
        num_blocks: number of groups, counted without the embedding; 8 if neither this nor `block_size` is given.
        block_size: sublayers per group, attention and feed-forward each one; instead of `num_blocks`.
        remainder: what to do where it does not come out even. "extra": one more, shorter group (paper); "balanced":
            lengths that differ by at most one; "error": refuse.
        details: what a group keeps beside its sum. "phase": attention minus feed-forward; "split": early minus late
            half; and two controls, "duplicate": the sum once more, "random": signs without meaning.
        detail_bias: initial score of each detail, learned per reader and detail.
        learn_bias: learn it; otherwise it is a constant, another control.
        max_match: rho, the largest factor by which a detail is made louder or, inverted, softer.
        match_eps: added to a detail's RMS before the division.
        mask_duplicates: leave out a detail of an open group as long as it is the group's sum once more.
        key_gain: give the keys' norm a gain.
        key_eps: of the keys' norm.
        norm_eps: of the norms behind a mixture.
        query_std: standard deviation of the initial queries.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    remainder: Remainder = "extra"
    details: tuple[Basis, ...] = ("phase", "split")
    detail_bias: float = -2.0
    learn_bias: bool = True
    max_match: float = 4.0
    match_eps: float = 1e-6
    mask_duplicates: bool = False
    key_gain: bool = True
    key_eps: float = 1e-6
    norm_eps: float = 1e-12
    query_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_blocks, self.block_size, self.remainder)
        object.__setattr__(self, "details", check_details(self.details, self.max_match))

    def mixing(self) -> Mixing:
        return Mixing(
            self.key_eps, self.key_gain, self.query_std, self.details, self.detail_bias, self.learn_bias,
            self.max_match, self.match_eps, self.mask_duplicates,
        )  # fmt: skip

    def groups(self, shape: ShapeSpec) -> Groups:
        return groups_of(shape.n_sublayer, self.num_blocks, self.block_size, self.remainder)


@dataclass(frozen=True)
class HAARES(OverSources, ResidualStrategy):
    """HAARES (WAV v2): sums of groups, and early minus late half of each, as sources (arXiv:2606.06564v2).

    Args:
        num_blocks: number of groups, counted without the embedding; 8 if neither this nor `block_size` is given.
        block_size: sublayers per group, attention and feed-forward each one; instead of `num_blocks`.
        remainder: what to do where it does not come out even. "extra": one more, shorter group (paper); "balanced":
            lengths that differ by at most one; "error": refuse.
        detail_bias: initial score of the detail, learned per reader.
        max_match: rho, the largest factor by which a detail is made louder or, inverted, softer.
        match_eps: added to a detail's RMS before the division.
        mask_duplicates: leave out a detail of an open group as long as it is the group's sum once more.
        key_gain: give the keys' norm a gain.
        key_eps: of the keys' norm.
        norm_eps: of the norms behind a mixture.
        query_std: standard deviation of the initial queries.
    """

    num_blocks: int | None = None
    block_size: int | None = None
    remainder: Remainder = "extra"
    detail_bias: float = -2.0
    max_match: float = 4.0
    match_eps: float = 1e-6
    mask_duplicates: bool = False
    key_gain: bool = True
    key_eps: float = 1e-6
    norm_eps: float = 1e-12
    query_std: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_blocks, self.block_size, self.remainder)
        check_details(("split",), self.max_match)

    def mixing(self) -> Mixing:
        return Mixing(
            self.key_eps, self.key_gain, self.query_std, ("split",), self.detail_bias, True, self.max_match,
            self.match_eps, self.mask_duplicates,
        )  # fmt: skip

    def groups(self, shape: ShapeSpec) -> Groups:
        return groups_of(shape.n_sublayer, self.num_blocks, self.block_size, self.remainder)
