"""Small HC and mHC connections, and one step of theirs by loops over tokens, streams and matrix entries."""

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Site
from depthlit.residuals import HC, MHC
from depthlit.shape import ShapeSpec

B, T, M, D = 2, 3, 4, 8
SHAPE = ShapeSpec(n_layer=3, d_model=D, n_head=2, vocab_size=7, norm_eps=1e-5)
VARIANTS = [
    HC(), HC(dynamic=False), HC(tanh=False), HC(streams=3, read_out="mean"), HC(streams=1), HC(preset="depthbench"),
    MHC(), MHC(preset="depthbench"), MHC(reads="free", streams=3), MHC(writes="free"), MHC(mixing="softmax"),
    MHC(mixing="free"), MHC(mixing="identity"), MHC(reads="free", writes="free", mixing="free"),
    MHC(sinkhorn_iterations=2, sinkhorn_rounding=True), MHC(streams=1, read_out="sum"),
    MHC(sinkhorn_iterations=1, sinkhorn_order="liger", init="random"),
]  # fmt: skip


def rand(*size: int, seed: int = 0, grad: bool = True) -> Tensor:
    x = torch.randn(size, dtype=torch.double, generator=torch.Generator().manual_seed(seed + sum(size)))
    return x.requires_grad_(grad)


def connection(strategy: HC | MHC, sublayer: int = 2, random: bool = True) -> Connection:
    join = strategy.connect(Site(sublayer, SHAPE)).double()
    draw = torch.Generator().manual_seed(5)
    for p in join.parameters() if random else ():
        p.data += 0.5 * torch.randn(p.shape, generator=draw, dtype=torch.double)
    return join


def naive_hc(w: dict[str, Tensor], H: Tensor, hc: HC) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    """Coefficients of one token from its streams H (M, D): read[s], carry[t][s], write[t]."""
    n = len(H)
    read = [w["read"][s] for s in range(n)]
    carry = [[w["carry"][t, s] for s in range(n)] for t in range(n)]
    write = [w["write"][t] for t in range(n)]
    if hc.dynamic:
        bend = torch.tanh if hc.tanh else lambda v: v
        for s in range(n):
            key = H[s] / (H[s].pow(2).mean() + hc.eps).sqrt()
            rows = [bend((key * row).sum()) for row in w["project.weight"]]
            read[s] = read[s] + w["scale_alpha"][0] * rows[0]
            write[s] = write[s] + w["scale_beta"][0] * rows[1]
            for t in range(n):
                carry[t][s] = carry[t][s] + w["scale_alpha"][0] * rows[2 + t]
    return read, carry, write


def naive_sinkhorn(m: list[list[Tensor]], mhc: MHC) -> list[list[Tensor]]:
    n = len(m)

    def rows(m: list[list[Tensor]], eps: float) -> list[list[Tensor]]:
        return [[v / (sum(row) + eps) for v in row] for row in m]

    def columns(m: list[list[Tensor]], eps: float) -> list[list[Tensor]]:
        return [list(row) for row in zip(*rows([list(c) for c in zip(*m, strict=True)], eps), strict=True)]

    m = [[v.exp() for v in row] for row in m]
    if mhc.sinkhorn_order == "liger":
        m = columns([[v + 1e-6 for v in row] for row in rows(m, 0)], 1e-6)
        for _ in range(mhc.sinkhorn_iterations - 1):
            m = columns(rows(m, 1e-6), 1e-6)
    else:
        for _ in range(mhc.sinkhorn_iterations):
            m = rows(columns(m, 0), 0)
    if mhc.sinkhorn_rounding:
        m = [[v / torch.clamp(sum(row), min=1) for v in row] for row in m]
        m = [list(r) for r in zip(*[[v / torch.clamp(sum(c), min=1) for v in c] for c in zip(*m, strict=True)],
                                  strict=True)]  # fmt: skip
        lack_r, lack_c = [1 - sum(row) for row in m], [1 - sum(c) for c in zip(*m, strict=True)]
        m = [[m[o][i] + lack_r[o] * lack_c[i] / sum(lack_r) for i in range(n)] for o in range(n)]
    return m


def naive_mhc(w: dict[str, Tensor], H: Tensor, mhc: MHC) -> tuple[list[Tensor], list[list[Tensor]], list[Tensor]]:
    n, flat = len(H), torch.cat(list(H))
    key = flat / (flat.pow(2).mean() + mhc.eps).sqrt()
    raw = [(key * row).sum() for row in w["project.weight"]]
    gain, bias = w["gain"], w["bias"]
    read = [gain[0] * raw[s] + bias[s] for s in range(n)]
    write = [gain[1] * raw[n + t] + bias[n + t] for t in range(n)]
    if mhc.reads == "sigmoid":
        read = [1 / (1 + (-v).exp()) for v in read]
    if mhc.writes == "sigmoid":
        write = [2 / (1 + (-v).exp()) for v in write]
    if mhc.mixing == "identity":
        return read, [[torch.tensor(float(o == i)) for i in range(n)] for o in range(n)], write
    carry = [[gain[2] * raw[2 * n + n * o + i] + bias[2 * n + n * o + i] for i in range(n)] for o in range(n)]
    if mhc.mixing == "softmax":
        carry = [[v.exp() / sum(u.exp() for u in row) for v in row] for row in carry]
    elif mhc.mixing == "sinkhorn":
        carry = naive_sinkhorn(carry, mhc)
    return read, carry, write


def naive_step(w: dict[str, Tensor], H: Tensor, strategy: HC | MHC, branch: nn.Module) -> Tensor:
    tokens = []
    for b in range(len(H)):
        for t in range(H.shape[1]):
            h = H[b, t]
            read, carry, write = (naive_hc if isinstance(strategy, HC) else naive_mhc)(w, h, strategy)
            x = sum(read[s] * h[s] for s in range(len(h)))
            y = branch(w["norm.weight"] * x / (x.pow(2).mean() + SHAPE.norm_eps).sqrt())
            n = range(len(h))
            tokens.append(torch.stack([sum(carry[o][i] * h[i] for i in n) + write[o] * y for o in n]))
    return torch.stack(tokens).view(H.shape)
