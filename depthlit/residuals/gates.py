"""ReZero and LayerScale: a learned gate on what a branch adds.

    h <- h + g F(N(h))        one g per sublayer, 0 at first                       (ReZero)
    h <- h + g * F(N(h))      one g per channel, 0.1, 1e-5 or 1e-6 by depth        (LayerScale)

Bachlechner et al., ReZero is All You Need, arXiv:2003.04887; Touvron et al., Going deeper with Image Transformers
(CaiT), arXiv:2103.17239, Sec. 2. Deviates: ReZero keeps the norm before the branch, as its users in language models do;
`norm=False` is the paper's own form, without any but the final norm. Gate and sum are taken in fp32 or wider; a bf16
stream still loses gates below 2^-8 of it when the sum is rounded.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Flow, ResidualStrategy, Site
from depthlit.layers import RMSNorm, at_least_fp32


def gated_sum(h: Tensor, gate: Tensor, y: Tensor) -> Tensor:
    """h + gate * y, in fp32 or wider, returned in the dtype of h."""
    wide = at_least_fp32(h)
    return torch.addcmul(wide, gate.to(wide.dtype), y.to(wide.dtype)).to(h.dtype)


class ReZeroConnection(Connection):
    def __init__(self, site: Site, init: float, norm: bool) -> None:
        super().__init__()
        self.init = init
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps) if norm else None
        self.gate = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gate, self.init)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return gated_sum(h, self.gate, branch(h if self.norm is None else self.norm(h)))

    def flow(self, h: Tensor) -> Flow:
        one = h.new_ones(1)
        return Flow(read=one, carry=one[:, None], write=self.gate.to(h.dtype))

    def telemetry(self, h: Tensor) -> dict[str, Tensor]:
        return {"gate": self.gate.detach()[0]}


class LayerScaleConnection(Connection):
    def __init__(self, site: Site, init: float) -> None:
        super().__init__()
        self.init = init
        self.norm = RMSNorm(site.shape.d_model, site.shape.norm_eps)
        self.scale = nn.Parameter(torch.empty(site.shape.d_model))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.init)

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        return gated_sum(h, self.scale, branch(self.norm(h)))

    def telemetry(self, h: Tensor) -> dict[str, Tensor]:
        scale = at_least_fp32(self.scale.detach())
        return {"gate": scale.mean(), "gate_abs": scale.abs().mean(), "gate_std": scale.std(correction=0)}


@dataclass(frozen=True)
class ReZero(ResidualStrategy):
    """ReZero: h <- h + g F(N(h)), one learned gate per sublayer, 0 at first (arXiv:2003.04887).

    Args:
        init: first value of every gate. At 0 the branches learn nothing in the first step, only the gates do.
        norm: keep the norm before the branch; without it, this is the paper's own form.
    """

    init: float = 0.0
    norm: bool = True

    def connect(self, site: Site) -> Connection:
        return ReZeroConnection(site, self.init, self.norm)


@dataclass(frozen=True)
class LayerScale(ResidualStrategy):
    """LayerScale: h <- h + g * F(N(h)), one learned gate per channel, small at first (arXiv:2103.17239).

    Args:
        init: first value of every gate. By default the paper's, by number of blocks: 0.1 up to 18, 1e-5 up to 24,
            1e-6 above.
    """

    init: float | None = None

    def connect(self, site: Site) -> Connection:
        L = site.shape.n_layer
        by_depth = 0.1 if L <= 18 else 1e-5 if L <= 24 else 1e-6
        return LayerScaleConnection(site, by_depth if self.init is None else self.init)
