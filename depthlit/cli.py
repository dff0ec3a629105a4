"""The command line: Lightning's, with run folders, named configs and one-line errors.

`fit`, `validate`, `test` and `predict` are Lightning's own; this file only says which model, data and trainer, and
what a run folder is.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.rank_zero import rank_zero_only

import callbacks  # noqa: F401  a file dropped into callbacks/ is known by its class names
import depthlit.residuals  # noqa: F401  and one in residuals/ likewise
from depthlit import __version__, config_files, runs
from depthlit.data import TokenData
from depthlit.data.sources import BUILTIN
from depthlit.engines import check_readable
from depthlit.errors import fail, is_for_user
from depthlit.files import replacing
from depthlit.module import LanguageModel
from depthlit.parsing import Parser, reason
from depthlit.trainer import Trainer


class RunFolder(SaveConfigCallback):
    """Writes the configuration and the surroundings of a run into its folder."""

    step: int | None = None
    """Step at which a run is continued; None for a new one."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage != "fit":
            self._write(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Behind the loading of a checkpoint: a run that is refused there leaves no configuration behind, nor does one
        that was finished before."""
        if self.step is None or self.step < pl_module.plan.max_steps:
            self._write(trainer, pl_module, "fit")

    def _write(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        self.already_saved = True
        folder = Path(trainer.default_root_dir)
        mark = self._mark(str(trainer.state.fn.value if trainer.state.fn else stage), folder)
        self.config.pop("fresh", None)
        runs.write_text(folder / f"config{mark}.yaml", self.parser.dump(self.config, skip_none=False))
        facts = {
            "seeds": {key: self.config.get(key) for key in ("seed_everything", "model.init_seed", "data.seed")},
            "data": getattr(trainer.datamodule, "fingerprint", None),
            "ranks": trainer.world_size,
            "parameters": pl_module.census.get("total"),
            "model": pl_module.settings(),
        }
        runs.write_json(folder / f"env{mark}.json", runs.environment(**facts))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        last = runs.last_checkpoint(Path(trainer.default_root_dir))
        if isinstance(exception, KeyboardInterrupt) and trainer.is_global_zero and last is not None:
            print(f"stopped; the same command goes on from {last}, {last.resolve().name}", file=sys.stderr)

    def _mark(self, subcommand: str, folder: Path) -> str:
        if subcommand != "fit":
            return f".{subcommand}"
        continued = self.step is not None and (folder / "config.yaml").is_file()
        return f"_resume_{self.step}" if continued else ""


class CLI(LightningCLI):
    """LightningCLI on run folders: `trainer.default_root_dir` is the run's folder, whose last checkpoint is used."""

    trainer: Any  # our Trainer; Lightning's stubs miss its attributes
    continued_at: int | None = None  # the step of the checkpoint that was taken

    def init_parser(self, **settings: Any) -> LightningArgumentParser:
        return super().init_parser(dump_header=[f"depthlit {__version__}"], **settings)

    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **settings: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **settings)
        if subcommand == "fit":
            parser.add_argument("--fresh", action="store_true", help="Refuse a run folder that is not empty.")
        elif subcommand in ("validate", "test"):
            parser.set_defaults(verbose=False)  # `after_validate` tells the figures
        return parser

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.vocab_size", "model.vocab_size", apply_on="instantiate")

    def _parse_ckpt_path(self) -> None:
        """Lightning would let a checkpoint's hyper-parameters win over configs and command line; here it never does."""

    def _set_seed(self) -> None:
        try:
            super()._set_seed()
        except ValueError as error:
            raise ValueError(f"seed_everything: {error}") from error

    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except ValueError as error:
            raise ValueError(reason(str(error))) from error
        given, found = config_files.option(sys.argv, "--model.shape.vocab_size"), self.model.shape.vocab_size
        if given is not None and int(given) != found:
            raise ValueError(
                f"model.shape.vocab_size is {given}, the data has {found} ids: leave it out; "
                "--data.vocab_multiple rounds the data's up"
            )

    def instantiate_trainer(self, **settings: Any) -> Any:
        config = self.config[self.subcommand]
        folder = config.trainer.default_root_dir or self._default_folder()
        config.trainer.default_root_dir = folder
        return super().instantiate_trainer(default_root_dir=folder, **settings)

    def _default_folder(self) -> str:
        shape = self.model.shape
        return f"runs/{type(self.model.residual).__name__}_L{shape.n_layer}_d{shape.d_model}".lower()

    def before_fit(self) -> None:
        folder = Path(self.trainer.default_root_dir)
        if self.config.fit.fresh and is_first_rank() and folder.is_dir() and any(folder.iterdir()):
            raise ValueError(
                f"--fresh: {folder} is not empty; name another --trainer.default_root_dir, or leave out --fresh"
            )
        self._use_checkpoint("continuing")

    def after_fit(self) -> None:
        """Say where the loss ended beside the unigram entropy: what a model that only counts tokens would reach."""
        if not is_first_rank():
            return
        step = self.trainer.global_step
        if step == self.continued_at:
            print(f"this run is finished, at step {step}; --trainer.max_steps above that goes on with it")
        loss, entropy = self.trainer.callback_metrics.get("val/loss"), getattr(self.datamodule, "unigram_entropy", None)
        if loss is not None and entropy is not None:
            below = entropy - float(loss)
            side = "below" if below >= 0 else "above"
            print(f"val/loss {loss:.4f}, {abs(below):.4f} nats {side} the unigram entropy of the corpus, {entropy:.4f}")

    def before_validate(self) -> None:
        self._need("val")
        self._use_checkpoint("weights of")

    def after_validate(self) -> None:
        """End with the numbers and with where the analyses are."""
        if not is_first_rank():
            return
        figures = {name: float(x) for name, x in self.trainer.callback_metrics.items() if name != "step"}
        width = max(map(len, figures), default=0)
        for name in sorted(figures, key=lambda name: (name.startswith("depth/"), name)):
            print(f"{name:<{width}}  {figures[name]:.6g}")
        analyses = Path(self.trainer.default_root_dir) / "analysis" / f"step_{self.model.step:07d}"
        if analyses.is_dir():
            print(f"what the diagnostics found is in {analyses}", flush=True)

    after_test = after_validate

    def after_predict(self) -> None:
        """Keep the loss of every token of the prediction split, a file per rank."""
        batches = self.trainer.predict_loop.predictions
        if not batches:
            return
        path = Path(self.trainer.default_root_dir) / f"predictions.rank{self.trainer.global_rank}.npz"
        arrays: dict[str, Any] = {key: torch.cat([batch[key] for batch in batches]).cpu().numpy() for key in batches[0]}
        with replacing(path) as file:
            np.savez(file, **arrays)
        print(f"tokens, targets and their losses are in {path}", flush=True)

    def before_test(self) -> None:
        self._need("test")
        self._use_checkpoint("weights of")

    before_predict = before_validate

    def _need(self, split: str) -> None:
        if not any(corpus.has(split) for corpus in self.datamodule.corpora):
            names = ", ".join(corpus.path for corpus in self.datamodule.corpora)
            own = "a text of your own can have one: " if names.startswith(BUILTIN) else ""
            raise ValueError(
                f"{names} has no {split} split; {own}`tools/prepare.py --{split}_fraction F` holds one out"
            )

    def _use_checkpoint(self, verb: str) -> None:
        """Take `ckpt_path`, or else the run folder's last checkpoint; say so, and what differs from its run."""
        folder = Path(self.trainer.default_root_dir)
        config = self.config[self.subcommand]
        if self.trainer.fast_dev_run:
            return
        runs.check_folder(folder)
        checkpoint = chosen(config.ckpt_path) or runs.last_checkpoint(folder)
        if checkpoint is None:
            if self.subcommand != "fit" and is_first_rank():
                print(f"{folder} holds no checkpoint: these are the initial weights; --ckpt_path names one", flush=True)
            return
        check_readable(self.trainer.strategy, checkpoint, self.trainer.world_size)
        self.continued_at = step = runs.check_architecture(self.model.settings(), checkpoint)
        self.config_init[self.subcommand].ckpt_path = str(checkpoint)
        for callback in self.trainer.callbacks:
            if isinstance(callback, RunFolder):
                callback.step = step or 0
        if is_first_rank():
            print(f"{verb} {checkpoint}" + ("" if step is None else f" (step {step})"), flush=True)
            values = yaml.safe_load(self._parser(self.subcommand).dump(config, skip_none=False))
            if table := runs.changes(runs.folder_of(checkpoint), values):
                print(table, flush=True)


def is_first_rank() -> bool:
    """Whether this is the rank that speaks; also before there are any others."""
    return getattr(rank_zero_only, "rank", 0) == 0


def chosen(checkpoint: str | None) -> Path | None:
    """The checkpoint that `ckpt_path` names; None where it leaves that to the run folder.

    Raises:
        ValueError: there is none of this name.
    """
    if checkpoint in (None, "", "last"):
        return None
    path = Path(str(checkpoint))
    if not path.exists():
        raise ValueError(f"--ckpt_path {path}: there is no such checkpoint")
    return path


def adopt(arguments: list[str]) -> None:
    """Where a run is named, by its checkpoint or its folder, but no config with a model: begin with the run's own.

    Args:
        arguments: as in `sys.argv`, configs resolved; changed in place.
    """
    if "--fresh" in arguments or any(
        config_files.has_model(Path(file)) for _, _, file in config_files.given(arguments)
    ):
        return
    checkpoint, folder = (
        config_files.option(arguments, f"--{key}") for key in ("ckpt_path", "trainer.default_root_dir")
    )
    file = chosen(checkpoint)
    run = runs.folder_of(file) if file else Path(folder) if folder else None
    if run and (config := runs.config_of(run)):
        arguments[2:2] = ["--config", str(config_files.find(str(config)))]


def run() -> None:
    """Run the command line in `sys.argv`. A mistake is answered with one line on stderr and an exit code not 0."""
    atexit.register(_leave_process_group)
    _hush()
    try:
        if os.getcwd() not in sys.path:  # a strategy or callback in your own file is known by its class path
            sys.path.append(os.getcwd())  # at the end, so that no folder in it hides what is installed
        config_files.resolve(sys.argv)  # these two in place: further ranks are launched with a copy of sys.argv
        adopt(sys.argv)
        for note in (config_files.dropped_callbacks(sys.argv), config_files.covered_design(sys.argv)):
            if note and is_first_rank():
                print(f"depthlit: note: {note}", file=sys.stderr)
    except (ValueError, OSError) as error:
        fail(str(error), code=2)
    try:
        CLI(
            LanguageModel,
            TokenData,
            trainer_class=Trainer,
            save_config_callback=RunFolder,
            parser_class=Parser,
            auto_configure_optimizers=False,
            seed_everything_default=0,
        )
    except Exception as error:
        if not is_for_user(error):
            raise
        fail(str(error))


def _leave_process_group() -> None:
    """Lightning does this for NCCL only; a gloo group left open can abort the process at its end."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _hush() -> None:
    """Keep Lightning's advertisements, its own deprecations and its misjudgements from the user's screen."""
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero"):
        logging.getLogger(name).addFilter(lambda record: "Tip:" not in record.getMessage())
    warnings.filterwarnings("ignore", message=r".*isinstance\(treespec, LeafSpec\).*")
    # what we log is reduced over ranks already
    warnings.filterwarnings("ignore", message=r".*It is recommended to use `self.log\(.*sync_dist=True.*")
