"""Post-LN: the stream itself is normed after every addition, as in the first transformer.

    h <- N(h + F(h))

Vaswani et al., Attention Is All You Need, arXiv:1706.03762; analysed in Xiong et al., arXiv:2002.04745.
Deviates: N is RMSNorm, and the final norm of the backbone stays although the last state is already normed. This is also
DepthBench's baseline for post-norm MoDA. Branches get no norm of their own, so there are no scalar paths.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from depthlit.connection import Connection, ResidualStrategy, Site
from depthlit.layers import RMSNorm


class PostLNConnection(Connection):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return self.norm(h + branch(h))


@dataclass(frozen=True)
class PostLN(ResidualStrategy):
    """Post-LN: h <- N(h + F(h)), the norm on the stream itself (arXiv:1706.03762)."""

    def connect(self, site: Site) -> Connection:
        return PostLNConnection(site)
