"""What once went wrong around a run: sums in bf16, another accumulation, lost links, spoilt files, two at once."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback
from training_toy import column, fit

from depthlit import runs
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


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"gradient_clip_val": -1.0}, "gradient_clip_val is -1.0, it must be positive"),
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches is 0, it must be at least 1"),
        ({"log_every_n_steps": 0}, "log_every_n_steps is 0, it must be at least 1"),
    ],
)
def test_numbers_out_of_range(tmp_path, settings, line):
    with pytest.raises(ValueError, match=line):
        fit(tmp_path, **settings)


def test_blocks_longer_than_the_context(tmp_path):
    from training_toy import SHAPE

    from depthlit.shape import ShapeSpec

    short = ShapeSpec(**{**vars(SHAPE), "max_seq_len": 4})
    with pytest.raises(ValueError, match=r"data.block_size 8 is longer than model.shape.max_seq_len 4"):
        fit(tmp_path, settings={"shape": short, "budget": Budget()})
