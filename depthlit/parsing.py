"""The parser of the command line: shapes by name, and one line for every mistake."""

from __future__ import annotations

import inspect
import os
import re
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import jsonargparse
import yaml
from jsonargparse._actions import _ActionConfigLoad  # the action of a group such as --model.shape
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.loggers import Logger

from depthlit.config_files import given, nodes, where
from depthlit.connection import ResidualStrategy
from depthlit.errors import fail, nearest, one_line
from depthlit.shape import NAMED, ShapeSpec, default_d_ff

SHAPE = "model.shape"
CLASS = "the name of a class, or {class_path: NAME, init_args: {...}}"
BASES: dict[str, type] = {"model.residual": ResidualStrategy, "trainer.callbacks": Callback, "trainer.logger": Logger}
TEXT = "tag:yaml.org,2002:str"


def shape_fields(name: str) -> dict[str, Any]:
    """Fields of a named shape. Derived ones are None, so that they follow when another field is changed.

    Raises:
        ValueError: no shape has this name.
    """
    fields = asdict(ShapeSpec.named(name))
    if fields["n_kv_head"] == fields["n_head"]:
        fields["n_kv_head"] = None
    if fields["d_ff"] == default_d_ff(fields["d_model"]):
        fields["d_ff"] = None
    return fields


def shape_names() -> str:
    """Every named shape, a family at a time: 400m-L{16,20,24}, ..."""
    families: dict[str, list[str]] = {}
    for name in NAMED:
        family, _, depth = name.rpartition("-L")
        families.setdefault(family, []).append(depth)
    return ", ".join(f"{family}-L{{{','.join(depths)}}}" for family, depths in families.items())


class ShapeByName(_ActionConfigLoad):
    """`--model.shape 400m-L24`, and the same in YAML: stands for the fields of the named shape."""

    def resolve_subclass_spec(self, value: Any) -> Any:
        if not isinstance(value, str) or "{" in value or value.endswith((".yaml", ".yml", ".json")):
            return super().resolve_subclass_spec(value)
        try:
            return jsonargparse.Namespace(shape_fields(value))
        except ValueError as error:
            raise TypeError(str(error)) from error


class Parser(LightningArgumentParser):
    """Lightning's parser, with named shapes, exact keys and short errors."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **settings)

    def add_lightning_class_args(self, *args: Any, **settings: Any) -> list[str]:
        added = super().add_lightning_class_args(*args, **settings)
        for action in self._actions:
            if type(action) is _ActionConfigLoad and action.dest == SHAPE:
                action.__class__ = ShapeByName
                action.help = f"A shape by its name, {shape_names()}, or a YAML file of its fields."
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within a parser: the outer one reports
            super().error(message, ex)
        fail(explain(message, self), code=2)

    def parse_args(self, args: Any = None, *more: Any, **settings: Any) -> Any:
        """As jsonargparse does it, behind a look at the shape of the configs.

        Left alone, it drops an unknown key of an empty mapping, a list in the place of a group of keys, and all but
        the last of equal keys.
        """
        self.args = sys.argv[1:] if args is None else list(args)
        for _, _, file in given(self.args):
            if Path(file).is_file():
                self._check_group(file, nodes(Path(file)))
        return super().parse_args(args, *more, **settings)

    def _check_group(self, file: str, mapping: yaml.MappingNode, above: str = "") -> None:
        """Each key of a mapping must be known, once, and have a mapping where it stands for a group of keys."""
        known, lines = self.keys(), dict[str, int]()
        for name, value in mapping.value:
            key, line = above + name.value.removesuffix("+"), name.start_mark.line + 1
            if name.value in lines:
                self.error(f"{file}:{line}: {key} stands in line {lines[name.value]} already; only one would count")
            lines[name.value] = line
            below = [other.removeprefix(f"{key}.") for other in known if other.startswith(f"{key}.")]
            if below == ["help"]:
                self._check_classes(file, key, value)
            elif below and isinstance(value, yaml.MappingNode):
                self._check_group(file, value, f"{key}.")
            elif below and value.tag != TEXT:  # text may name a shape or a file
                some = ", ".join([other for other in below if "." not in other][:3])
                self.error(f"{file}:{line}: {key} is {_shown(value)}; expected a mapping of {some}, ...")
            elif not below and key not in known and name.value != "<<":
                self.error(_unknown_key(key, self, f" ({file}:{line})"))

    def _check_classes(self, file: str, key: str, value: yaml.Node) -> None:
        """What names a class must be its name, or a mapping with it; in a list it cannot have been named before."""
        listed = isinstance(value, yaml.SequenceNode)
        for item in value.value if listed else [value]:
            parts = {name.value: part for name, part in item.value} if isinstance(item, yaml.MappingNode) else {}
            path, arguments = parts.get("class_path"), parts.get("init_args")
            if item.tag == TEXT or not (listed or path):
                continue
            others = parts.keys() - {"class_path", "init_args", "dict_kwargs"}
            if not path or path.tag != TEXT or others or not isinstance(arguments, yaml.MappingNode | None):
                line = item.start_mark.line + 1
                self.error(f"{file}:{line}: {key} has {_shown(item)}; expected {CLASS}")

    def keys(self) -> list[str]:
        """Every key that this parser, or the one of its subcommands that is in use, accepts."""
        choices = getattr(self._subcommands_action, "choices", None) or {}
        subcommand = next((choices[word] for word in getattr(self, "args", []) if word in choices), self)
        return [action.dest for action in subcommand._actions if action.dest not in ("help", "==SUPPRESS==")]


def explain(message: str, parser: Parser) -> str:
    """jsonargparse's message, often of many lines, as one line that names the key, its place and the remedy."""
    key = _first(r'Parser key "([\w.]+)"', message)
    rules = (
        (r"does not accept option '([\w.+]+)'", partial(_unknown_key, parser=parser)),
        (r"unrecognized arguments: --([\w.+]+)", partial(_unknown_key, parser=parser)),
        (r"- (no shape is named .+)", lambda text: f"model.shape{where(SHAPE)}: {text}"),
        (r"given class_path '([\w.]+)':\s+Option '([\w.]+)' is not accepted", partial(_unknown_setting, key=key)),
        (r"given class_path '([\w.]+)':\s+(.+?)(?=\s+- |\s+Given value|$)", partial(_bad_class, key=key)),
        (r"Expected a dot import path string: (\S+)", partial(_unknown_class, key=key)),
        (
            r"Import path (\S+) does not correspond to a subclass of (\w+)",
            lambda path, kind: f"{key}: {path}{where(key, path)} is not a {kind}",
        ),
        (r"Expected a path but (\S*) either", lambda name: f"{key} is {name!r}{where(key)}; expected {CLASS}"),
        (r"following arguments are required: (.+)", _missing),
        (
            r"Not a valid subclass of \w+\. Got value: ([^\n]+)",
            lambda value: f"{key} is {value}{where(key)}; expected {CLASS}",
        ),
        (
            r"Unable to load config ('[^\n]*')\n",
            lambda value: f"{key} is {value}{where(key)}; expected a mapping of keys, or a file with one",
        ),
    )
    for pattern, answer in rules:
        if found := re.search(pattern, message, re.DOTALL):
            return answer(*found.groups())
    expected = re.findall(r"Expected an? ([^\n]+?)(?:\. Got value: [^\n]*)?$", message, re.MULTILINE)
    value = _first(r"(?:Got value|Given value): ([^\n]+)", message)
    if key and expected and value:
        kinds = [re.sub(r"<class '([\w.]+)'>", r"\1", kind) for kind in dict.fromkeys(expected)]
        return f"{key} is {value}{where(key)}; expected {' or '.join(kinds)}"
    text = one_line(re.sub(r"(?s)\n +Given value type:.*", "", message))
    return (f"{key}{where(key)}: " if key and key != "config" else "") + re.sub(r'^Parser key "[\w.]+": ?', "", text)


def reason(message: str) -> str:
    """What a class said to its arguments, out of jsonargparse's list of all that could have been meant."""
    return _first(r"Union subtypes\n(?s:.*?)\nErrors:\n +- ([^\n]+)", message) or message


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _unknown_key(key: str, parser: Parser, place: str | None = None) -> str:
    known, parent = parser.keys(), key.rpartition(".")[0]
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    hint = nearest(key, siblings, cutoff=0.6 + 0.4 * len(parent) / len(key)) or nearest(key, known, cutoff=0.7)
    return f"there is no key {key}{where(key.removesuffix('+')) if place is None else place}{hint}"


def _unknown_setting(path: str, setting: str, key: str) -> str:
    known = list(inspect.signature(_load(path)).parameters)
    kind = path.rpartition(".")[2]
    place = where(f"{key}.{setting}")
    listed = f"; it has {', '.join(known)}" if known else "; it has none"
    return f"{key}: {kind} has no setting {setting}{place}{nearest(setting, known) or listed}"


def _bad_class(path: str, problem: str, key: str) -> str:
    problem = re.sub(r"<class '([\w.]+)'>", r"\1", one_line(problem))
    if problem.startswith("No module named"):
        problem += f"; searched {os.getcwd()} and the installed packages"
    return f"{key}: {path}{where(key, path)}: {problem.replace('Parser key ', '')}"


def _unknown_class(name: str, key: str) -> str:
    base = BASES.get(key, Callback)
    known = sorted(
        {cls.__name__ for cls in _below(base) if cls.__name__[0] != "_" and cls.__module__ != "depthlit.cli"}
    )
    kind = "residual strategy" if base is ResidualStrategy else "class"
    hint = nearest(name.rpartition(".")[2], known)
    listed = f"; known: {', '.join(known)}" if base is ResidualStrategy or not hint else ""
    own = f"; your own: MODULE.CLASS of a file in {os.getcwd()}" if base is ResidualStrategy else ""
    return f"{key}: there is no {kind} {name}{where(key, name)}{hint}{listed}{own}"


def _shown(node: yaml.Node) -> str:
    """What stands at a node, short enough for a line."""
    text = one_line(yaml.serialize(node).removesuffix("...\n")) or "empty"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _missing(keys: str) -> str:
    names = [re.sub(r"^(fit|validate|test|predict)\.", "", key) for key in keys.split(", ")]
    return f"missing: {', '.join(names)}; name a config (--config quickstart) or give the keys (--{names[0]} ...)"


def _below(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*map(_below, found))


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)
