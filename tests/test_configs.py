"""Every config that comes with the package parses, and its model is built."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.strategies import StrategyRegistry

from depthlit import cli, config_files, cost, residuals
from depthlit.module import as_shape, as_strategy
from depthlit.parsing import Parser
from depthlit.study.settings import Parsed
from depthlit.trainer import Trainer

CONFIGS = config_files.packaged()
RECIPES = [name for name, file in CONFIGS.items() if "shape:" in file.read_text() and "path:" in file.read_text()]
RATES = {"lns": 1e-2, "deepnorm": 1e-3}
"""Peak learning rates of DepthBench below 1B parameters that are not 2e-3 (arXiv:2609.32534, Sec. 2.3)."""


def parse_arguments(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that `depthlit ARGUMENTS` comes to."""
    monkeypatch.setattr(sys, "argv", ["depthlit", *arguments])
    config_files.resolve(sys.argv)
    cli.adopt(sys.argv)
    settings: dict[str, Any] = {"trainer_class": Trainer, "parser_class": Parser, "auto_configure_optimizers": False}
    return Parsed(cli.LanguageModel, cli.TokenData, **settings).config[arguments[0]]


def parse(*names: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The configuration that these configs come to."""
    return parse_arguments(["fit", *(word for name in names for word in ("--config", name))], monkeypatch)


def recipe_for(name: str) -> tuple[str, ...]:
    """The config itself, or laid over a recipe."""
    return (name,) if name in RECIPES else ("base", name)


def test_there_are_recipes() -> None:
    assert {"quickstart", "base"} <= set(RECIPES)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_parses_and_its_model_is_built(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(*recipe_for(name), monkeypatch=monkeypatch)
    shape, strategy = as_shape(config.model.shape.as_dict()), as_strategy(config.model.residual.as_dict())
    decoder = cost.on_meta(shape, strategy)
    assert len(decoder.blocks) == shape.n_layer
    assert next(decoder.parameters()).device == torch.device("meta")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_opens_with_what_it_is_and_how_to_run_it(name: str) -> None:
    head = [line for line in CONFIGS[name].read_text().splitlines() if line.startswith("#")]
    assert len(head) >= 2 and CONFIGS[name].read_text().startswith("# ")
    commands = re.findall(r"((?: --config \S+)+)", "\n".join(head))
    assert commands, "no command in the head of the file"
    named = [word for command in commands for word in command.split() if word != "--config"]
    assert name in named and set(named) <= set(CONFIGS)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith("residual/")])
def test_a_strategy_config_has_the_learning_rate_of_depthbench(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse("quickstart", name, monkeypatch=monkeypatch)
    assert config.model.optimizer.lr is None  # the strategy's own
    strategy = as_strategy(config.model.residual.as_dict())
    assert strategy.learning_rate(as_shape("400m-L24")) == RATES.get(name.removeprefix("residual/"), 2e-3)
    assert strategy.learning_rate(as_shape("1600m-L28")) == 5e-4


def test_every_strategy_has_a_config() -> None:
    named = {yaml.safe_load(CONFIGS[name].read_text())["model"]["residual"]["class_path"] for name in CONFIGS
             if name.startswith("residual/")}  # fmt: skip
    assert named == set(residuals.__all__)


def test_fsdp2_shards_over_all_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our engine of this name: Lightning's, left to its defaults, would give every rank the same batches."""
    trainer = parse("base", "trainer/fsdp2", monkeypatch=monkeypatch).trainer
    assert (trainer.strategy, trainer.devices) == ("fsdp2", "auto")
    assert "fsdp2" in StrategyRegistry.available_strategies()
