"""Schedule, budget, roles and decay, against closed forms."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from training_toy import SHAPE, column, fit, model

import depthlit.residuals as residuals
from depthlit.decoder import Decoder
from depthlit.module import LanguageModel
from depthlit.optim import (
    ROLES,
    Budget,
    OptimizerSettings,
    Schedule,
    adamw,
    parameter_groups,
    parameter_roles,
    plain_name,
)
from depthlit.residuals import PreLN
from depthlit.shape import ShapeSpec


def closed_form(step: int, total: int, warmup: float = 0.1, final: float = 0.1) -> float:
    """Relative learning rate of step 1, 2, ..., written out again."""
    W = round(warmup * total)
    if step <= W:
        return step / W
    along = min(step - W, total - W) / (total - W)
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * along))


@pytest.mark.parametrize("total", [10, 40, 7600])
def test_the_curve_is_the_closed_form_and_never_above_its_peak(total: int) -> None:
    curve = [Schedule().factor(i, total) for i in range(2 * total)]
    assert curve == pytest.approx([closed_form(s, total) for s in range(1, 2 * total + 1)], abs=1e-14)
    assert curve[0] > 0 and max(curve) == 1 == curve[round(0.1 * total) - 1]
    assert curve[total - 1 :] == pytest.approx([0.1] * (total + 1))
    assert all(a >= b for a, b in zip(curve[round(0.1 * total) :], curve[round(0.1 * total) + 1 :], strict=False))


def test_short_curves_are_defined() -> None:
    assert [Schedule().factor(i, 1) for i in range(3)] == [1, 0.1, 0.1]
    assert Schedule(warmup=0).factor(0, 100) < 1
    assert Schedule(warmup=1).factor(99, 100) == 1


def test_the_learning_rate_in_use_is_the_closed_form_at_every_step(tmp_path: Path) -> None:
    factors = {"embedding": 0.5, "norm": 2.0}
    seen: list[dict[str, float]] = []

    class Spy(Callback):
        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
            roles = [group["role"] for group in pl_module._groups]
            seen.append(dict(zip(roles, [group["lr"] for group in optimizer.param_groups], strict=True)))

    settings = {"optimizer": OptimizerSettings(lr=3e-3, lr_factors=factors), "schedule": Schedule(total_steps=10)}
    fit(tmp_path, settings=settings, max_steps=14, accumulate_grad_batches=2, callbacks=[Spy()])
    logged = column(tmp_path, "optim/lr")
    assert list(logged) == list(range(1, 15))
    for step in logged:
        expected = 3e-3 * closed_form(step, 10)
        assert logged[step] == pytest.approx(expected, rel=1e-12)
        for role, lr in seen[step - 1].items():
            assert lr == pytest.approx(expected * factors.get(role, 1), rel=1e-12)


def test_a_default_rate_is_the_strategy_s_own() -> None:
    assert model().peak_lr == PreLN().learning_rate(SHAPE) == 2e-3
    assert model(optimizer=OptimizerSettings(lr=7e-4)).peak_lr == 7e-4


STRATEGIES = sorted(residuals.__all__)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_without_gradient_shrinks_the_decayed_roles_and_nothing_else(name: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"residual": getattr(residuals, name)(), "schedule": Schedule(warmup=0.5)}
    before = {n: p.clone() for n, p in built(model(**settings)).decoder.named_parameters()}
    settings["optimizer"] = OptimizerSettings(lr=1e-2, weight_decay=0.25)
    _, after = fit(tmp_path, data={"blank": True}, settings=settings, max_steps=1, logger=False, validate_every=0)
    for n, p in after.decoder.named_parameters():
        decays = after.roles[n] in ("matrix", "embedding", "head")
        assert decays or not isinstance(after.decoder.get_submodule(n.rpartition(".")[0]), nn.Linear | nn.Embedding)
        expected = before[n] * (1 - 1e-2 * 0.25) if decays else before[n]
        torch.testing.assert_close(p.detach(), expected, rtol=1e-6 if decays else 0, atol=0, msg=n)


def built(m: LanguageModel) -> LanguageModel:
    m.configure_model()
    return m


def test_decayed_roles_can_be_set(tmp_path: Path) -> None:
    before = {n: p.clone() for n, p in built(model()).decoder.named_parameters()}
    chosen = OptimizerSettings(lr=1e-2, weight_decay=0.25, decayed_roles=("norm", "head"))
    settings = {"optimizer": chosen, "schedule": Schedule(warmup=1)}
    _, after = fit(tmp_path, data={"blank": True}, settings=settings, max_steps=1, logger=False, validate_every=0)
    moved = {after.roles[n] for n, p in after.decoder.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert moved == {"norm", "head"}


class Queries(nn.Module):
    roles: ClassVar[dict[str, str]] = {"query": "query"}

    def __init__(self) -> None:
        super().__init__()
        self.query, self.gate = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.project = nn.Linear(3, 3)


def test_roles_are_those_of_the_owner() -> None:
    decoder = Decoder(SHAPE, PreLN(), seed=0)
    decoder.extra = Queries()  # type: ignore[assignment]
    roles = parameter_roles(decoder)
    assert roles["embed.weight"] == "embedding" and roles["head.weight"] == "head" and roles["norm.weight"] == "norm"
    assert roles["blocks.1.attn.out.weight"] == roles["blocks.0.mlp.gate.weight"] == "matrix"
    assert roles["blocks.0.join_attn.norm.weight"] == "norm"
    assert roles["extra.query"] == "query" and roles["extra.gate"] == "routing"
    assert roles["extra.project.weight"] == "matrix" and roles["extra.project.bias"] == "bias"
    tied = parameter_roles(Decoder(ShapeSpec(2, 16, n_head=2, vocab_size=16, tie_embeddings=True), PreLN(), seed=0))
    assert tied["embed.weight"] == "embedding" and "head.weight" not in tied


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"lr": -1.0}, r"optimizer\.lr is -1\.0, it must be positive"),
        ({"lr": math.inf}, r"optimizer\.lr is inf, it must be positive"),
        ({"betas": (2, 3)}, r"optimizer\.betas are \[2, 3\], it must be two numbers from 0 to below 1"),
        ({"betas": (0.9, 1.0)}, r"optimizer\.betas are \[0\.9, 1\.0\]"),
        ({"eps": -1e-8}, r"optimizer\.eps is -1e-08, it must not be negative"),
        ({"eps": math.nan}, r"optimizer\.eps is nan"),
        ({"weight_decay": -0.1}, r"optimizer\.weight_decay is -0\.1, it must not be negative"),
        ({"weight_decay": math.nan}, r"optimizer\.weight_decay is nan"),
        ({"lr_factors": {"norm": -1}}, r"optimizer\.lr_factors\.norm is -1, it must not be negative"),
    ],
)
def test_numbers_out_of_range(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=line):
        OptimizerSettings(**settings)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_a_budget_is_positive_and_finite(value: float) -> None:
    for name in ("tokens", "tokens_per_parameter", "flops"):
        with pytest.raises(ValueError, match=rf"budget\.{name} is {value}, it must be positive"):
            Budget(**{name: value})


def test_a_misspelt_role_is_named() -> None:
    decoder = Decoder(SHAPE, PreLN(), seed=0)
    for settings in (OptimizerSettings(decayed_roles=("matrx",)), OptimizerSettings(lr_factors={"matrx": 2.0})):
        with pytest.raises(ValueError, match=r"role 'matrx'; there are: bias, embedding"):
            parameter_groups(decoder.named_parameters(), parameter_roles(decoder), settings)
    assert "routing" in ROLES  # a role that this model lacks may be named
    parameter_groups(
        decoder.named_parameters(), parameter_roles(decoder), OptimizerSettings(lr_factors={"routing": 2.0})
    )


def test_wrappers_do_not_hide_names() -> None:
    assert plain_name("_fsdp_wrapped_module.blocks.0._orig_mod.attn.q.weight") == "blocks.0.attn.q.weight"


def test_budgets() -> None:
    shape = ShapeSpec.named("400m-L24")
    assert Budget(tokens=1e6).total_tokens(shape) == 1e6
    assert Budget(tokens_per_parameter=20).total_tokens(shape) == 20 * shape.parameters()
    assert Budget(flops=1e20).total_tokens(shape, 2.5e9) == 4e10
    assert Budget().total_tokens(shape) is None
    with pytest.raises(ValueError, match="one of tokens, flops"):
        Budget(tokens=1, flops=1)
    with pytest.raises(ValueError, match=r"budget\.tokens is 0"):
        Budget(tokens=0)


# What DepthBench's precision does (their configs: weights and moments in bf16)


def trained(dtype: torch.dtype, lr: float, weight_decay: float) -> tuple[nn.Parameter, nn.Parameter]:
    """A gain that starts at 1 and a matrix, after 50 steps with a gradient that always points one way."""
    torch.manual_seed(0)
    gain, matrix = nn.Parameter(torch.ones(64, dtype=dtype)), nn.Parameter((0.02 * torch.randn(64, 64)).to(dtype))
    settings = OptimizerSettings(weight_decay=weight_decay)
    groups = [{"params": [gain], "weight_decay": 0.0}, {"params": [matrix], "weight_decay": weight_decay}]
    optimizer = adamw(groups, settings, lr)
    for _ in range(50):
        gain.grad, matrix.grad = torch.ones_like(gain), torch.zeros_like(matrix)
        optimizer.step()
    return gain, matrix


def test_bf16_pure_freezes_gains_and_undoes_weight_decay_and_fp32_does_not() -> None:
    lr = 5e-4  # the paper's at 1.6B
    gain, matrix = trained(torch.bfloat16, lr, 0.1)
    assert torch.equal(gain, torch.ones_like(gain)), "an Adam step of 5e-4 is under half the spacing of bf16 at 1"
    assert torch.equal(matrix, trained(torch.bfloat16, lr, 0.0)[1]), "1 - 5e-5 rounds to 1"
    gain, matrix = trained(torch.float32, lr, 0.1)
    assert gain.max() < 1 - 40 * lr
    assert torch.allclose(matrix, trained(torch.float32, lr, 0.0)[1] * (1 - 0.1 * lr) ** 50, rtol=1e-5)


def test_bf16_pure_moves_gains_at_a_rate_that_is_large_enough() -> None:
    assert trained(torch.bfloat16, 1e-2, 0.1)[0].max() < 1


@pytest.mark.parametrize(("precision", "frozen"), [("bf16-pure", True), ("32-true", False)])
def test_the_preset_freezes_a_model_s_gains(precision: str, frozen: bool, tmp_path: Path) -> None:
    settings = {"optimizer": OptimizerSettings(lr=5e-4)}
    _, m = fit(tmp_path, settings=settings, max_steps=8, precision=precision, logger=False, validate_every=0)
    gains = [p for n, p in m.decoder.named_parameters() if m.roles[n] == "norm"]
    assert {p.dtype for p in m.decoder.parameters()} == {torch.bfloat16 if frozen else torch.float32}
    assert all(torch.equal(p, torch.ones_like(p)) == frozen for p in gains)
    before = dict(built(model(**settings)).decoder.named_parameters())
    head = m.decoder.head.weight
    assert not torch.equal(head, before["head.weight"].to(head.dtype)), "matrices move in both"
