"""The parser of the command line: shapes by name, and one line for every mistake."""

from __future__ import annotations

import inspect
import re
from dataclasses import asdict
from functools import partial
from typing import Any, NoReturn

import jsonargparse
from jsonargparse._actions import _ActionConfigLoad  # the action of a group such as --model.shape
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser

from depthlit.config_files import where
from depthlit.connection import ResidualStrategy
from depthlit.errors import fail, nearest, one_line
from depthlit.shape import ShapeSpec, default_d_ff

SHAPE = "model.shape"


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
        return added

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:  # a parser within a parser: the outer one reports
            super().error(message, ex)
        fail(explain(message, self), code=2)

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
        (r"following arguments are required: (.+)", _missing),
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


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _unknown_key(key: str, parser: Parser) -> str:
    known, parent = parser.keys(), key.rpartition(".")[0]
    siblings = [other for other in known if other.rpartition(".")[0] == parent]
    hint = nearest(key, siblings, cutoff=0.6 + 0.4 * len(parent) / len(key)) or nearest(key, known, cutoff=0.7)
    return f"there is no key {key}{where(key.removesuffix('+'))}{hint}"


def _unknown_setting(path: str, setting: str, key: str) -> str:
    known = list(inspect.signature(_load(path)).parameters)
    kind = path.rpartition(".")[2]
    place = where(f"{key}.{setting}")
    listed = f"; it has {', '.join(known)}" if known else "; it has none"
    return f"{key}: {kind} has no setting {setting}{place}{nearest(setting, known) or listed}"


def _bad_class(path: str, problem: str, key: str) -> str:
    problem = re.sub(r"<class '([\w.]+)'>", r"\1", one_line(problem))
    return f"{key}: {path}{where(key, path)}: {problem.replace('Parser key ', '')}"


def _unknown_class(name: str, key: str) -> str:
    base = ResidualStrategy if key == "model.residual" else Callback
    known = sorted(
        {cls.__name__ for cls in _below(base) if cls.__name__[0] != "_" and cls.__module__ != "depthlit.cli"}
    )
    kind = "residual strategy" if base is ResidualStrategy else "class"
    hint = nearest(name.rpartition(".")[2], known)
    listed = f"; known: {', '.join(known)}" if base is ResidualStrategy or not hint else ""
    own = "; your own: MODULE.CLASS of a file in this folder" if base is ResidualStrategy else ""
    return f"{key}: there is no {kind} {name}{where(key, name)}{hint}{listed}{own}"


def _missing(keys: str) -> str:
    names = [re.sub(r"^(fit|validate|test|predict)\.", "", key) for key in keys.split(", ")]
    return f"missing: {', '.join(names)}; name a config (--config quickstart) or give the keys (--{names[0]} ...)"


def _below(cls: type) -> set[type]:
    found: set[type] = set(cls.__subclasses__())
    return found.union(*map(_below, found))


def _load(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)
