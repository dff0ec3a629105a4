"""The one LightningModule: its loss, accumulation, clipping, evaluation and what a checkpoint says of it."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from training_toy import SHAPE, T, Toy, column, fit, model

from depthlit import residuals
from depthlit.connection import Reader, State
from depthlit.decoder import Decoder
from depthlit.interventions import tapped
from depthlit.module import LanguageModel
from depthlit.optim import Budget, OptimizerSettings, Schedule
from depthlit.plain import as_plain, as_strategy
from depthlit.residuals import PreLN
from depthlit.residuals.held import Sources
from depthlit.shape import ShapeSpec

EXACT = {"precision": "64-true", "validate_every": 0}


def mean_loss(decoder: Decoder, rows: Any) -> Tensor:
    """Mean over the counted targets, in one piece and by torch's own cross-entropy."""
    logits = decoder(rows.tokens)
    return F.cross_entropy(logits.flatten(0, 1), rows.targets.flatten(), ignore_index=-1)


def test_one_batch_is_the_mean_over_counted_targets(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)  # the weights are drawn in the precision they are kept in
    try:
        reference = Decoder(SHAPE, PreLN(), seed=0)
    finally:
        torch.set_default_dtype(torch.float32)
    data = Toy(20)
    loss = mean_loss(reference, data.train)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters() if p.grad is not None]).norm()
    fit(tmp_path, data={"batch_size": 20}, max_steps=1, **EXACT)
    assert column(tmp_path, "train/loss")[1] == pytest.approx(loss.item(), rel=1e-12)
    # measured on the weights that the step began with, before clipping
    assert column(tmp_path, "optim/grad_norm")[1] == pytest.approx(norm.item(), rel=1e-12)


def test_accumulation_is_one_batch_whatever_the_masks(tmp_path: Path) -> None:
    """1 x 8 = 2 x 4 = 8 x 1, with very uneven masks, clipping, and epochs that end within a step."""
    weights, losses, norms, counts = [], [], [], []
    for batch_size, accumulate in ((8, 1), (4, 2), (2, 4), (1, 8)):
        root = tmp_path / f"{batch_size}"
        data = {"batch_size": batch_size, "rows": 24}
        _, m = fit(root, data=data, accumulate_grad_batches=accumulate, gradient_clip_val=0.5, max_steps=7, **EXACT)
        weights.append(torch.cat([p.detach().flatten() for p in m.decoder.parameters()]))
        losses.append(list(column(root, "train/loss").values()))
        norms.append(list(column(root, "optim/grad_norm").values()))
        counts.append(list(column(root, "progress/tokens").values()))
    assert len(losses[0]) == 7 and min(norms[0]) > 0.5, "clipping was at work"
    for other in range(1, 4):
        assert losses[other] == pytest.approx(losses[0], rel=1e-12)
        assert norms[other] == pytest.approx(norms[0], rel=1e-12)
        torch.testing.assert_close(weights[other], weights[0], rtol=0, atol=1e-10)
        assert counts[other] == counts[0] == [8 * T * (i + 1) for i in range(7)]


def test_masks_in_the_toy_are_uneven_enough_to_tell_a_mean_of_means() -> None:
    rows = Toy().train
    per_batch = [(rows.targets[i : i + 2] >= 0).sum().item() for i in range(0, 8, 2)]
    assert max(per_batch) > 2 * min(per_batch)


def test_accumulation_without_our_trainer_is_refused(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_steps=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, default_root_dir=tmp_path,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"depthlit\.trainer\.Trainer"):
        trainer.fit(model(), datamodule=Toy())


class Gradients(Callback):
    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
        if pl_module.step_closed:
            grads = [p.grad.flatten() for p in pl_module.parameters()]
            self.norms.append(torch.cat(grads).norm().item())


@pytest.mark.parametrize("limit", [0.05, 100.0, None])
def test_the_gradient_that_is_used_is_clipped_and_the_one_that_is_logged_is_not(
    limit: float | None, tmp_path: Path
) -> None:
    spy = Gradients()
    fit(tmp_path, callbacks=[spy], max_steps=4, accumulate_grad_batches=2, gradient_clip_val=limit, validate_every=0)
    logged = list(column(tmp_path, "optim/grad_norm").values())
    assert min(logged) > 0.05 and len(logged) == len(spy.norms) == 4
    if limit == 0.05:
        assert spy.norms == pytest.approx([limit] * 4, rel=1e-4)
    else:
        assert spy.norms == pytest.approx(logged, rel=1e-5)


def test_clipping_by_value(tmp_path: Path) -> None:
    worst: list[float] = []

    class Largest(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            worst.append(max(p.grad.abs().max().item() for p in pl_module.parameters()))

    fit(tmp_path, callbacks=[Largest()], max_steps=2, gradient_clip_val=1e-3, gradient_clip_algorithm="value")
    assert worst == pytest.approx([1e-3] * 2)


def test_validation_is_the_mean_over_all_targets_whatever_the_batches(tmp_path: Path) -> None:
    results = []
    for batch_size in (1, 3, 8):
        root = tmp_path / str(batch_size)
        trainer, m = fit(root, data={"batch_size": 4}, max_steps=4, validate_every=4)
        data = Toy(batch_size)
        results.append(trainer.validate(m, datamodule=data, verbose=False)[0])
        expected = mean_loss(m.decoder, data.val).item()
        assert results[-1]["val/loss"] == pytest.approx(expected, rel=1e-6)
        assert results[-1]["val/ppl"] == pytest.approx(math.exp(expected), rel=1e-6)
        assert column(root, "val/loss") == {4: pytest.approx(expected, rel=1e-6)}
    assert results[0]["val/loss"] == pytest.approx(results[2]["val/loss"], rel=1e-6)


def test_a_checkpoint_is_plain_data_and_makes_the_model_again(tmp_path: Path) -> None:
    settings = {"optimizer": OptimizerSettings(lr=1e-2, lr_factors={"norm": 0.5}), "init_seed": 7}
    _, m = fit(tmp_path, settings=settings, max_steps=4)
    file = tmp_path / "checkpoints" / "last.ckpt"
    content = torch.load(file, weights_only=True)
    assert content["hyper_parameters"] == m.settings() and content["global_step"] == 4
    again = LanguageModel.load_from_checkpoint(file)
    assert (again.shape, again.residual, again.optimizer, again.init_seed) == (m.shape, m.residual, m.optimizer, 7)
    assert again.step == 4 and again.tokens_seen == 4 * 2 * T
    tokens = Toy().val.tokens
    assert torch.equal(again(tokens), m(tokens))


def test_keys_are_the_decoder_s(tmp_path: Path) -> None:
    m = model()
    m.configure_model()
    first = m.decoder
    m.configure_model()
    assert m.decoder is first, "building twice keeps the weights"
    assert set(m.state_dict()) == {f"decoder.{key}" for key in Decoder(SHAPE, PreLN(), seed=0).state_dict()}


def test_seed_of_the_weights_is_its_own() -> None:
    one, same, other = (model(init_seed=seed) for seed in (3, 3, 4))
    for m in (one, same, other):
        torch.manual_seed(torch.seed() % 2**31)
        m.configure_model()
    assert torch.equal(one.decoder.head.weight, same.decoder.head.weight)
    assert not torch.equal(one.decoder.head.weight, other.decoder.head.weight)


def test_the_vocabulary_is_the_data_s() -> None:
    assert LanguageModel(ShapeSpec.named("400m-L24"), PreLN(), vocab_size=77).shape.vocab_size == 77
    assert LanguageModel(ShapeSpec.named("400m-L24"), PreLN()).shape.vocab_size == 50280


@pytest.mark.parametrize("name", sorted(residuals.__all__))
def test_strategies_survive_as_plain_data(name: str) -> None:
    strategy = getattr(residuals, name)()
    assert as_strategy(as_plain(strategy)) == strategy


def test_strategies_by_name_and_what_is_refused() -> None:
    assert as_strategy("PreLN") == PreLN()
    with pytest.raises(ValueError, match="no strategy 'PreNL'; known: "):
        as_strategy("PreNL")
    with pytest.raises(ValueError, match=r"import some\.where first"):
        as_strategy({"class_path": "some.where.Else", "init_args": {}})
    with pytest.raises(ValueError, match="not a residual strategy"):
        LanguageModel(SHAPE, 3)  # type: ignore[arg-type]


class Stream(Callback):
    """Notes the dtypes of the states that pass, and of what a head would be shown of them."""

    def __init__(self) -> None:
        self.dtypes: set[torch.dtype] = set()
        self.lenses: set[torch.dtype] = set()
        self.stack = ExitStack()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.width = pl_module.shape.d_model
        self.stack.enter_context(tapped(pl_module.decoder, self.see))

    def see(self, reader: Reader, state: State) -> None:
        held = state._replace(ahead=None) if isinstance(state, Sources) else state  # mixtures ahead are not rounded
        wide = [x for x in tree_leaves(held) if isinstance(x, Tensor) and x.ndim > 2 and x.shape[-1] == self.width]
        self.dtypes |= {x.dtype for x in wide}
        self.lenses.add(reader.lens(state).dtype)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.stack.close()


@pytest.mark.parametrize("name", sorted(residuals.__all__))
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-pure"])
def test_the_stream_is_as_wide_as_the_weights(precision: str, name: str, tmp_path: Path) -> None:
    stream = Stream()
    settings = {"residual": getattr(residuals, name)()}
    _, m = fit(tmp_path, settings=settings, callbacks=[stream], precision=precision, max_steps=2, logger=False)
    kept = torch.bfloat16 if precision == "bf16-pure" else torch.float32
    assert {p.dtype for p in m.decoder.parameters()} == {kept}
    assert stream.lenses == {kept}
    if name != "MoDA":  # whose state also carries keys and values, in the dtype that attention makes them
        assert stream.dtypes == {kept}


# How long a run is


def steps(
    tmp_path: Path, budget: Budget, max_steps: int = -1, total: int | None = None, **rest: Any
) -> tuple[int, int]:
    settings = {"budget": budget, "schedule": Schedule(total_steps=total)}
    trainer, m = fit(tmp_path, settings=settings, max_steps=max_steps, logger=False, enable_checkpointing=False, **rest)
    assert m.plan is not None and trainer.global_step == m.plan.max_steps
    return m.plan.max_steps, m.plan.total_steps


def test_budgets_become_steps(tmp_path: Path) -> None:
    per_step = 2 * T * 2  # micro-batch of 2, accumulation 2
    two = {"accumulate_grad_batches": 2, "validate_every": 0}
    assert steps(tmp_path, Budget(tokens=10 * per_step), **two) == (10, 10)
    parameters = SHAPE.parameters()
    assert steps(tmp_path, Budget(tokens_per_parameter=7.2 * per_step / parameters), **two) == (7, 7)
    flops = 3 * SHAPE.forward_flops(T) / T
    assert steps(tmp_path, Budget(flops=5 * per_step * flops), **two) == (5, 5)
    assert steps(tmp_path, Budget(tokens=10 * per_step), max_steps=3, **two) == (3, 10), "stopping early bends nothing"
    assert steps(tmp_path, Budget(tokens=10 * per_step), total=20, **two) == (10, 20)
    assert steps(tmp_path, Budget(), max_steps=4, **two) == (4, 4)


def test_no_length_names_the_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.max_steps, or a budget: model\.budget\.tokens"):
        steps(tmp_path, Budget())


def test_a_budget_needs_to_know_the_tokens_of_a_step(tmp_path: Path) -> None:
    from depthlit.trainer import Trainer

    trainer = Trainer(accelerator="cpu", default_root_dir=str(tmp_path), enable_progress_bar=False, logger=False)
    with pytest.raises(ValueError, match="batch_size and block_size"):
        trainer.fit(model(budget=Budget(tokens=100)), Toy().train_dataloader(), Toy().val_dataloader())


def test_settings_out_of_range_are_named() -> None:
    for make, match in (
        (lambda: OptimizerSettings(lr=-1), "optimizer.lr is -1"),
        (lambda: OptimizerSettings(weight_decay=-1), "optimizer.weight_decay is -1"),
        (lambda: Schedule(warmup=1.5), "schedule.warmup is 1.5"),
        (lambda: Schedule(total_steps=0), "schedule.total_steps is 0"),
    ):
        with pytest.raises(ValueError, match=match):
            make()
