"""Pre-LN: the plain residual stream; every sublayer reads the sum of all before it.

    h <- h + F(N(h))

Xiong et al., On Layer Normalization in the Transformer Architecture, arXiv:2002.04745. N is RMSNorm.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from depthlit.connection import Connection, Flow, ResidualStrategy, Site
from depthlit.layers import RMSNorm


class PreLNConnection(Connection):
    def __init__(self, site: Site) -> None:
        super().__init__()
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return h + branch(self.norm(h))

    def flow(self, h: Tensor) -> Flow:
        one = h.new_ones(1)
        return Flow(read=one, carry=one[:, None], write=one)


@dataclass(frozen=True)
class PreLN(ResidualStrategy):
    """Pre-LN: h <- h + F(N(h)), the baseline (arXiv:2002.04745)."""

    foreign: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "llama": {"join_attn.norm": "input_layernorm", "join_mlp.norm": "post_attention_layernorm"}
    }

    def connect(self, site: Site) -> Connection:
        return PreLNConnection(site)
