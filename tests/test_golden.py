"""The first 20 training steps of every strategy are on record in tests/golden/; tests/golden.py rewrites them."""

from collections.abc import Callable

import pytest
from golden import curve, recorded, stored
from models import CLASSES, label, seats
from torch import Tensor, nn

from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder

TOLERANCE = 1e-8  # nats
RECORD = stored()


def deviation(losses: list[float], record: list[float]) -> float:
    assert len(losses) == len(record)
    return max(abs(a - b) for a, b in zip(losses, record, strict=True))


@pytest.mark.parametrize("strategy", recorded(), ids=label)
def test_curve_is_on_record(strategy: ResidualStrategy) -> None:
    record = RECORD.get(label(strategy))
    assert record, f"no record of {label(strategy)}; make one with: python tests/golden.py {type(strategy).__name__}"
    losses = curve(strategy)
    assert deviation(losses, record) < TOLERANCE
    assert min(losses) < losses[0] - 0.05, "it learns"
    assert len({round(loss, 4) for loss in losses}) > 10


def test_strategies_are_told_apart() -> None:
    """No two curves are alike, but for groups of one sublayer, in which Block AttnRes is Full AttnRes."""
    same = {("BlockAttnRes", "FullAttnRes"), ("BlockAttnRes/depthbench", "FullAttnRes/depthbench")}
    pairs = {(a, b) for a in RECORD for b in RECORD if a < b and deviation(RECORD[a], RECORD[b]) < 1e-4}
    assert pairs == same


def eps(decoder: Decoder) -> None:
    """The eps that many ports use."""
    for module in decoder.modules():
        if getattr(module, "eps", None) == 1e-6:
            module.eps = 1e-5  # type: ignore[assignment]


def scale(decoder: Decoder) -> None:
    """Attention of one block without 1 / sqrt(C)."""
    attn = decoder.blocks[0].attn
    attn.q.register_forward_hook(lambda module, call, y: y * attn.head_dim**0.5)


def factor(decoder: Decoder) -> None:
    """One branch one per mille too strong."""

    def stronger(module: nn.Module, call: tuple[Tensor, ...], y: Tensor) -> Tensor:
        return 1.001 * y

    list(seats(decoder))[-1].branch.register_forward_hook(stronger)


@pytest.mark.parametrize("change", [eps, scale, factor], ids=lambda f: f.__name__)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_a_changed_formula_is_caught(cls: type[ResidualStrategy], change: Callable[[Decoder], None]) -> None:
    """Within half of the curve, by far more than the tolerance."""
    steps = 10
    assert cls.__name__ in RECORD, f"no curve is on record, make one with: python tests/golden.py {cls.__name__}"
    assert deviation(curve(cls(), change, steps), RECORD[cls.__name__][:steps]) > 100 * TOLERANCE
