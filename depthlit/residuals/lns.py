"""LNS: what a branch reads shrinks with depth, so that the variance of the stream stays bounded.

    h <- h + F(c N(h)),   c = 1 / sqrt(l) in block l = 1 .. L

Sun et al., The Curse of Depth in Large Language Models, arXiv:2502.05795. The factor is a Python number, not a weight:
it can't be trained, decayed or lost when weights are made on the meta device. N is RMSNorm. The paper advises against
combining it with depth-scaled initial weights, which this backbone has not. It counts as part of the branch in `flow`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from depthlit.connection import Connection, Flow, ResidualStrategy, Site
from depthlit.layers import RMSNorm
from depthlit.shape import ShapeSpec


class LNSConnection(Connection):
    def __init__(self, site: Site, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return h + branch(self.factor * self.norm(h))

    def flow(self, h: Tensor) -> Flow:
        one = h.new_ones(1)
        return Flow(read=one, carry=one[:, None], write=one)

    def extra_repr(self) -> str:
        return f"factor={self.factor:.4g}"


@dataclass(frozen=True)
class LNS(ResidualStrategy):
    """LayerNorm Scaling: h <- h + F(N(h) / sqrt(l)) in block l = 1 .. L (arXiv:2502.05795).

    Args:
        scale: `block` is 1 / sqrt(l), the paper's; `depth` is 1 / sqrt(L) in every block; a number is that factor in
            every block.
    """

    scale: Literal["block", "depth"] | float = "block"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.scale, str) and self.scale not in ("block", "depth"):
            raise ValueError(f"LNS has no scale {self.scale!r}; give block, depth or a number")

    def factor(self, site: Site) -> float:
        if isinstance(self.scale, str):
            return (site.block + 1 if self.scale == "block" else site.shape.n_layer) ** -0.5
        return float(self.scale)

    def connect(self, site: Site) -> Connection:
        return LNSConnection(site, self.factor(site))

    def learning_rate(self, shape: ShapeSpec) -> float:
        """1e-2, at 1.6B 5e-4 (DepthBench, arXiv:2609.32534, found LNS best at five times the rate of the others)."""
        return 5e-4 if shape.parameters() > 1e9 else 1e-2
