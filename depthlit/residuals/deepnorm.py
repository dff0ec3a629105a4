"""DeepNorm: Post-LN with a loud stream and quiet branches.

    h <- N(alpha h + F(h)),   alpha = (2L)^(1/4);   fresh v, out, gate and up (FFN) times beta = (8L)^(-1/4)

Wang et al., DeepNet: Scaling Transformers to 1,000 Layers, arXiv:2203.00555, decoder-only constants, L blocks.
The paper's feed-forward has no gate; here the gate matrix is scaled by beta like the rest, so a fresh SwiGLU shrinks
about as beta^3 (DepthBench does the same). N is a LayerNorm, without bias because nothing in this backbone has one.
Random weights are normal, cut at 3 std, like all here: std gain sqrt(2 / (in + out)) for `paper`, 0.02 gain for
`depthbench`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from depthlit.connection import Connection, ResidualStrategy, Site
from depthlit.decoder import INIT_STD
from depthlit.layers import RMSNorm, at_least_fp32
from depthlit.shape import ShapeSpec

Norm = Literal["layernorm", "layernorm_bias", "rmsnorm"]


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm, computed in fp32 or wider, returned in the dtype of x, whatever the dtype of its weights."""

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        weight, bias = (None if p is None else p.to(wide.dtype) for p in (self.weight, self.bias))
        return F.layer_norm(wide, self.normalized_shape, weight, bias, self.eps).to(x.dtype)


def norm_of(kind: Norm, shape: ShapeSpec) -> nn.Module:
    if kind == "rmsnorm":
        return RMSNorm(shape.d_model, shape.norm_eps)
    return LayerNorm(shape.d_model, shape.norm_eps, bias=kind == "layernorm_bias")


class DeepNormConnection(Connection):
    def __init__(self, site: Site, norm: Norm, xavier: bool) -> None:
        super().__init__()
        L = site.shape.n_layer
        self.alpha, self.beta, self.xavier = (2 * L) ** 0.25, (8 * L) ** -0.25, xavier
        self.norm = norm_of(norm, site.shape)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return self.norm(self.alpha * h + branch(h))

    @torch.no_grad()
    def init_branch(self, branch: nn.Module) -> None:
        """The weights come drawn at std 0.02; a factor takes them to the wanted std."""
        for name, weight in branch.named_parameters():
            gain = 1.0 if name in ("q.weight", "k.weight") else self.beta
            weight.mul_(gain * (2 / sum(weight.shape)) ** 0.5 / INIT_STD if self.xavier else gain)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:.4g}, beta={self.beta:.4g}"


@dataclass(frozen=True)
class DeepNorm(ResidualStrategy):
    """DeepNorm: h <- N((2L)^(1/4) h + F(h)), with branches scaled down by (8L)^(-1/4) at first (arXiv:2203.00555).

    Args:
        preset: `paper`, or `depthbench`, which sets what is left open below.
        init: fresh branches: `xavier` (paper) or `normal` of std 0.02 (depthbench), v, out, gate, up times beta.
        norm: `layernorm` (no bias), `layernorm_bias` or `rmsnorm`.
    """

    presets: ClassVar = {"paper": {"init": "xavier"}, "depthbench": {"init": "normal"}}

    preset: Literal["paper", "depthbench"] = "paper"
    init: Literal["xavier", "normal"] | None = None
    norm: Norm = "layernorm"

    def connect(self, site: Site) -> Connection:
        return DeepNormConnection(site, self.norm, xavier=self.init == "xavier")

    def learning_rate(self, shape: ShapeSpec) -> float:
        """1e-3, at 1.6B 5e-4 (DepthBench, arXiv:2609.32534: 2e-3 diverges)."""
        return 5e-4 if shape.parameters() > 1e9 else 1e-3
