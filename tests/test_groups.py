"""Which sublayers are summed together: schedules that come out even and those that do not."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from models import TINY

from depthlit.decoder import Decoder
from depthlit.residuals import HAARES, WAV, BlockAttnRes, DeltaAttnRes
from depthlit.residuals.groups import groups_of

SCHEDULES: dict[str, tuple[int, dict[str, Any], tuple[int, ...]]] = {
    "the paper's sentence": (10, {"num_blocks": 4}, (2, 2, 2, 2, 2)),
    "it comes out even": (12, {"num_blocks": 4, "remainder": "error"}, (3, 3, 3, 3)),
    "eight without being asked": (48, {}, (6,) * 8),
    "an odd length": (40, {"num_blocks": 8}, (5,) * 8),
    "short last": (10, {"block_size": 4}, (4, 4, 2)),
    "odd and short": (8, {"block_size": 3}, (3, 3, 2)),
    "balanced": (10, {"num_blocks": 4, "remainder": "balanced"}, (3, 3, 2, 2)),
    "balanced by size": (10, {"block_size": 4, "remainder": "balanced"}, (4, 3, 3)),
    "groups of one": (6, {"block_size": 1}, (1,) * 6),
    "one group": (6, {"num_blocks": 1}, (6,)),
    "more than there are": (4, {"num_blocks": 9}, (1,) * 4),
    "larger than all": (4, {"block_size": 9}, (4,)),
}


@pytest.mark.parametrize("n_sublayer, settings, lengths", SCHEDULES.values(), ids=SCHEDULES)
def test_schedule(n_sublayer: int, settings: dict[str, Any], lengths: tuple[int, ...]) -> None:
    asked = {"num_blocks": None, "block_size": None, "remainder": "extra"} | settings
    assert groups_of(n_sublayer, **asked).lengths == lengths

    strategy = BlockAttnRes(**settings)
    shape = replace(TINY, n_layer=n_sublayer // 2)
    first, second = strategy.describe(shape).splitlines()
    said = [int(size) for number, size in re.findall(r"(\d+) of (\d+)", first) for _ in range(int(number))]
    assert first.startswith(f"{len(lengths)} groups of sublayers: ") and tuple(said) == lengths
    listed, _, at_exit = second.removeprefix("sources read, sublayer by sublayer: ").partition("; at the exit: ")
    if match := re.fullmatch(r"(\d+) to (\d+)", listed):
        counts = list(range(int(match[1]), int(match[2]) + 1))
    else:
        runs = [[*part.split(" x "), "1"][:2] for part in listed.split(", ")]
        counts = [int(value) for value, times in runs for _ in range(int(times))]
    begun = [sum(sum(lengths[:g]) < k for g in range(len(lengths))) for k in range(n_sublayer + 1)]
    assert [*counts, int(at_exit)] == [1 + number for number in begun]


def test_bad_schedules_are_refused_in_one_line() -> None:
    for settings, words in (
        ({"num_blocks": 4, "block_size": 2}, "num_blocks=4 and block_size=2 exclude each other"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"remainder": "shortest"}, "remainder must be"),
    ):
        for cls in (BlockAttnRes, WAV, HAARES):
            with pytest.raises(ValueError, match=words):
                cls(**settings)  # type: ignore[arg-type]
    for settings, words in (
        ({"num_blocks": 3, "remainder": "error"}, "8 sublayers do not divide into 3 blocks"),
        ({"block_size": 3, "remainder": "error"}, "8 sublayers do not divide into blocks of 3"),
    ):
        with pytest.raises(ValueError, match=words):
            Decoder(TINY, BlockAttnRes(**settings))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="need deltas='block'"):
        DeltaAttnRes(block_size=2)
    for wrong in (("phase", "phase"), ("phrase",)):
        with pytest.raises(ValueError, match="details must be different ones of phase, split"):
            WAV(details=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_match"):
        WAV(max_match=0.5)
