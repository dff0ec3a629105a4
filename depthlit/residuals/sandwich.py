"""Sandwich-LN and Peri-LN: a norm before each branch and a norm behind it.

    h <- h + N_post(F(N(h)));   Peri-LN also norms the embedding: h_0 = N_0(e)

Ding et al., CogView, arXiv:2105.13290 (Sandwich-LN); Kim et al., Peri-LN, arXiv:2502.02732. DepthBench's Sandwich-LN
(arXiv:2609.32534) is the first: four RMSNorms a block, none on the embedding. The norm behind the branch depends on the
token, so there are no scalar paths.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from depthlit.connection import Connection, Entry, ResidualStrategy, Site
from depthlit.layers import RMSNorm
from depthlit.shape import ShapeSpec


class SandwichConnection(Connection):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.post = RMSNorm(site.shape.d_model, site.shape.norm_eps)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return h + self.post(branch(self.norm(h)))


class NormedEntry(Entry):
    def __init__(self, shape: ShapeSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.d_model, shape.norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@dataclass(frozen=True)
class SandwichLN(ResidualStrategy):
    """Sandwich-LN: h <- h + N(F(N(h))), a norm on both sides of each branch (arXiv:2105.13290).

    Args:
        embedding_norm: also norm the embedding, which makes it Peri-LN (arXiv:2502.02732).
    """

    embedding_norm: bool = False

    def entry(self, shape: ShapeSpec) -> Entry:
        return NormedEntry(shape) if self.embedding_norm else Entry()

    def connect(self, site: Site) -> Connection:
        return SandwichConnection(site)
