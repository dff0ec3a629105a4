"""One strategy, or one close family, per file. A file dropped here is known by the names of its classes."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from depthlit.connection import ResidualStrategy

BASELINE = "PreLN"
"""Name of the strategy that the others are compared with, and the default."""

__all__: list[str] = []

for _module in iter_modules(__path__):
    for _name, _item in vars(import_module(f"{__name__}.{_module.name}")).items():
        if isinstance(_item, type) and issubclass(_item, ResidualStrategy) and _item is not ResidualStrategy:
            globals()[_name] = _item
            __all__.append(_name)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"depthlit.residuals has no strategy {name!r}; known: {', '.join(sorted(__all__))}")
