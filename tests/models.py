"""Small models for the tests: every strategy that the package knows, at its own or at random weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from depthlit import residuals
from depthlit.connection import Connection, ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec

CLASSES: list[type[ResidualStrategy]] = sorted(
    (cls for name in residuals.__all__ if "connect" in dir(cls := getattr(residuals, name))),
    key=lambda cls: cls.__name__,
)
"""All strategies in depthlit/residuals/, found as the package itself finds them."""

TINY = ShapeSpec(n_layer=4, d_model=32, n_head=4, n_kv_head=2, d_ff=48, vocab_size=61)


def known() -> list[ResidualStrategy]:
    """Each strategy at its defaults, then each of its other presets."""
    found: list[ResidualStrategy] = []
    for cls in CLASSES:
        found.append(cls())
        found.extend(other for name in cls.presets if (other := cls(preset=name)) != found[-1])  # type: ignore[call-arg]
    return found


def label(strategy: object) -> str:
    """HC, HC/depthbench, HC(dynamic=False): the class, the preset, what else differs from it."""
    if not isinstance(strategy, ResidualStrategy):
        return ""
    cls, name = type(strategy), type(strategy).__name__
    plain, preset = cls(), getattr(strategy, "preset", None)
    if preset is not None and preset != plain.preset:  # type: ignore[attr-defined]
        plain, name = cls(preset=preset), f"{name}/{preset}"  # type: ignore[call-arg]
    other = [f"{k}={v}" for k, v in vars(strategy).items() if v != getattr(plain, k)]
    return name + (f"({','.join(other)})" if other else "")


def build(strategy: ResidualStrategy, shape: ShapeSpec = TINY, seed: int = 0, random: bool = False) -> Decoder:
    """A decoder in fp64 at its initial weights, or with every weight at a random non-zero value."""
    decoder = Decoder(shape, strategy, seed=seed).double()
    return randomized(decoder, seed) if random else decoder


@torch.no_grad()
def randomized(decoder: Decoder, seed: int) -> Decoder:
    """Draw every weight anew, so that nothing hides behind a zero or a one: gains about 1, matrices of unit gain."""
    draw = torch.Generator().manual_seed(seed)
    gains = {id(m.weight) for m in decoder.modules() if "Norm" in type(m).__name__ and hasattr(m, "weight")}
    for name, weight in decoder.named_parameters():
        noise = torch.randn(weight.shape, generator=draw, dtype=torch.float64).to(weight.dtype)
        if id(weight) in gains:
            weight.copy_(1 + 0.3 * noise)
        elif ".attn." in name or ".mlp." in name or name == "head.weight":
            weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
        elif name == "embed.weight":
            weight.copy_(noise)
        else:
            weight.copy_(0.4 * noise)
    return decoder


def tokens_for(shape: ShapeSpec, batch: int = 2, length: int = 9, seed: int = 1) -> Tensor:
    return torch.randint(shape.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


@dataclass
class Seat:
    """One connection with its place and its branch."""

    sublayer: int
    join: Connection
    branch: nn.Module


def seats(decoder: Decoder) -> Iterator[Seat]:
    for i, block in enumerate(decoder.blocks):
        yield Seat(2 * i, block.join_attn, block.attn)
        yield Seat(2 * i + 1, block.join_mlp, block.mlp)


@torch.no_grad()
def with_weights_of(target: Decoder, source: Decoder) -> Decoder:
    """Copy into target every weight that source has under the same name and shape."""
    own, other = target.state_dict(), source.state_dict()
    for name, value in own.items():
        if name in other and other[name].shape == value.shape:
            value.copy_(other[name])
    return target


def set_eps(decoder: Decoder, eps: float) -> Decoder:
    """One eps for every norm."""
    for module in decoder.modules():
        if hasattr(module, "eps"):
            module.eps = eps
    return decoder
