"""One run under every engine is the run of one process; its checkpoints go from engine to engine and to any ranks.

Two processes train under one engine after the other, since starting them is what takes time.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import CPUFSDP, CPUDeepSpeed
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from training_toy import Toy, column, fit, in_processes, model

from depthlit import convert, residuals
from depthlit.engines import FSDP2, background_group, check_readable, check_writes
from depthlit.trainer import Trainer

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
SHARDED = ENGINES[1:]
RESIDUAL = "ReZero"  # has parameters of one element, which two ranks cannot share evenly
OPTIONS: dict[str, Any] = {
    "accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "keep_checkpoints": None,
    "settings": {"residual": RESIDUAL, "recompute": True},
}  # fmt: skip
OVER_DEPTH = {"residual": "WAV", "recompute": True}  # whose readers share their keys, where an engine lets them
PRECISIONS = {"bf16-mixed": "torch.float32", "bf16-pure": "torch.bfloat16"}
"""Precision -> dtype of the residual stream."""
EXACT = {"train/loss": 1e-5, "val/loss": 1e-5, "optim/grad_norm": 1e-4, "optim/lr": 0, "progress/tokens": 0}


def two(engine: str, steps: int, **more: Any) -> dict[str, Any]:
    """Options of a run on two ranks, each with half the micro-batch of `one`."""
    return {**OPTIONS, "strategy": engine, "max_steps": steps, "data": {"batch_size": 2}, **more}


def one(steps: int, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "max_steps": steps, "data": {"batch_size": 4}, **more}


def checkpoint(root: Path, step: int) -> Path:
    return root / "checkpoints" / f"step_{step:07d}.ckpt"


def same(found: Path, wanted: Path, tags: dict[str, float] = EXACT) -> None:
    """The figures of a run, or of the part of it that was trained in this folder, are those of another."""
    for tag, tolerance in tags.items():
        ours, theirs = column(found, tag), column(wanted, tag)
        assert ours and ours == pytest.approx({step: theirs[step] for step in ours}, abs=tolerance, rel=0), tag


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `one` and one per engine, of 20 steps each; those under an engine were stopped at 12 and gone on with."""
    root = tmp_path_factory.mktemp("runs")
    fit(root / "one", **one(20))
    fit(root / "one over depth", **one(4, settings=OVER_DEPTH))
    halves = [(root / e, two(e, n, **more)) for e in ENGINES for n, more in stops(checkpoint(root / e, 12))]
    from_one = {"ckpt_path": str(checkpoint(root / "one", 12))}
    in_processes(
        2,
        *halves,
        (root / "one to fsdp2", two("fsdp2", 20, **from_one)),
        (root / "one to fsdp2 in one file", two("fsdp2 in one file", 16, **from_one)),
        *((root / f"{e} over depth", two(e, 4, settings=OVER_DEPTH)) for e in ENGINES),
        (root / "in the background", two("fsdp2", 16, save_in_background=True, **from_one)),
        *(
            (root / f"{e} {p}", two(e, 4, precision=p, stream=True))
            for e in ENGINES
            for p in ("bf16-mixed", "bf16-pure")
        ),
    )
    return root


def stops(middle: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(12, {}), (20, {"ckpt_path": str(middle)})]


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_as_one_process_does(engine: str, runs: Path) -> None:
    """Over 20 steps in fp32, with masks, accumulation, clipping, and a stop in the middle."""
    same(runs / engine, runs / "one")
    assert len(column(runs / engine, "train/loss")) == 20


@pytest.mark.parametrize("engine", ENGINES)
def test_attention_over_depth_trains_as_in_one_process(engine: str, runs: Path) -> None:
    same(runs / f"{engine} over depth", runs / "one over depth")
    assert len(column(runs / f"{engine} over depth", "train/loss")) == 4


@pytest.mark.parametrize("engine", ENGINES)
def test_the_residual_stream_is_as_wide_as_the_precision_says(engine: str, runs: Path) -> None:
    """fp32 under bf16-mixed, where only matrix products are in bf16; bf16 under bf16-pure. On both ranks."""
    for precision, kept in PRECISIONS.items():
        run = runs / f"{engine} {precision}"
        assert [(run / f"stream.{rank}").read_text() for rank in (0, 1)] == [kept, kept]
    mixed, whole = (column(runs / name, "train/loss") for name in (f"{engine} bf16-mixed", engine))
    assert mixed == pytest.approx(column(runs / "ddp bf16-mixed", "train/loss"), abs=1e-4)
    assert all(1e-7 < abs(loss - whole[step]) < 0.05 for step, loss in mixed.items()), "products are in bf16"


@pytest.mark.parametrize("engine", SHARDED)
def test_shards_make_the_checkpoint_of_one_process(engine: str, runs: Path, tmp_path: Path) -> None:
    """Weights and AdamW's moments, by the same names, and with the loss that the run itself measured."""
    folder = checkpoint(runs / engine, 20)
    assert folder.is_dir()
    convert.consolidate(folder, tmp_path / "whole.ckpt")
    whole, wanted = (
        torch.load(path, weights_only=True) for path in (tmp_path / "whole.ckpt", checkpoint(runs / "one", 20))
    )
    assert set(whole) == set(wanted)
    for kind in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(whole[kind], wanted[kind], rtol=1e-4, atol=2e-5)
    trainer = Trainer(accelerator="cpu", default_root_dir=str(tmp_path), enable_progress_bar=False)
    found = trainer.validate(
        model(residual=residuals.ReZero()), datamodule=Toy(), ckpt_path=str(tmp_path / "whole.ckpt"), verbose=False
    )
    assert found[0]["val/loss"] == pytest.approx(column(runs / engine, "val/loss")[20], abs=1e-6)


def test_on_other_numbers_of_ranks_and_under_other_engines(runs: Path, tmp_path: Path) -> None:
    """From step 12 or 16 on the figures are those of the run that one process made of it."""
    for engine in SHARDED:
        convert.consolidate(checkpoint(runs / engine, 12), tmp_path / f"{engine}.ckpt")
        fit(tmp_path / engine, **one(20, ckpt_path=str(tmp_path / f"{engine}.ckpt")))
        same(tmp_path / engine, runs / "one")
    for name, step in (("one to fsdp2", 12), ("one to fsdp2 in one file", 12), ("in the background", 12)):
        same(runs / name, runs / "one")
        assert min(column(runs / name, "train/loss")) == step + 1
    one_file = checkpoint(runs / "one to fsdp2 in one file", 16)
    assert one_file.is_file() and checkpoint(runs / "in the background", 16).is_dir()
    fit(tmp_path / "file", **one(20, ckpt_path=str(one_file)))
    same(tmp_path / "file", runs / "one")
    background = {"ckpt_path": str(checkpoint(runs / "in the background", 16))}
    in_processes(1, (tmp_path / "fsdp2 alone", one(20, strategy="fsdp2", **background)))
    same(tmp_path / "fsdp2 alone", runs / "one")


@pytest.mark.parametrize(
    "engine, written_by, ranks, line",
    [
        (SingleDeviceStrategy("cpu"), "fsdp2", 1, "in shards, which SingleDeviceStrategy cannot read; make one file"),
        (DDPStrategy(), "zero2", 2, "DeepSpeed's, which DDPStrategy cannot read; make one file"),
        (FSDP2(), "zero3", 2, "DeepSpeed's, which FSDP2 cannot read; make one file of it: tools/convert.py consol"),
        (CPUDeepSpeed(2), "zero2", 1, "saved by 2 ranks and DeepSpeed can go on with as many only, not 1; for another"),
        (CPUDeepSpeed(2), "fsdp2", 2, "is not DeepSpeed's, which goes on from its own only; take fsdp2 or ddp"),
        (CPUDeepSpeed(2), "one", 2, "is not DeepSpeed's"),
        (CPUDeepSpeed(3), "zero2", 2, "was not saved under ZeRO stage 3; take the stage it has"),
        (CPUDeepSpeed(1), "zero3", 2, "was saved under ZeRO stage 3; take the stage it has"),
        (CPUFSDP(), "one", 2, "CPUFSDP would mix up AdamW's moments"),
        (ModelParallelStrategy(2, 1), "one", 2, "ModelParallelStrategy would mix up AdamW's moments"),
    ],
)
def test_what_an_engine_cannot_read(engine: Any, written_by: str, ranks: int, line: str, runs: Path) -> None:
    with pytest.raises(ValueError) as error:
        check_readable(engine, checkpoint(runs / written_by, 12), ranks)
    assert line in str(error.value)


@pytest.mark.parametrize("engine, written_by, ranks", [
    (SingleDeviceStrategy("cpu"), "ddp", 1), (DDPStrategy(), "one", 2), (FSDP2(), "one", 5), (FSDP2(), "fsdp2", 1),
    (CPUDeepSpeed(3), "zero3", 2), (CPUDeepSpeed(1), "zero2", 2), (CPUFSDP(), "fsdp2", 2),
])  # fmt: skip
def test_what_an_engine_can_read(engine: Any, written_by: str, ranks: int, runs: Path) -> None:
    check_readable(engine, checkpoint(runs / written_by, 12), ranks)


def test_engines_that_would_write_what_others_misread() -> None:
    for engine in (ModelParallelStrategy(2, 1, False), SimpleNamespace(_state_dict_type="full")):
        with pytest.raises(ValueError, match="mixes up AdamW's moments in one file"):
            check_writes(engine)
    for fine in (FSDP2(save_distributed_checkpoint=False), CPUFSDP(), DDPStrategy(), ModelParallelStrategy(2, 1)):
        check_writes(fine)


def test_engines_that_cannot_write_in_the_background() -> None:
    for engine in (CPUDeepSpeed(2), CPUFSDP()):
        with pytest.raises(ValueError, match=f"save_in_background is not possible with {type(engine).__name__}"):
            background_group(engine)
    assert background_group(DDPStrategy()) is background_group(FSDP2(save_distributed_checkpoint=False)) is None


@pytest.mark.parametrize("settings", [{"recompute": True}, {"compiled": "branches"}, {"compiled": "decoder"}])
def test_names_do_not_depend_on_how_one_computes(settings: dict[str, Any], runs: Path) -> None:
    made = model(residual=residuals.ReZero(), **settings)
    made.configure_model()
    saved = torch.load(checkpoint(runs / "one", 12), weights_only=True)
    assert set(made.state_dict()) == set(saved["state_dict"])


def test_deepspeed_is_asked_for_where_its_checkpoint_is_to_be_read(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed.runtime.fp16.loss_scaler", None)
    with pytest.raises(ValueError, match=r"needs the package deepspeed: pip install deepspeed"):
        convert.consolidate(checkpoint(runs / "zero2", 12), tmp_path / "whole.ckpt")


def test_shards_of_a_rank_are_missing(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint(runs / "zero2", 12), tmp_path / "torn")
    next((tmp_path / "torn").glob("checkpoint/*rank_1*optim_states.pt")).unlink()
    with pytest.raises(ValueError, match="torn was saved by 2 ranks, of which 1 are there"):
        convert.consolidate(tmp_path / "torn", tmp_path / "whole.ckpt")
    assert not (tmp_path / "whole.ckpt").exists()
