"""Configs of any shape: either a configuration, or one line that names the place and the remedy."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from depthlit import config_files
from depthlit.errors import is_for_user
from depthlit.study.settings import parser

ACTIONS = {"config", "print_config"}
"""Keys that do something rather than hold a value."""

SAFE = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


def complaint(file: Path, content: bytes | str) -> str:
    """The one line with which the command line refuses a config laid over the quickstart; "" if it takes it."""
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    words = ["fit", "--config", "quickstart", "--config", str(file)]
    before, sys.argv = sys.argv, ["depthlit", *words]
    try:
        config_files.resolve(words)
        config_files.dropped_callbacks(words)
        parser().parse_args(words[1:])
    except ValueError as error:
        said = " ".join(str(error).split())
        assert said
        return said
    finally:
        sys.argv = before
    return ""


MISSHAPEN: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "a config is a mapping"),
    "comment": ("# nothing\n", "a config is a mapping"),
    "list": ("- model\n", "a config is a mapping"),
    "number": ("3\n", "a config is a mapping"),
    "not UTF-8": (b"model: \xff\n", "bad.yaml: not YAML"),
    "tab": ("\tmodel: 3\n", "bad.yaml:1: not YAML"),
    "alias": ("model: *m\n", "bad.yaml:1: not YAML: found undefined alias"),
    "two documents": ("seed_everything: 1\n---\nseed_everything: 2\n", "bad.yaml:2: not YAML"),
    "no such date": ("seed_everything: 2024-99-99\n", "bad.yaml: not YAML: month must be in 1..12"),
    "nested without end": ("a: " + "[" * 3000, "bad.yaml: not YAML"),
    "unhashable key": ("? [a]\n: 3\n", "bad.yaml:1: not YAML: found unhashable key"),
    "python": (
        "seed_everything:\n  !!python/object/apply:os.mkdir [owned]\n",
        "bad.yaml:2: not YAML: could not determ",
    ),
    "unknown key": ("trainer: {max_steps: 3}\nmodle: {}\n", "no key modle (bad.yaml:2); did you mean model?"),
    "unknown key below": (
        "model:\n  optimizr: {}\n",
        "no key model.optimizr (bad.yaml:2); did you mean model.optimizer",
    ),
    "key that is a number": ("1: 2\n", "no key 1 (bad.yaml:1)"),
    "key given twice": (
        "model: {init_seed: 1}\ndata: {seed: 1}\nmodel: {init_seed: 2}\n",
        "bad.yaml:3: model stands in",
    ),
    "group of null": (
        "seed_everything: 1\ntrainer:\n",
        "bad.yaml:2: trainer is empty; expected a mapping of max_steps",
    ),
    "group that is a list": ("trainer: [1]\n", "bad.yaml:1: trainer is [1]; expected a mapping of max_steps"),
    "group that is a number": (
        "model:\n  optimizer: 3\n",
        "bad.yaml:2: model.optimizer is 3; expected a mapping of lr",
    ),
    "group that is text": ("data: x\n", "data is 'x' (bad.yaml:1); expected a mapping of keys"),
    "shape that is a list": (
        "model: {shape: [2, 32]}\n",
        "bad.yaml:1: model.shape is [2, 32]; expected a mapping of n_l",
    ),
    "misspelt class_path": (
        "trainer: {callbacks: [{class_pth: X}]}\n",
        "bad.yaml:1: trainer.callbacks has {class_pth: X}",
    ),
    "no class_path": (
        "trainer:\n  callbacks+: [{init_args: {}}]\n",
        "bad.yaml:2: trainer.callbacks has {init_args: {}}",
    ),
    "misspelt init_args": (
        "model: {residual: {class_path: HC, init_arg: {}}}\n",
        "bad.yaml:1: model.residual has {class_",
    ),
    "settings in a list": (
        "model: {residual: {class_path: HC, init_args: [2]}}\n",
        "expected the name of a class, or {cl",
    ),
    "class that is a number": (
        "trainer: {callbacks: [3]}\n",
        "bad.yaml:1: trainer.callbacks has 3; expected the name of",
    ),
    "class that is null": (
        "trainer: {callbacks: [null]}\n",
        "bad.yaml:1: trainer.callbacks has null; expected the name",
    ),
    "list of classes": (
        "model: {residual: [HC]}\n",
        "model.residual is ['HC'] (bad.yaml:1); expected the name of a cl",
    ),
    "another kind of class": ("trainer: {logger: CausalScore}\n", "there is no class CausalScore (bad.yaml:1)"),
    "text for a number": (
        "model: {optimizer: {betas: 3}}\n",
        "model.optimizer.betas is 3 (bad.yaml:1); expected tuple",
    ),
}


@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_misshapen_config_is_refused_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content, expected = MISSHAPEN[name]
    said = complaint(Path("bad.yaml"), content)
    assert expected in said, said
    assert len(said) < 300 and not Path("owned").exists()


def test_shapes_that_are_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (
        "model: {shape: small-L24, residual: HC}\n",
        "model: {shape: {n_layer: 3}, residual: {class_path: HC, init_args: {streams: 2}}}\n",
        "model: {shape: {}, optimizer: {}}\n",
        "trainer: {callbacks: null, logger: false, strategy: auto}\n",
        "trainer: {callbacks: [CausalScore, {class_path: LogitLens}]}\n",
        "trainer: {callbacks: {class_path: LogitLens}}\n",
        "model: &m {init_seed: 3}\ndata: {<<: {seed: 3}}\n",
    ):
        assert complaint(Path("fine.yaml"), content) == "", content


def test_a_config_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    (tmp_path / "bad.yaml").write_text("model: {}\n")
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ValueError, match=r"bad\.yaml: cannot be read: Permission denied"):
        config_files.find(str(tmp_path / "bad.yaml"))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("HC")
words = st.sampled_from(
    ["class_path", "init_args", "dict_kwargs", "shape", "n_layer", "callbacks", "callbacks+", "lr", "residual", "<<"]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | words, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def configs(draw: Callable[..., Any]) -> dict[str, Any]:
    """A config in which one known key, of whatever depth, holds something it should not."""
    known = sorted({*parser().keys()} - ACTIONS)
    *above, last = draw(st.sampled_from(known)).split(".")
    tree: dict[str, Any] = {last: draw(values)}
    for key in reversed(above):
        tree = {key: tree}
    return tree


@SAFE
@given(configs())
def test_anything_in_the_place_of_a_value(tmp_path: Path, config: dict[str, Any]) -> None:
    """No other error than ours leaves the parser."""
    complaint(tmp_path / "any.yaml", yaml.safe_dump(config, allow_unicode=True))


def test_an_error_within_the_interpreter_is_no_message_to_the_user() -> None:
    with pytest.raises(UnicodeDecodeError) as raised:
        codecs.getincrementaldecoder("utf-8")().decode(b"\xff", True)
    assert not is_for_user(raised.value)
