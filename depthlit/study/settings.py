"""The whole configuration of a run by the command line's own parser, and what of it is no default."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any

from jsonargparse import Namespace

from depthlit import cli, config_files
from depthlit.parsing import Parser, explain
from depthlit.shape import ShapeSpec
from depthlit.trainer import Trainer

UNNAMED = ("config", "ckpt_path", "fresh", "trainer.default_root_dir", "trainer.enable_progress_bar", "data.cache_dir")
"""Keys that say where a run lies or what it shows, and so have no part in its name."""


class Asked(Parser):
    """The command line's parser, which raises where that one ends the program."""

    def error(self, message: str, ex: Exception | None = None) -> Any:
        if not self.exit_on_error:  # a parser within a parser
            super().error(message, ex)
        raise ValueError(explain(message, self)) from ex


class Parsed(cli.CLI):
    """The command line up to and without making anything."""

    def _set_seed(self) -> None:
        return

    def instantiate_classes(self) -> None:
        return

    def _run_subcommand(self, subcommand: str) -> None:
        return


@cache
def parser() -> Any:
    """The parser of `depthlit fit`."""
    arguments = ["fit", "--config", str(config_files.find("quickstart"))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # arguments are given although there are some in sys.argv
        made = Parsed(cli.LanguageModel, cli.TokenData, args=arguments, trainer_class=Trainer, parser_class=Asked,
                      auto_configure_optimizers=False, seed_everything_default=0)  # fmt: skip
    return made._parser("fit")


def of_arguments(arguments: list[str]) -> dict[str, Any]:
    """Dotted key -> value of the whole configuration."""
    words = ["fit", *arguments]
    config_files.resolve(words)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flat(parser().parse_args(words[1:]))


def lean(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a flat configuration what differs from the defaults of the command line and of the classes it names.

    So a new option with a default does not rename old runs.
    """
    usual = _defaults()
    kept = {}
    for key, value in config.items():
        if key not in UNNAMED and key in usual and value == usual[key]:
            continue
        if key not in UNNAMED:
            kept[key] = _lean(value)
    return dict(sorted(kept.items()))


def _lean(value: Any) -> Any:
    """A value without those arguments of the classes in it that are their defaults."""
    if isinstance(value, Mapping) and "class_path" in value:
        usual = _arguments(value["class_path"])
        given = {name: _lean(x) for name, x in (value.get("init_args") or {}).items()}
        own = {name: x for name, x in given.items() if name not in usual or _plain(usual[name]) != x}
        return {"class_path": value["class_path"], **({"init_args": own} if own else {})}
    if isinstance(value, list | tuple):
        return [_lean(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _lean(item) for key, item in value.items()}
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)  # which of the two a number becomes, where both are allowed, depends on the order of imports
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
        return int(value)  # `devices` is text from the command line and a number from a config
    return value if isinstance(value, str | int | float | bool | None) else str(value)


@cache
def _arguments(class_path: str) -> dict[str, Any]:
    """Defaults of a class's arguments, inherited ones that it passes on included."""
    module, _, name = class_path.rpartition(".")
    usual: dict[str, Any] = {}
    for kind in reversed(getattr(import_module(module), name).__mro__[:-1]):
        try:
            parameters = inspect.signature(kind).parameters.values()
        except ValueError:  # a builtin that does not tell
            continue
        usual |= {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    return usual


@cache
def _defaults() -> dict[str, Any]:
    shape = inspect.signature(ShapeSpec).parameters
    usual = {f"model.shape.{name}": p.default for name, p in shape.items() if p.default is not p.empty}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return flat(parser().get_defaults()) | usual


def flat(tree: Namespace, path: str = "") -> dict[str, Any]:
    """A parsed configuration as dotted keys; what names a class stays whole, and so does a value that is a mapping."""
    found: dict[str, Any] = {}
    for key, value in vars(tree).items():
        at = f"{path}.{key}" if path else str(key)
        if isinstance(value, Namespace) and "class_path" not in value:
            found |= flat(value, at)
        else:
            found[at] = _bare(value)
    return found


def _bare(value: Any) -> Any:
    """A value made of dicts and lists in place of namespaces and tuples."""
    if isinstance(value, Namespace):
        return {key: _bare(item) for key, item in vars(value).items()}
    return [_bare(item) for item in value] if isinstance(value, list | tuple) else value
