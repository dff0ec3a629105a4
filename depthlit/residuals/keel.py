"""KEEL: a norm before each branch, a norm on the stream, and between them a highway as loud as the network is deep.

    h <- N_post(alpha h + F(N(h))),   alpha = 2L;   the first block is plain Pre-LN

Post-LayerNorm Is Back, arXiv:2601.19895. In DepthBench (arXiv:2609.32534) only the first attention is plain; the first
feed-forward has a norm on the stream, but no alpha. N is RMSNorm. One sublayer changes the stream by about 1 / alpha,
which bf16 (8 bits) loses from alpha = 128 on: the sum and its norm are taken in fp32 or wider. A bf16 stream still
rounds what comes out, so deep models want fp32 weights under autocast. A norm on the stream leaves no scalar paths.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from depthlit.connection import Connection, ResidualStrategy, Site
from depthlit.layers import RMSNorm, at_least_fp32


class KEELConnection(Connection):
    def __init__(self, site: Site, alpha: float, post: bool) -> None:
        super().__init__()
        self.alpha = alpha
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.post = RMSNorm(site.shape.d_model, site.shape.norm_eps) if post else None

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        total = torch.add(branch(self.norm(h)), at_least_fp32(h), alpha=self.alpha)  # alpha h + F(N(h))
        return (total if self.post is None else self.post(total)).to(h.dtype)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha:g}"


@dataclass(frozen=True)
class KEEL(ResidualStrategy):
    """KEEL: h <- N_post(2L h + F(N(h))), Post-LN with a highway (arXiv:2601.19895).

    Args:
        preset: `paper`, or `depthbench`, which sets what is left open below.
        alpha: factor of the stream: `n_sublayer` (2L), `n_layer` (L) or a number.
        first_block: `preln` (paper): both sublayers of the first block are plain Pre-LN. `preln_attn_only`
            (depthbench): its attention is; its feed-forward has the norm on the stream, without alpha.
    """

    presets: ClassVar = {"paper": {"first_block": "preln"}, "depthbench": {"first_block": "preln_attn_only"}}

    preset: Literal["paper", "depthbench"] = "paper"
    alpha: Literal["n_sublayer", "n_layer"] | float = "n_sublayer"
    first_block: Literal["preln", "preln_attn_only"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.alpha, str) and self.alpha not in ("n_sublayer", "n_layer"):
            raise ValueError(f"KEEL has no alpha {self.alpha!r}; give n_sublayer, n_layer or a number")

    def connect(self, site: Site) -> Connection:
        alpha = float(getattr(site.shape, self.alpha) if isinstance(self.alpha, str) else self.alpha)
        if site.block == 0:
            return KEELConnection(site, 1.0, post=not site.is_attention and self.first_block == "preln_attn_only")
        return KEELConnection(site, alpha, post=True)
