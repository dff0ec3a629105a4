"""What is known beforehand: how designs are called and drawn, and what papers have published (`known.yaml`)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from depthlit.plots import COLOURS, MARKERS


@dataclass(frozen=True)
class Look:
    """How a design is called and drawn.

    Args:
        name: for people.
        colour: of its lines and bars.
        marker: of its points.
        dash: of its lines.
    """

    name: str
    colour: str
    marker: str
    dash: str = "-"


@cache
def content() -> dict[str, Any]:
    """All of `known.yaml`."""
    text = files(__package__).joinpath("known.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.safe_load(text)
    return found


def published(*keys: Any) -> Any:
    """What stands under these keys; an empty mapping where nothing was published."""
    place: Any = content()
    for key in keys:
        place = place.get(key, {})
    return place


@cache
def look(strategy: str) -> Look:
    """Of a residual strategy by its class; a class of one's own gets a colour and a marker by its name."""
    known = published("designs", strategy)
    if known:
        return Look(**known)
    number = sum(strategy.encode())
    return Look(strategy, COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)], ":")
