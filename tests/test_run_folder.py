"""What once went wrong around a run: sums in bf16, another accumulation, lost links, spoilt files, two at once."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from training_toy import column, fit

from depthlit import runs
from depthlit.files import replacing, write_text
from depthlit.optim import Budget


def newest(root: Path) -> str:
    return str(runs.last_checkpoint(root))


class Watch(Callback):
    """Counts the validations by step, and keeps what the validation sums are made of."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.dtypes: set[torch.dtype] = set()

    def on_validation_epoch_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)
        self.dtypes |= {pl_module._val_nll.sum_value.dtype, pl_module._val_counted.sum_value.dtype}


def test_validation_sums_are_fp64_in_pure_bf16(tmp_path):
    watch = Watch()
    fit(tmp_path, precision="bf16-pure", callbacks=[watch])
    assert watch.dtypes == {torch.float64} and watch.steps == [4, 8, 12]
    assert len(set(column(tmp_path, "val/loss").values())) == 3, "a sum in bf16 stands still"


@pytest.mark.parametrize("before, after", [(1, 3), (3, 1), (2, 4)])
def test_another_accumulation_on_resume(tmp_path, before, after):
    fit(tmp_path, accumulate_grad_batches=before, max_steps=8)
    watch = Watch()
    trainer, _ = fit(
        tmp_path, accumulate_grad_batches=after, max_steps=16, ckpt_path=newest(tmp_path), callbacks=[watch]
    )
    assert trainer.global_step == 16 and watch.steps == [12, 16]
    assert sorted(column(tmp_path, "train/loss")) == list(range(1, 17))


def test_a_lost_link_is_no_lost_run(tmp_path):
    fit(tmp_path, max_steps=8)
    (tmp_path / "checkpoints" / "last.ckpt").unlink()
    assert newest(tmp_path).endswith("step_0000008.ckpt")
    (tmp_path / "checkpoints" / "last.ckpt").symlink_to("step_0000099.ckpt")
    assert newest(tmp_path).endswith("step_0000008.ckpt")
    with pytest.raises(ValueError, match="holds a run already"):
        fit(tmp_path)


def test_a_spoilt_checkpoint_is_refused(tmp_path):
    fit(tmp_path, max_steps=4)
    path = tmp_path / "checkpoints" / "step_0000004.ckpt"
    content = bytearray(path.read_bytes())
    place = content.index(
        torch.load(path, weights_only=True)["state_dict"]["decoder.embed.weight"].numpy().tobytes()[:32]
    )
    content[place] ^= 1
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match=r"is damaged \(checksum of .*\); go on from an older one"):
        fit(tmp_path, max_steps=8, ckpt_path=str(path))


def test_one_run_at_a_time_in_a_folder(tmp_path):
    with runs.claimed(tmp_path), pytest.raises(ValueError, match="another process is training in"):
        fit(tmp_path)
    fit(tmp_path, max_steps=4)


MISPLACED = {
    "a file": (lambda root: root.write_text(""), r"run cannot be a run folder \(File exists\)"),
    "below a file": (lambda root: root.parent.joinpath("run").write_text(""), "cannot be a run folder"),
    "checkpoints": (lambda root: made(root / "checkpoints").write_text(""), "run/checkpoints is not a folder, which"),
    "analysis": (
        lambda root: made(root / "analysis").write_text(""),
        "run/analysis is not a folder, which a run needs",
    ),
    "metrics.csv": (
        lambda root: made(root / "metrics.csv").mkdir(),
        r"metrics\.csv is a folder, where a run keeps a f",
    ),
    "config.yaml": (
        lambda root: made(root / "config.yaml").mkdir(),
        r"config\.yaml is a folder, where a run keeps a f",
    ),
}


def made(path: Path) -> Path:
    """The path, its folder there."""
    path.parent.mkdir(parents=True)
    return path


@pytest.mark.parametrize("name", MISPLACED)
def test_what_cannot_be_a_run_folder(tmp_path, name):
    put, line = MISPLACED[name]
    root = tmp_path / "run"
    put(root)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=rf"{line}.*; name another --trainer.default_root_dir"):
        fit(root / "below" if name == "below a file" else root, max_steps=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match="cannot be written; name another"):
        runs.check_folder(tmp_path)


FOREIGN = {
    "empty": ({}, "global_step is missing"),
    "a list": ([1], r"its content is \[1\]"),
    "without version": ({"global_step": 3, "state_dict": {}}, "pytorch-lightning_version is missing"),
    "of another model": ({"global_step": 3, "pytorch-lightning_version": "2.6.6"}, "hyper_parameters is missing"),
    "step of text": ({"global_step": "x"}, r"global_step is \"x\""),
    "settings of a number": (
        {"global_step": 3, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {"shape": 3}},
        "hyper_parameters.shape is 3",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_checkpoint_of_foreign_origin(tmp_path, name):
    content, line = FOREIGN[name]
    torch.save(content, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match=rf"last\.ckpt is not a checkpoint of depthlit \({line}\); name another"):
        runs.read_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_checkpoint(tmp_path, content):
    (tmp_path / "last.ckpt").write_bytes(content)
    with pytest.raises(ValueError, match=r"last\.ckpt cannot be read as a checkpoint: it is damaged, or") as caught:
        runs.read_checkpoint(tmp_path / "last.ckpt")
    assert "\n" not in str(caught.value)


def test_what_a_full_disk_left_is_swept_up(tmp_path):
    for name in (
        ".metrics.csv.partial",
        "checkpoints/.step_0000004.ckpt.partial",
        "checkpoints/.step_8.ckpt.partial/x",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("half of it")
    with runs.claimed(tmp_path):
        assert sorted(path.name for path in tmp_path.rglob("*")) == [".lock", "checkpoints"]


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path):
    write_text(tmp_path / "a", "whole")
    with pytest.raises(OSError, match="full"), replacing(tmp_path / "a") as file:
        file.write(b"ha")
        raise OSError(28, "full")
    assert [path.name for path in tmp_path.iterdir()] == ["a"] and (tmp_path / "a").read_text() == "whole"


def test_figures_without_a_checkpoint_are_put_aside(tmp_path, capsys):
    for i in (1, 2):
        fit(tmp_path, max_steps=i, enable_checkpointing=False)
        (tmp_path / "config.yaml").write_text(f"{i}")
    fit(tmp_path, max_steps=3)
    said = capsys.readouterr().out
    for i in (1, 2):
        aside = tmp_path / f"earlier_{i}"
        assert f"{tmp_path} holds figures of a run without a checkpoint; they are now in {aside}" in said
        assert list(column(aside, "train/loss")) == list(range(1, i + 1))
        assert len(list(aside.glob("events.out.tfevents.*"))) == 1 and (aside / "config.yaml").read_text() == f"{i}"
    assert list(column(tmp_path, "train/loss")) == [1, 2, 3] and not (tmp_path / "config.yaml").exists()
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name,value\na,1\n"])
def test_a_metrics_file_of_another_kind(tmp_path, content):
    fit(tmp_path, max_steps=4)
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics\.csv does not hold a run's figures, step by step; move it away"):
        fit(tmp_path, max_steps=5, ckpt_path=newest(tmp_path))
    assert (tmp_path / "metrics.csv").read_bytes() == content


def test_differences_are_shown_whole(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {init_seed: 1}")
    long = {f"role_{i}": 0.125 for i in range(20)}
    table = runs.changes(tmp_path, {"model": {"init_seed": list(long.items())}})
    assert str(list(long.items())) in table and "..." not in table


def test_callbacks_are_compared_by_name(tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {callbacks: null}")
    asked = [{"class_path": f"callbacks.{name}", "init_args": {"every": 3}} for name in ("LogitLens", "CausalScore")]
    assert runs.changes(tmp_path, {"trainer": {"callbacks": asked}}).endswith("None -> LogitLens, CausalScore")


@pytest.mark.parametrize("content", ["- 3\n", "{", "\x00"])
def test_a_damaged_configuration_does_not_keep_a_run_from_going_on(tmp_path, content):
    (tmp_path / "config.yaml").write_text(content)
    (tmp_path / "config_resume_later.yaml").write_text("a: 1")  # none of ours
    assert "nothing to compare the configuration with" in runs.changes(tmp_path, {"model": {"init_seed": 3}})


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"gradient_clip_val": -1.0}, "gradient_clip_val is -1.0, it must be positive"),
        ({"max_steps": 0}, "max_steps is 0, it must be positive"),
        ({"devices": "x"}, "devices is x: give a number"),
        ({"devices": 0}, "devices is 0: give a number"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0, it must be at least 1"),
        ({"log_every_n_steps": 0}, "log_every_n_steps is 0, it must be at least 1"),
    ],
)
def test_numbers_out_of_range(tmp_path, settings, line):
    with pytest.raises(ValueError, match=line):
        fit(tmp_path, **settings)


@pytest.mark.parametrize(
    "name, file",
    [("simple", "fit-profile.txt"), pytest.param("pytorch", "fit-profile*.pt.trace.json", marks=pytest.mark.slow)],
)
def test_a_profile_is_left_in_the_run_folder(tmp_path, name, file):
    fit(tmp_path, max_steps=4, profiler=name)
    found = [path.read_text() for path in tmp_path.glob(file)]
    assert found and any("training_step" in text for text in found)


def test_blocks_longer_than_the_context(tmp_path):
    from training_toy import SHAPE

    from depthlit.shape import ShapeSpec

    short = ShapeSpec(**{**vars(SHAPE), "max_seq_len": 4})
    with pytest.raises(ValueError, match=r"data.block_size 8 is longer than model.shape.max_seq_len 4"):
        fit(tmp_path, settings={"shape": short, "budget": Budget()})
