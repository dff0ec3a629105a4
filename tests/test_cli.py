"""The command line: what it runs, what it writes, and what it says to a person who got something wrong."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from command import Command, figures

from depthlit import __version__, config_files, residuals
from depthlit.data.prepare import Preparation, prepare
from depthlit.shape import NAMED, ShapeSpec

# The dispatcher


def test_help_and_version_import_neither_torch_nor_lightning() -> None:
    code = """if True:
        import sys, time
        begin = time.perf_counter()
        from depthlit.__main__ import main
        for flag in ("--help", "-h", "--version"):
            sys.argv = ["depthlit", flag]
            main()
        loaded = {"torch", "lightning", "jsonargparse", "deepspeed", "numpy"} & set(sys.modules)
        assert not loaded, loaded
        print("seconds", time.perf_counter() - begin)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *page, seconds = done.stdout.splitlines()
    assert float(seconds.split()[1]) < 0.5
    assert f"depthlit {__version__}" in page
    text = "\n".join(page)
    for word in ("fit", "validate", "test", "predict", "quickstart", "residual/hc", "PreLN", "DeepNorm", "--fresh"):
        assert word in text


def test_an_unknown_subcommand_names_the_known_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "depthlit", "train"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "'train'" in done.stderr and "fit, validate, test, predict" in done.stderr


def test_the_page_names_every_strategy_and_diagnostic_of_the_package() -> None:
    import callbacks
    from depthlit.__main__ import diagnostics, strategies

    assert strategies() == sorted(residuals.__all__)
    assert diagnostics() == sorted(callbacks.__all__)


# A run and its folder


def test_fit_leaves_a_run_folder_that_repeats_the_run(depthlit: Command) -> None:
    done = depthlit("fit", "--config", "tiny.yaml")
    assert done.code == 0 and re.search(r"val/loss \d\.\d+, 0\.\d+ nats above the unigram entropy", done.out)
    run = Path("run")
    assert {p.name for p in run.iterdir() if not p.name.startswith("events")} == {
        "config.yaml", "env.json", "metrics.csv", "checkpoints",
    }  # fmt: skip
    assert list(run.glob("events.out.tfevents.*"))
    env = json.loads((run / "env.json").read_text())
    assert env["command"] == ["depthlit", "fit", "--config", "tiny.yaml"]
    assert env["libraries"]["torch"] == torch.__version__.split("+")[0] and env["python"] and env["device"]["name"]
    assert env["seeds"] == {"seed_everything": 0, "model.init_seed": 0, "data.seed": 42}
    assert len(env["data"]) == 16
    assert env["model"]["shape"]["n_layer"] == 2

    again = depthlit("fit", "--config", "run/config.yaml", "--trainer.default_root_dir", "again")
    assert again.code == 0
    first, second = figures("run"), figures("again")
    assert sorted(first) == sorted(second) and len(first) >= 4
    for step, row in first.items():
        timeless = {key: x for key, x in row.items() if not key.startswith("throughput")}
        assert timeless == {key: second[step][key] for key in timeless}


def test_a_run_without_a_named_folder_gets_one(depthlit: Command) -> None:
    config = yaml.safe_load(Path("tiny.yaml").read_text())
    del config["trainer"]["default_root_dir"]
    Path("tiny.yaml").write_text(yaml.safe_dump(config))
    assert depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", "1").code == 0
    assert Path("runs/preln_l2_d32/checkpoints/last.ckpt").exists()


def test_the_same_command_continues_the_run(depthlit: Command) -> None:
    assert depthlit("fit", "--config", "tiny.yaml").code == 0
    first = Path("run/config.yaml").read_text()
    done = depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", "6", "--model.optimizer.lr", "1e-3")
    assert done.code == 0
    said = [line for line in done.out.splitlines() if line.startswith("continuing")]
    assert said == ["continuing run/checkpoints/last.ckpt (step 4)"]
    table = done.out.split("Values that differ from run/config.yaml")[1]
    assert "trainer.max_steps   4 -> 6" in table and "model.optimizer.lr  None -> 0.001" in table
    assert Path("run/config.yaml").read_text() == first
    assert yaml.safe_load(Path("run/config_resume_4.yaml").read_text())["trainer"]["max_steps"] == 6
    again = depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", "6", "--model.optimizer.lr", "1e-4")
    assert again.code == 0 and "this run is finished, at step 6" in again.out
    assert not Path("run/config_resume_6.yaml").exists(), "nothing was trained at that rate"
    assert Path("run/env_resume_4.json").is_file()
    assert list(figures("run")) == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_says_so(depthlit: Command) -> None:
    depthlit("fit", "--config", "tiny.yaml")
    done = depthlit("fit", "--config", "tiny.yaml")
    assert done.code == 0 and "finished, at step 4; --trainer.max_steps above that" in done.out


def test_the_command_line_beats_the_checkpoint(depthlit: Command) -> None:
    """Learning rate 1e-3 on a run begun with the strategy's 2e-3: steps 5 and 6 lie on the new curve."""
    depthlit("fit", "--config", "tiny.yaml")
    depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", "6", "--model.optimizer.lr", "1e-3")
    from depthlit.optim import Schedule

    curve = Schedule(total_steps=8)
    for step, row in figures("run").items():
        peak = 2e-3 if step <= 4 else 1e-3
        assert row["optim/lr"] == pytest.approx(peak * curve.factor(step - 1, 8), rel=1e-12)


def test_a_run_is_continued_by_its_folder_alone(depthlit: Command) -> None:
    depthlit("fit", "--config", "tiny.yaml")
    Path("tiny.yaml").unlink()
    done = depthlit("fit", "--trainer.default_root_dir", "run", "--trainer.max_steps", "5")
    assert done.code == 0 and list(figures("run")) == [1, 2, 3, 4, 5]


def test_fresh_refuses_a_folder_that_is_not_empty(depthlit: Command) -> None:
    Path("run").mkdir()
    assert depthlit("fit", "--config", "tiny.yaml", "--fresh").code == 0  # an empty one is fine
    assert "fresh" not in yaml.safe_load(Path("run/config.yaml").read_text())
    said = depthlit("fit", "--config", "tiny.yaml", "--fresh").complaint()
    assert "run is not empty" in said and "--trainer.default_root_dir" in said
    assert list(figures("run")) == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        (["--model.shape.n_layer", "3"], ["model.shape.n_layer is 3 here, 2 there"]),
        (["--model.residual", "LayerScale"], ["model.residual.strategy is LayerScale here, PreLN there"]),
        (["--data.vocab_multiple", "64"], ["model.shape.vocab_size is 64 here"]),
    ],
)
def test_a_checkpoint_of_another_architecture_is_refused(
    depthlit: Command, change: list[str], fragments: list[str]
) -> None:
    depthlit("fit", "--config", "tiny.yaml", "--trainer.max_steps", "2")
    before = Path("run/checkpoints/last.ckpt").read_bytes()
    for subcommand in ("fit", "validate"):
        said = depthlit(subcommand, "--config", "tiny.yaml", *change).complaint()
        assert "run/checkpoints/last.ckpt is a checkpoint of another architecture" in said
        assert all(fragment in said for fragment in fragments)
    assert Path("run/checkpoints/last.ckpt").read_bytes() == before


def test_a_setting_of_the_strategy_is_part_of_the_architecture(depthlit: Command) -> None:
    residual = ["--model.residual", "LNS"]
    depthlit("fit", "--config", "tiny.yaml", *residual, "--trainer.max_steps", "2")
    said = depthlit("fit", "--config", "tiny.yaml", *residual, "--model.residual.scale", "depth").complaint()
    assert "model.residual.scale is depth here, block there" in said


def test_validate_takes_model_and_data_from_the_checkpoint(depthlit: Command) -> None:
    depthlit("fit", "--config", "tiny.yaml")
    config = Path("run/config.yaml").read_text()
    done = depthlit("validate", "--ckpt_path", "run/checkpoints/last.ckpt")
    assert done.code == 0 and "weights of run/checkpoints/last.ckpt (step 4)" in done.out
    assert Path("run/config.yaml").read_text() == config
    assert yaml.safe_load(Path("run/config.validate.yaml").read_text())["model"]["shape"]["n_layer"] == 2
    with open("run/metrics.validate.csv", newline="") as file:
        row = list(csv.DictReader(file))[-1]
    assert int(row["step"]) == 4 and float(row["val/loss"]) == figures("run")[4]["val/loss"]


def test_predict_keeps_the_loss_of_every_token(depthlit: Command) -> None:
    depthlit("fit", "--config", "tiny.yaml")
    assert depthlit("predict", "--config", "tiny.yaml").code == 0
    kept = np.load("run/predictions.rank0.npz")
    assert kept["nll"].shape == kept["targets"].shape == kept["tokens"].shape
    counted = kept["targets"] >= 0
    mean = kept["nll"][counted].astype(np.float64).mean()
    assert mean == pytest.approx(figures("run")[4]["val/loss"], rel=1e-6) and not kept["nll"][~counted].any()


def test_questions_are_put_to_a_trained_model(depthlit: Command) -> None:
    """A config without a model is laid over that of the run."""
    depthlit("fit", "--config", "tiny.yaml")
    Path("ask.yaml").write_text("trainer: {callbacks+: [{class_path: LogitLens, init_args: {windows: 2, length: 8}}]}")
    done = depthlit("validate", "--ckpt_path", "run/checkpoints/last.ckpt", "--config", "ask.yaml")
    assert done.code == 0, done.err
    assert Path("run/analysis/step_0000004/LogitLens.json").is_file()


def test_validate_without_a_checkpoint_uses_the_last_of_the_run(depthlit: Command) -> None:
    depthlit("fit", "--config", "tiny.yaml")
    assert "(step 4)" in depthlit("validate", "--config", "tiny.yaml").out
    older = depthlit("validate", "--config", "tiny.yaml", "--ckpt_path", "run/checkpoints/step_0000002.ckpt")
    assert "step_0000002.ckpt (step 2)" in older.out


def test_validation_ends_with_the_numbers_and_the_folder_of_the_analyses(depthlit: Command) -> None:
    done = depthlit("validate", "--config", "tiny.yaml")
    assert "run holds no checkpoint: these are the initial weights; --ckpt_path names one" in done.out
    depthlit("fit", "--config", "tiny.yaml")
    callback = "{class_path: LogitLens, init_args: {windows: 2, length: 8}}"
    done = depthlit("validate", "--config", "tiny.yaml", f"--trainer.callbacks+={callback}")
    *_, loss, ppl, _, _, kl, folder = done.out.splitlines()
    assert re.fullmatch(rf"val/loss +{figures('run')[4]['val/loss']:.6g}", loss) and ppl.startswith("val/ppl ")
    assert kl.startswith("depth/LogitLens/") and kl.rindex(" ") == loss.rindex(" "), "aligned"
    assert folder == "what the diagnostics found is in run/analysis/step_0000004" and "━" not in done.out


def test_a_sharded_checkpoint_needs_an_engine_that_shards(depthlit: Command) -> None:
    Path("run/checkpoints/last.ckpt").mkdir(parents=True)
    torch.save({"global_step": 3}, "run/checkpoints/last.ckpt/meta.pt")
    said = depthlit("validate", "--config", "tiny.yaml").complaint()
    assert "last.ckpt is in shards" in said and "tools/convert.py" in said


def test_a_test_needs_a_test_split(depthlit: Command) -> None:
    assert "no test split" in depthlit("test", "--config", "tiny.yaml").complaint()


def test_validation_needs_a_validation_split(depthlit: Command) -> None:
    Path("a.txt").write_text("some words")
    prepare(Preparation(["a.txt"], "chars", val_fraction=0), "whole", quiet=True)
    for subcommand in ("validate", "predict"):
        said = depthlit(subcommand, "--config", "tiny.yaml", "--data.path", "whole").complaint()
        assert said == "whole has no val split; `tools/prepare.py --val_fraction F` holds one out"


def test_a_run_named_by_a_checkpoint_that_is_not_there(depthlit: Command) -> None:
    said = depthlit("validate", "--ckpt_path", "run/checkpoints/last.ckpt").complaint()
    assert said == "--ckpt_path run/checkpoints/last.ckpt: there is no such checkpoint"


# Shapes, strategies and configs by name


def test_the_help_names_every_shape(depthlit: Command) -> None:
    page = " ".join(depthlit("fit", "--help").out.split())
    families = dict(re.findall(r"([\w-]+)-L\{([\d, ]+)\}", page))
    named = {f"{family}-L{depth.strip()}" for family, depths in families.items() for depth in depths.split(",")}
    assert named == set(NAMED)


def test_a_folder_named_like_the_package_hides_nothing(depthlit: Command, tmp_path: Path) -> None:
    """As in the parent folder of a clone."""
    for name in ("depthlit", "callbacks"):
        (tmp_path / name).mkdir()
    script = Path(sys.executable).with_name("depthlit")
    command = [script, "fit", "--config", "tiny.yaml", "--trainer.callbacks+=CausalScore", "--print_config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "callbacks.CausalScore" in done.stdout, done.stderr


def test_a_named_shape_and_some_of_its_fields(depthlit: Command) -> None:
    done = depthlit("fit", "--config", "tiny.yaml", "--model.shape", "1600m-L28", "--model.shape.n_layer", "3",
                    "--print_config")  # fmt: skip
    shape = yaml.safe_load(done.out)["model"]["shape"]
    assert (shape["n_layer"], shape["d_model"], shape["n_kv_head"], shape["d_ff"]) == (3, 2048, 8, 6144)
    done = depthlit("fit", "--config", "tiny.yaml", "--model.shape.d_model", "64", "--print_config")
    fields = yaml.safe_load(done.out)["model"]["shape"]
    assert ShapeSpec(**fields) == ShapeSpec.named("tiny-L2", d_model=64, d_ff=None)  # derived width follows


def test_later_configs_win_key_by_key(depthlit: Command) -> None:
    Path("more.yaml").write_text("model: {residual: {class_path: LNS, init_args: {scale: depth}}, init_seed: 7}")
    done = depthlit("fit", "--config", "tiny.yaml", "--config=more.yaml", "--model.init_seed", "8", "--print_config")
    config = yaml.safe_load(done.out)
    assert config["model"]["residual"] == {"class_path": "depthlit.residuals.LNS", "init_args": {"scale": "depth"}}
    assert config["model"]["init_seed"] == 8 and config["trainer"]["max_steps"] == 4


def test_callbacks_that_a_later_config_drops_are_named(depthlit: Command) -> None:
    Path("first.yaml").write_text("trainer: {callbacks: [LearningRateMonitor, {class_path: ModelSummary}]}")
    Path("more.yaml").write_text("trainer: {callbacks+: [LogitLens]}")
    Path("other.yaml").write_text("trainer: {callbacks: [LogitLens]}")

    def listed(config: str) -> tuple[list[str], str]:
        done = depthlit("fit", "--config", "tiny.yaml", "--config", "first.yaml", "--config", config, "--print_config")
        callbacks = yaml.safe_load(done.out)["trainer"]["callbacks"]
        return [item["class_path"].rpartition(".")[2] for item in callbacks], done.err

    assert listed("more.yaml") == (["LearningRateMonitor", "ModelSummary", "LogitLens"], "")
    names, note = listed("other.yaml")
    assert names == ["LogitLens"] and "other.yaml replaces LearningRateMonitor, ModelSummary by LogitLens" in note


def test_a_design_that_is_laid_under_a_recipe_is_named(depthlit: Command) -> None:
    def notes(*configs: str) -> str:
        given = [word for config in configs for word in ("--config", config)]
        return depthlit("fit", *given, "--print_config").err

    assert notes("quickstart", "residual/hc") == notes("residual/preln", "quickstart") == notes("quickstart") == ""
    said = notes("residual/hc", "quickstart")
    assert re.search(r"note: \S+quickstart\.yaml replaces HC of (\S+hc\.yaml) by PreLN; name \1 behind it", said)


def test_a_packaged_config_is_named_in_place_for_further_ranks(depthlit: Command) -> None:
    done = depthlit("fit", "--config", "quickstart", "-c", "residual/hc", "--print_config")
    assert yaml.safe_load(done.out)["model"]["residual"]["class_path"] == "depthlit.residuals.HC"
    assert sys.argv[3] == str(config_files.packaged()["quickstart"]) and Path(sys.argv[5]).is_absolute()


def test_a_strategy_and_a_callback_in_files_of_your_own(depthlit: Command) -> None:
    Path("mine_here.py").write_text(
        """
from dataclasses import dataclass

from lightning.pytorch import Callback

from depthlit.connection import Connection, ResidualStrategy
from depthlit.layers import RMSNorm


class HalfConnection(Connection):
    def __init__(self, site, factor):
        super().__init__()
        self.norm, self.factor = RMSNorm(site.shape.d_model, site.shape.norm_eps), factor

    def forward(self, h, branch):
        return h + self.factor * branch(self.norm(h))


@dataclass(frozen=True)
class Half(ResidualStrategy):
    factor: float = 0.5

    def connect(self, site):
        return HalfConnection(site, self.factor)


class Greets(Callback):
    def on_train_start(self, trainer, pl_module):
        print("factor", pl_module.decoder.blocks[1].join_mlp.factor)
"""
    )
    done = depthlit("fit", "--config", "tiny.yaml", "--model.residual", "mine_here.Half", "--model.residual.factor",
                    "0.25", "--trainer.callbacks+=mine_here.Greets")  # fmt: skip
    assert done.code == 0 and "factor 0.25" in done.out
    done = depthlit("fit", "--trainer.default_root_dir", "run", "--trainer.max_steps", "5")  # by its folder alone
    assert done.code == 0 and "continuing" in done.out
    said = depthlit("fit", "--trainer.default_root_dir", "run", "--model.residual.factor", "2").complaint()
    assert "model.residual.factor is 2.0 here, 0.25 there" in said
