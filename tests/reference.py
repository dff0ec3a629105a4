"""Every method once more, slow and plain: the logits of a whole small decoder from a flat dict of weights.

Written from the papers' equations, apart from the package: nothing here imports the code under test, states are lists
of tensors, sources are summed one by one. k counts sublayers from 0 (even: attention, odd: feed-forward), F(k, x) is
the branch of sublayer k without its norm, N(k, x) the norm in front of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------ the backbone


def rms(x: Tensor, gain: Tensor | float, eps: float) -> Tensor:
    return gain * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def turn(x: Tensor, theta: float) -> Tensor:
    """Rotary positions: at position t multiply the complex numbers x[j] + i x[j + C/2] by exp(i t theta^(-2j/C))."""
    T, C = x.shape[1:]
    rows = []
    for t in range(T):
        angle = torch.tensor([t * theta ** (-2 * j / C) for j in range(C // 2)], dtype=x.dtype)
        z = torch.complex(x[:, t, : C // 2], x[:, t, C // 2 :]) * torch.polar(torch.ones_like(angle), angle)
        rows.append(torch.cat((z.real, z.imag), -1))
    return torch.stack(rows, 1)


def attention(
    w: Weights, shape: Any, block: int, x: Tensor, depth: Sequence[tuple[Tensor, Tensor]] = (), depth_rope: str = "both"
) -> Tensor:
    """Causal grouped-query attention, head by head; `depth` holds key and value (B, T, Hkv C) of slots at one token."""
    q, k, v = (x @ w[f"blocks.{block}.attn.{name}.weight"].T for name in "qkv")
    C, T, heads = shape.head_dim, x.shape[1], []
    for head in range(shape.n_head):
        shared = head // (shape.n_head // shape.n_kv_head)
        mine, theirs = slice(head * C, (head + 1) * C), slice(shared * C, (shared + 1) * C)
        query, key, value = q[..., mine], k[..., theirs], v[..., theirs]
        turned = turn(query, shape.rope_theta)
        score = turned @ turn(key, shape.rope_theta).mT / C**0.5  # (B, T, T)
        score = score.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        columns = [score]
        for slot_key, _ in depth:
            kappa = slot_key[..., theirs]
            if depth_rope == "both":
                dot = (turned * turn(kappa, shape.rope_theta)).sum(-1)
            else:
                dot = ((query if depth_rope == "none" else turned) * kappa).sum(-1)
            columns.append(dot[..., None] / C**0.5)
        p = torch.cat(columns, -1).softmax(-1)
        y = p[..., :T] @ value
        for i, (_, nu) in enumerate(depth):
            y = y + p[..., T + i, None] * nu[..., theirs]
        heads.append(y)
    return torch.cat(heads, -1) @ w[f"blocks.{block}.attn.out.weight"].T


def swiglu(w: Weights, block: int, x: Tensor) -> Tensor:
    gate, up, out = (w[f"blocks.{block}.mlp.{name}.weight"] for name in ("gate", "up", "out"))
    a = x @ gate.T
    return (a * torch.sigmoid(a) * (x @ up.T)) @ out.T


def join(k: int) -> str:
    return f"blocks.{k // 2}.join_{'mlp' if k % 2 else 'attn'}."


class Net:
    """The weights by their role: F and N of sublayer k, the embedding, the final norm with the head."""

    def __init__(self, w: Weights, shape: Any, tokens: Tensor) -> None:
        self.w, self.shape, self.tokens = w, shape, tokens
        self.M = 2 * shape.n_layer

    def own(self, k: int, name: str) -> Tensor:
        return self.w[join(k) + name]

    def embedding(self) -> Tensor:
        return self.w["embed.weight"][self.tokens]

    def F(self, k: int, x: Tensor) -> Tensor:
        return swiglu(self.w, k // 2, x) if k % 2 else attention(self.w, self.shape, k // 2, x)

    def N(self, k: int, x: Tensor, name: str = "norm", eps: float | None = None) -> Tensor:
        return rms(x, self.own(k, name + ".weight"), self.shape.norm_eps if eps is None else eps)

    def final(self, h: Tensor, eps: float | None = None) -> Tensor:
        return rms(h, self.w["norm.weight"], self.shape.norm_eps if eps is None else eps)

    def head(self, h: Tensor) -> Tensor:
        return h @ self.w["embed.weight" if self.shape.tie_embeddings else "head.weight"].T

    def read_out(self, h: Tensor, eps: float | None = None) -> Tensor:
        return self.head(self.final(h, eps))


# ------------------------------------------------------------------------------------------------ one stream


def pre_ln(net: Net) -> Tensor:
    h = net.embedding()
    for k in range(net.M):
        h = h + net.F(k, net.N(k, h))
    return net.read_out(h)


def post_ln(net: Net) -> Tensor:
    h = net.embedding()
    for k in range(net.M):
        h = net.N(k, h + net.F(k, h))
    return net.read_out(h)


def sandwich_ln(net: Net, embed_norm: bool) -> Tensor:
    h = net.embedding()
    if embed_norm:
        h = rms(h, net.w["entry.norm.weight"], net.shape.norm_eps)
    for k in range(net.M):
        h = h + net.N(k, net.F(k, net.N(k, h, "norm")), "post")
    return net.read_out(h)


def lns(net: Net, scale: str | float) -> Tensor:
    h = net.embedding()
    for k in range(net.M):
        factor = {"block": (k // 2 + 1) ** -0.5, "depth": net.shape.n_layer**-0.5}.get(scale, scale)
        h = h + net.F(k, factor * net.N(k, h))
    return net.read_out(h)


def layer_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    return rms(x - x.mean(-1, keepdim=True), gain, eps)


def deep_norm(net: Net, norm: Callable[..., Tensor]) -> Tensor:
    alpha, h = (2 * net.shape.n_layer) ** 0.25, net.embedding()
    for k in range(net.M):
        h = norm(alpha * h + net.F(k, h), net.own(k, "norm.weight"), net.shape.norm_eps)
        h = h + net.w.get(join(k) + "norm.bias", 0.0)
    return net.read_out(h)


def keel(net: Net, alpha: str | float, plain: int) -> Tensor:
    """`plain` first sublayers have no post norm; the rest of block 0 has one but no highway factor."""
    alpha = {"n_sublayer": 2.0 * net.shape.n_layer, "n_layer": float(net.shape.n_layer)}.get(alpha, alpha)
    h = net.embedding()
    for k in range(net.M):
        y = net.F(k, net.N(k, h))
        h = h + y if k < plain else net.N(k, (1.0 if k < 2 else alpha) * h + y, "post")
    return net.read_out(h)


def re_zero(net: Net, normed: bool) -> Tensor:
    h = net.embedding()
    for k in range(net.M):
        h = h + net.own(k, "gate") * net.F(k, net.N(k, h) if normed else h)
    return net.read_out(h)


def layer_scale(net: Net) -> Tensor:
    h = net.embedding()
    for k in range(net.M):
        h = h + net.own(k, "scale") * net.F(k, net.N(k, h))
    return net.read_out(h)


# ------------------------------------------------------------------------------------------------ many streams


def hyper_connections(
    net: Net, streams: int, dynamic: bool = True, tanh: bool = True, eps: float = 1e-8, read_out: str = "sum"
) -> Tensor:
    bend = torch.tanh if tanh else lambda x: x
    H = [net.embedding() for _ in range(streams)]
    for k in range(net.M):
        A_m, A_r, B = net.own(k, "read"), net.own(k, "carry").T, net.own(k, "write")  # A_r: (from, to)
        read, write = [A_m[s] for s in range(streams)], [B[t] for t in range(streams)]
        mix = [[A_r[s, t] for t in range(streams)] for s in range(streams)]
        if dynamic:
            s_a, s_b, W = net.own(k, "scale_alpha"), net.own(k, "scale_beta"), net.own(k, "project.weight")
            W_m, W_b, W_r = W[0], W[1], W[2:]
            normed = [rms(h, 1.0, eps) for h in H]
            for s in range(streams):
                read[s] = read[s] + s_a * bend(normed[s] @ W_m)
                write[s] = write[s] + s_b * bend(normed[s] @ W_b)
                for t in range(streams):
                    mix[s][t] = mix[s][t] + s_a * bend(normed[s] @ W_r[t])

        def by(coefficient: Tensor, h: Tensor) -> Tensor:
            return coefficient[..., None] * h

        y = net.F(k, net.N(k, sum(by(read[s], H[s]) for s in range(streams))))
        H = [sum(by(mix[s][t], H[s]) for s in range(streams)) + by(write[t], y) for t in range(streams)]
    if read_out == "norm_then_sum":
        return net.head(sum(net.final(h) for h in H))
    return net.read_out(sum(H) / {"sum": 1, "mean": streams}[read_out])


def sinkhorn(logits: Tensor, iterations: int, order: str, rounding: bool) -> Tensor:
    """(..., out, in). "paper": exp, then so many times columns and rows. "liger": rows first, and 1e-6 everywhere."""
    if order == "paper":
        m = logits.exp()
        for _ in range(iterations):
            m = m / m.sum(-2, keepdim=True)
            m = m / m.sum(-1, keepdim=True)
    else:
        m = logits.exp() / logits.exp().sum(-1, keepdim=True) + 1e-6
        m = m / (m.sum(-2, keepdim=True) + 1e-6)
        for _ in range(iterations - 1):
            m = m / (m.sum(-1, keepdim=True) + 1e-6)
            m = m / (m.sum(-2, keepdim=True) + 1e-6)
    if rounding:  # Altschuler, Weed, Rigollet, arXiv:1705.09634, algorithm 2: shrink to at most 1, then add what lacks
        m = m / m.sum(-1, keepdim=True).clamp_min(1)
        m = m / m.sum(-2, keepdim=True).clamp_min(1)
        row, column = 1 - m.sum(-1), 1 - m.sum(-2)
        m = m + row[..., :, None] * column[..., None, :] / row.sum(-1)[..., None, None]
    return m


def m_hyper_connections(
    net: Net, streams: int = 4, eps: float = 1e-20, reads: str = "sigmoid", writes: str = "sigmoid",
    mixing: str = "sinkhorn", iterations: int = 20, order: str = "paper", rounding: bool = False,
    read_out: str = "mean",
) -> Tensor:  # fmt: skip
    n = streams
    H = [net.embedding() for _ in range(n)]
    for k in range(net.M):
        flat = rms(torch.cat(H, -1), 1.0, eps)  # one norm over all n D channels
        raw = flat @ net.own(k, "project.weight").T  # (B, T, n + n + n n)
        a, b = net.own(k, "gain"), net.own(k, "bias")
        pre = a[0] * raw[..., :n] + b[:n]
        post = a[1] * raw[..., n : 2 * n] + b[n : 2 * n]
        res = torch.eye(n, dtype=b.dtype)
        if mixing != "identity":
            res = (a[2] * raw[..., 2 * n :] + b[2 * n :]).unflatten(-1, (n, n))  # (out, in)
        if reads == "sigmoid":
            pre = torch.sigmoid(pre)
        if writes == "sigmoid":
            post = 2 * torch.sigmoid(post)
        if mixing == "sinkhorn":
            res = sinkhorn(res, iterations, order, rounding)
        if mixing == "softmax":
            res = res.softmax(-1)
        y = net.F(k, net.N(k, sum(pre[..., s, None] * H[s] for s in range(n))))
        H = [
            sum(res[..., o, i, None] * H[i] for i in range(n)) + post[..., o, None] * y
            for o in range(n)
        ]  # fmt: skip
    if read_out == "norm_then_sum":
        return net.head(sum(net.final(h) for h in H))
    return net.read_out(sum(H) / {"sum": 1, "mean": n}[read_out])


# ------------------------------------------------------------------------------------------------ attention over depth


def mix(
    sources: Sequence[Tensor], query: Tensor, gain: Tensor | float, eps: float,
    bias: Sequence[Tensor | float] = (), nothing: bool = False,
) -> Tensor:  # fmt: skip
    """Softmax over the sources of query . RMSNorm(source) + bias, then the weighted sum of the raw sources."""
    score = [(query * rms(s, gain, eps)).sum(-1) for s in sources]
    if bias:
        score = [s + b for s, b in zip(score, bias, strict=True)]
    if nothing:
        score.append(torch.zeros_like(score[0]))
    p = torch.stack(score, -1).softmax(-1)
    return sum(p[..., i, None] * s for i, s in enumerate(sources))


def mixer(net: Net, where: str) -> tuple[Tensor, Tensor | float]:
    """Query, and key gain if there is one."""
    return net.w[where + "query"], net.w.get(where + "gain", 1.0)


def full_attn_res(net: Net, key_eps: float = 1e-6, norm_eps: float = 1e-12) -> Tensor:
    sources = [net.embedding()]
    for k in range(net.M):
        x = net.N(k, sources[0]) if k == 0 else net.N(k, mix(sources, *mixer(net, join(k)), key_eps), eps=norm_eps)
        sources.append(net.F(k, x))
    return net.read_out(mix(sources, *mixer(net, "exit."), key_eps), norm_eps)


def lengths(M: int, num_blocks: int | None = None, block_size: int | None = None, balanced: bool = False) -> list[int]:
    """Sublayers per group: of the same size with a short last one, or so many that differ by at most one."""
    if balanced:
        n = min(num_blocks or 8, M)
        return [M // n + (i < M % n) for i in range(n)]
    size = block_size or max(1, M // (num_blocks or 8))
    whole = [size] * (M // size)
    return whole + ([M % size] if M % size else [])


def block_attn_res(net: Net, key_eps: float = 1e-6, norm_eps: float = 1e-12, **groups: Any) -> Tensor:
    blocks, k = [net.embedding()], 0
    for length in lengths(net.M, **groups):
        outputs: list[Tensor] = []
        for _ in range(length):
            if k == 0:
                x = net.N(k, blocks[0])
            else:
                sources = blocks + ([sum(outputs)] if outputs else [])
                x = net.N(k, mix(sources, *mixer(net, join(k)), key_eps), eps=norm_eps)
            outputs.append(net.F(k, x))
            k += 1
        blocks.append(sum(outputs))
    assert k == net.M
    return net.read_out(mix(blocks, *mixer(net, "exit."), key_eps), norm_eps)


def size(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True).sqrt()


def wav(
    net: Net, details: Sequence[str] = ("phase", "split"), rho: float = 4.0, match_eps: float = 1e-6,
    key_eps: float = 1e-6, norm_eps: float = 1e-12, constant_bias: float | None = None, masked: bool = False,
    **groups: Any,
) -> Tensor:  # fmt: skip
    """Block AttnRes whose blocks also offer their details: "phase" (attention - MLP), "split" (early - late half)."""

    def sign(detail: str, k: int, i: int, length: int) -> int:
        if detail == "phase":
            return 1 if k % 2 == 0 else -1
        if detail == "split":
            return 1 if i <= length / 2 else -1
        return 1  # "duplicate"

    def offered(updates: list[tuple[int, int, Tensor]], length: int, open_: bool) -> list[tuple[str, Tensor]]:
        """The sum of the updates (k, i, u), and its details as loud as it, up to rho."""
        total = sum(u for _, _, u in updates)
        found = [("sum", total)]
        for detail in details:
            signs = [sign(detail, k, i, length) for k, i, _ in updates]
            if masked and open_ and min(signs) == 1:
                continue
            d = sum(s * u for s, (_, _, u) in zip(signs, updates, strict=True))
            factor = (size(total) / (size(d) + match_eps)).clamp(1 / rho, rho).detach()
            found.append((detail, factor * d))
        return found

    def bias(k: int, kind: str) -> Tensor | float:
        if kind not in details:
            return 0.0
        return net.own(k, "bias")[details.index(kind)] if constant_bias is None else constant_bias

    sources, k = [("sum", net.embedding())], 0
    for length in lengths(net.M, **groups):
        updates: list[tuple[int, int, Tensor]] = []
        for i in range(1, length + 1):
            pool = sources + (offered(updates, length, True) if updates else [])
            if k == 0:
                x = net.N(k, sources[0][1])
            else:
                z = mix([s for _, s in pool], *mixer(net, join(k)), key_eps, [bias(k, kind) for kind, _ in pool])
                x = net.N(k, z, eps=norm_eps)
            updates.append((k, i, net.F(k, x)))
            k += 1
        sources = sources + offered(updates, length, False)
    assert k == net.M
    sums = [s for kind, s in sources if kind == "sum"]
    return net.read_out(mix(sums, *mixer(net, "exit."), key_eps), norm_eps)


def delta_attn_res(
    net: Net, key_eps: float = 1e-6, gate: str = "none", nothing: bool = False, block_size: int = 1
) -> Tensor:
    h = net.embedding()
    sources, outputs = [h], []
    for k in range(net.M):
        z = h
        if k > 0:
            offered = sources + ([sum(outputs)] if outputs else [])
            z = mix(offered, *mixer(net, join(k)), key_eps, nothing=nothing)
            if gate != "none":
                g = net.own(k, "gate")
                z = (torch.sigmoid(g) if gate == "sigmoid" else g) * z
            z = h + z
        outputs.append(net.F(k, net.N(k, z)))
        h = h + outputs[-1]
        if len(outputs) == block_size:
            sources, outputs = [*sources, sum(outputs)], []
    return net.read_out(h)


# ------------------------------------------------------------------------------------------------ attention with depth


def moda(net: Net, post_norm: bool, depth_rope: str, attention_slots: bool = True, mlp_slots: bool = True) -> Tensor:
    h, slots, L = net.embedding(), [], net.shape.n_layer
    for block in range(L):
        k = 2 * block
        x = h if post_norm else net.N(k, h)
        y = attention(net.w, net.shape, block, x, slots, depth_rope)
        if attention_slots:
            slots.append((x @ net.w[f"blocks.{block}.attn.k.weight"].T, x @ net.w[f"blocks.{block}.attn.v.weight"].T))
        h = net.N(k, h + y) if post_norm else h + y
        x = h if post_norm else net.N(k + 1, h)
        if mlp_slots and block + 1 < L:
            slots.append((x @ net.own(k + 1, "k.weight").T, x @ net.own(k + 1, "v.weight").T))
        y = net.F(k + 1, x)
        h = net.N(k + 1, h + y) if post_norm else h + y
    return net.read_out(h)
