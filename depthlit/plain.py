"""Settings as plain data, the way a config names them and a checkpoint keeps them, and back."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from importlib import import_module
from typing import Any

from depthlit.connection import ResidualStrategy
from depthlit.shape import ShapeSpec


def as_shape(shape: Any, vocab_size: int | None = None) -> ShapeSpec:
    """A shape from a shape, the name of one, or its fields; with another vocabulary where one is given."""
    if isinstance(shape, str):
        shape = ShapeSpec.named(shape)
    if isinstance(shape, Mapping):
        shape = ShapeSpec(**shape)
    if not isinstance(shape, ShapeSpec):
        raise ValueError(f"shape: not a shape: {shape!r}")
    return shape if vocab_size in (None, shape.vocab_size) else ShapeSpec(**{**asdict(shape), "vocab_size": vocab_size})


def as_plain(strategy: ResidualStrategy) -> dict[str, Any]:
    """A strategy as {class_path, init_args}, the way a config names it."""
    if not is_dataclass(strategy):
        raise ValueError(f"{type(strategy).__name__} must be a dataclass, so that a checkpoint can hold its settings")
    arguments = {field.name: getattr(strategy, field.name) for field in fields(strategy) if field.init}
    return {"class_path": f"{type(strategy).__module__}.{type(strategy).__qualname__}", "init_args": arguments}


def as_strategy(residual: Any) -> ResidualStrategy:
    """A strategy from a strategy, its name, or its {class_path, init_args}.

    Code named by a checkpoint is not imported: a strategy from elsewhere must have been imported before.

    Raises:
        ValueError: there is no such strategy, or it was not imported.
    """
    if isinstance(residual, str):
        residual = {"class_path": f"depthlit.residuals.{residual}"}
    if isinstance(residual, Mapping):
        module, _, name = residual["class_path"].rpartition(".")
        if module == "depthlit.residuals" or module.startswith("depthlit.residuals."):
            import_module("depthlit.residuals")
        if module not in sys.modules:
            raise ValueError(f"the residual strategy {residual['class_path']} is not loaded; import {module} first")
        try:
            kind = getattr(sys.modules[module], name)
        except AttributeError as error:
            raise ValueError(str(error)) from error
        residual = kind(**residual.get("init_args", {}))
    if not isinstance(residual, ResidualStrategy):
        raise ValueError(f"residual: not a residual strategy: {residual!r}")
    return residual


def as_settings(kind: type, settings: Any) -> Any:
    """Settings of a kind, from them or from their fields."""
    return kind(**settings) if isinstance(settings, Mapping) else settings
