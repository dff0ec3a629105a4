"""How deep, how wide: shapes, the shapes of the paper by name, matched shapes, closed-form counts."""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True)
class ShapeSpec:
    """A decoder's shape.

    Args:
        n_layer: blocks L; each holds an attention and a feed-forward sublayer.
        d_model: width D.
        n_head: query heads H.
        n_kv_head: key and value heads; as many as `n_head` when left out.
        d_ff: feed-forward width F; 8 D / 3 rounded up to a multiple of 16 when left out.
        vocab_size: vocabulary V.
        tie_embeddings: let the head share the embedding's weights.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in the norms of the backbone.
        max_seq_len: longest context T in tokens.

    Raises:
        ValueError: a number is not positive, or heads do not divide the width into even sizes.
    """

    n_layer: int
    d_model: int
    n_head: int = 16
    n_kv_head: int | None = None
    d_ff: int | None = None
    vocab_size: int = 50280
    tie_embeddings: bool = False
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    max_seq_len: int = 2048

    def __post_init__(self) -> None:
        fill = object.__setattr__
        fill(self, "n_kv_head", self.n_head if self.n_kv_head is None else self.n_kv_head)
        fill(self, "d_ff", default_d_ff(self.d_model) if self.d_ff is None else self.d_ff)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "tie_embeddings" and not 0 < value < math.inf:
                raise ValueError(f"shape: {field.name} is {value}, it must be positive")
        if self.d_model % self.n_head:
            near = max(1, round(self.d_model / (2 * self.n_head))) * 2 * self.n_head
            raise ValueError(
                f"shape: d_model {self.d_model} is not divisible by n_head {self.n_head}; d_model {near} would be"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"shape: d_model {self.d_model} / n_head {self.n_head} gives heads of odd size {self.head_dim}; rotary "
                f"positions need an even one: d_model {self.d_model + self.n_head} would do"
            )
        if self.n_head % self.kv_heads:
            raise ValueError(f"shape: n_head {self.n_head} is not divisible by n_kv_head {self.kv_heads}")

    @staticmethod
    def named(name: str, **changes: Any) -> ShapeSpec:
        """The shape of this name (see `NAMED`), with some fields changed.

        Raises:
            ValueError: no shape has this name; the message names near ones.
        """
        if name not in NAMED:
            near = difflib.get_close_matches(name, NAMED, n=4, cutoff=0.3)
            raise ValueError(f"no shape is named {name!r}; near ones: {', '.join(near)}; all: {', '.join(NAMED)}")
        return replace(NAMED[name], **changes)

    @property
    def head_dim(self) -> int:
        """Channels C per head."""
        return self.d_model // self.n_head

    @property
    def kv_heads(self) -> int:
        """`n_kv_head`, as the number it always is once the shape is made."""
        return self.n_kv_head or self.n_head

    @property
    def d_kv(self) -> int:
        """Width of keys and of values."""
        return self.kv_heads * self.head_dim

    @property
    def n_sublayer(self) -> int:
        """2 L"""
        return 2 * self.n_layer

    @property
    def aspect(self) -> float:
        """d / L: small is deep and narrow."""
        return self.d_model / self.n_layer

    def backbone(self) -> int:
        """Parameters of the Pre-LN blocks and the final norm: L (2 D^2 + 2 D D_kv + 3 D F + 2 D) + D."""
        D, F = self.d_model, self.d_ff or 0
        return self.n_layer * (2 * D * D + 2 * D * self.d_kv + 3 * D * F + 2 * D) + D

    def embedding_and_head(self) -> int:
        """Parameters of embedding and head: 2 V D, or V D when tied."""
        return self.vocab_size * self.d_model * (1 if self.tie_embeddings else 2)

    def parameters(self) -> int:
        """Parameters of the Pre-LN model of this shape (DepthBench, Sec. 2.2, arXiv:2609.32534)."""
        return self.backbone() + self.embedding_and_head()

    def forward_flops(self, tokens: int, head: Literal["all", "last"] = "all") -> int:
        """FLOPs of one forward of the Pre-LN model over a sequence, 2 per multiply-add, causal attention counted half.

        L (4 T D^2 + 4 T D D_kv + 6 T D F + 2 T^2 D) + head (DepthBench, App. D; with D_kv = D it is their 8 T D^2).
        Norms, softmax and elementwise work are not counted.

        Args:
            tokens: sequence length T.
            head: logits at all positions (2 T D V) or only at the last one (2 D V).
        """
        T, D, F = tokens, self.d_model, self.d_ff or 0
        block = 4 * T * D * D + 4 * T * D * self.d_kv + 6 * T * D * F + 2 * T * T * D
        return self.n_layer * block + 2 * D * self.vocab_size * (T if head == "all" else 1)


def default_d_ff(d_model: int) -> int:
    """8 D / 3, rounded up to a multiple of 16."""
    return -(-8 * d_model // 48) * 16


Budget = Literal["total", "backbone", "flops"]


def matched(reference: ShapeSpec, n_layer: int, by: Budget = "total") -> ShapeSpec:
    """The width at which a network of another depth has the budget of the reference: the nearest with even head size.

    Heads, vocabulary and the rule of the feed-forward width (8 D / 3, or the reference's ratio) are the reference's.

    Args:
        reference: the shape to match.
        n_layer: the wanted depth.
        by: what is held: "total" parameters, "backbone" parameters (without embedding and head), or training "flops"
            per token at the reference's `max_seq_len`.

    Raises:
        ValueError: even the narrowest network of this depth is over twice the budget.
    """

    def shape(half: int) -> ShapeSpec:
        d_model = 2 * half * reference.n_head
        if reference.d_ff == default_d_ff(reference.d_model):
            d_ff = default_d_ff(d_model)
        else:
            d_ff = max(16, round((reference.d_ff or 0) / reference.d_model * d_model / 16) * 16)
        return replace(reference, n_layer=n_layer, d_model=d_model, d_ff=d_ff)

    def size(spec: ShapeSpec) -> int:
        if by == "flops":
            return spec.forward_flops(spec.max_seq_len)
        return spec.parameters() if by == "total" else spec.backbone()

    wanted, half = size(reference), 1
    while size(shape(half + 1)) <= wanted:
        half += 1
    best = min((shape(half), shape(half + 1)), key=lambda spec: abs(size(spec) - wanted))
    if size(best) > 2 * wanted:
        raise ValueError(
            f"no shape of {n_layer} layers and {reference.n_head} heads comes near {wanted:,} ({by}); "
            "take fewer layers or fewer heads"
        )
    return best


def _family(prefix: str, widths: dict[int, int], **rest: Any) -> dict[str, ShapeSpec]:
    return {f"{prefix}-L{n_layer}": ShapeSpec(n_layer, d_model, **rest) for n_layer, d_model in widths.items()}


NAMED: dict[str, ShapeSpec] = {
    # For a laptop: a character-level vocabulary is set from the data
    **_family("tiny", {2: 32, 4: 32, 8: 32}, n_head=4, vocab_size=256),
    **_family("small", {4: 160, 6: 128, 12: 96, 24: 64, 48: 48}, n_head=4, vocab_size=256),
    # DepthBench, Tables 3 and 7-9 (arXiv:2609.32534)
    **_family(
        "400m",
        {16: 1216, 20: 1120, 24: 1024, 26: 992, 28: 960, 30: 928, 32: 896, 36: 864, 42: 800, 70: 640},
    ),
    **_family("300m-backbone", {16: 1248, 24: 1024, 32: 896, 42: 768, 56: 672, 70: 608, 84: 544}),
    **_family("200m", {12: 896, 18: 768, 24: 672}),
    **_family("300m", {14: 1056, 21: 896, 28: 800}),
    **_family("500m", {17: 1344, 26: 1120, 34: 992}),
    **{
        f"1600m-L{n_layer}": ShapeSpec(n_layer, d_model, n_kv_head=8, d_ff=3 * d_model)
        for n_layer, d_model in {28: 2048, 40: 1728, 54: 1504}.items()
    },
}
"""Every named shape."""
