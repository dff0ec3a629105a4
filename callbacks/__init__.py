"""One question per file. A file dropped here is known by the names of its classes."""

from importlib import import_module
from pkgutil import iter_modules

from lightning.pytorch.callbacks import Callback

__all__: list[str] = []

for _module in iter_modules(__path__):
    _found = import_module(f"{__name__}.{_module.name}")
    for _name, _item in vars(_found).items():
        if isinstance(_item, type) and issubclass(_item, Callback) and _item.__module__ == _found.__name__:
            globals()[_name] = _item
            __all__.append(_name)
