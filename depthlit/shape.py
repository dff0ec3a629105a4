"""How deep, how wide: shapes, the shapes of the paper by name, and closed-form parameter counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShapeSpec:
    """A decoder's shape.

    Args:
        n_layer: blocks L; each holds an attention and a feed-forward sublayer.
        d_model: width D.
        n_head: query heads H.
        n_kv_head: key and value heads; as many as `n_head` when left out.
        d_ff: feed-forward width; 8 D / 3 rounded up to a multiple of 16 when left out.
        vocab_size: vocabulary V.
        tie_embeddings: let the head share the embedding's weights.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in the norms of the backbone.
        max_seq_len: longest context T in tokens.
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
        fill(self, "d_ff", -(-8 * self.d_model // 3 // 16) * 16 if self.d_ff is None else self.d_ff)

    @property
    def head_dim(self) -> int:
        """Channels C per head."""
        return self.d_model // self.n_head

    @property
    def d_kv(self) -> int:
        """Width of keys and of values."""
        return (self.n_kv_head or self.n_head) * self.head_dim

    @property
    def n_sublayer(self) -> int:
        """2 L"""
        return 2 * self.n_layer

    def parameters(self) -> int:
        """Parameters of the Pre-LN model of this shape: 2 V D + L (2 D^2 + 2 D D_kv + 3 D F + 2 D) + D."""
        D, F = self.d_model, self.d_ff or 0
        embeddings = self.vocab_size * D * (1 if self.tie_embeddings else 2)
        return embeddings + self.n_layer * (2 * D * D + 2 * D * self.d_kv + 3 * D * F + 2 * D) + D
