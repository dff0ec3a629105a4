"""Config files: the packaged ones by name, and the line on which a key stands."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from depthlit.errors import nearest

FLAGS = ("--config", "-c")
STUDIES = "studies/"


@cache
def _files() -> dict[str, Path]:
    here = Path(__file__).parent
    folders = (here / "configs", here.parent / "configs")  # in an installed wheel, in a clone
    root = next((folder for folder in folders if folder.is_dir()), here)
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.yaml"))}


@cache
def packaged() -> dict[str, Path]:
    """Name -> file of every config that comes with the package: {"quickstart": .../quickstart.yaml, ...}.

    Those in studies/ are for tools/sweep.py and not among them.
    """
    return {name: file for name, file in _files().items() if not name.startswith(STUDIES)}


@cache
def study_files() -> dict[str, Path]:
    """Name -> file of every study that comes with the package; these are for tools/sweep.py, not for `--config`."""
    return {name.removeprefix(STUDIES): file for name, file in _files().items() if name.startswith(STUDIES)}


def find(name: str) -> Path:
    """The file that `--config NAME` means: a file of this path, or else the packaged config of this name.

    Raises:
        ValueError: there is neither, or the file is not YAML.
    """
    file = Path(name)
    if not file.is_file():
        known = packaged()
        plain = name.removesuffix(".yaml").removeprefix("./").removeprefix("configs/")
        if plain not in known:
            hint = nearest(plain, known) or f"; packaged ones: {', '.join(known)}"
            raise ValueError(f"--config {name}: no such file, and no packaged config of this name{hint}")
        file = known[plain]
    load(file)
    return file


def load(file: Path) -> dict[str, Any]:
    """The content of a config. Only plain YAML is read: tags that would run Python are refused.

    Raises:
        ValueError: the file cannot be read, is not YAML, or holds something else than a mapping.
    """
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ValueError(f"{file}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # not UTF-8, no such date, nested without end
        raise ValueError(f"{file}: not YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: a config is a mapping of keys to values, such as `trainer: {{max_steps: 300}}`")
    return content


def nodes(file: Path) -> yaml.MappingNode:
    """The content of a config with the lines on which it stands."""
    tree = yaml.compose(file.read_text(encoding="utf-8"))
    assert isinstance(tree, yaml.MappingNode)  # `find` saw to it
    return tree


def section(file: Path, name: str) -> dict[str, Any]:
    """What a config says under a top-level key; {} where that is not a mapping, of which the parser will tell."""
    content = load(file).get(name)
    return content if isinstance(content, dict) else {}


def given(arguments: list[str]) -> Iterator[tuple[int, str, str]]:
    """(index, text before the value, value) of every config named in the arguments."""
    for i, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if flag in FLAGS and equals:
            yield i, flag + equals, value
        elif i and arguments[i - 1] in FLAGS:
            yield i, "", argument


def has_model(file: Path) -> bool:
    """Whether a config says which model to train: whether it has the key `model.shape`."""
    return "shape" in section(file, "model")


def dropped_callbacks(arguments: list[str]) -> str:
    """A line about callbacks of one config that a later one replaces rather than adds to, or ""."""
    kept: list[str] = []
    for _, _, file in given(arguments):
        trainer = section(Path(file), "trainer")
        for key in ("callbacks", "callbacks+"):
            if key not in trainer:
                continue
            listed = trainer[key] if isinstance(trainer[key], list) else [trainer[key] or "none"]
            names = [str(item.get("class_path") if isinstance(item, dict) else item) for item in listed]
            if key == "callbacks" and kept:
                return f"{file} replaces {', '.join(kept)} by {', '.join(names)}; `callbacks+:` would add to them"
            kept += names
    return ""


def covered_design(arguments: list[str]) -> str:
    """A line about a design that is laid under a recipe, which has another, rather than over it, or ""."""
    below: tuple[str, str] | None = None
    for _, _, file in given(arguments):
        model = section(Path(file), "model")
        if (design := model.get("residual")) is None:
            continue
        name = str(design.get("class_path") if isinstance(design, dict) else design)
        if below is not None and "shape" in model and below[1] != name:
            return f"{file} replaces {below[1]} of {below[0]} by {name}; name {below[0]} behind it to lay it over"
        below = None if "shape" in model else (file, name)
    return ""


def option(arguments: list[str], flag: str) -> str | None:
    """The value of the last `flag VALUE` or `flag=VALUE` among the arguments."""
    found = None
    for i, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name == flag:
            found = value if equals else next(iter(arguments[i + 1 : i + 2]), None)
    return found


def resolve(arguments: list[str]) -> None:
    """Put the path of the file in place of every config that is given by name, in place."""
    for i, before, value in list(given(arguments)):
        arguments[i] = before + str(find(value))


def where(key: str, value: str | None = None) -> str:
    """ " (FILE:LINE)" of the place in the config files on the command line where a key was set, or "".

    Args:
        key: dotted, as on the command line; a list's items and `init_args` do not count as parts of it. A key that is
            on the command line too was set there.
        value: look for this value, at or below the key.
    """
    if any(argument.partition("=")[0] == f"--{key}" for argument in sys.argv):
        return ""
    for _, _, file in reversed(list(given(sys.argv))):
        if not Path(file).is_file():
            continue
        for path, text, line in _entries(nodes(Path(file)), ()):
            at = ".".join(path)
            if (at == key and value is None) or (value is not None and text == value and at.startswith(key)):
                return f" ({file}:{line})"
    return ""


def _entries(node: yaml.Node | None, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """(path, scalar value or "", line from 1) of every key and every item of a list."""
    if isinstance(node, yaml.MappingNode):
        for name, content in node.value:
            plain = name.value.removesuffix("+")
            below = path if plain in ("init_args", "dict_kwargs", "class_path") else (*path, plain)
            yield below, content.value if isinstance(content, yaml.ScalarNode) else "", name.start_mark.line + 1
            yield from _entries(content, below)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if isinstance(item, yaml.ScalarNode):
                yield path, item.value, item.start_mark.line + 1
            yield from _entries(item, path)
