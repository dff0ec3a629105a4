"""Run folders written by hand in the formats of a run and a sweep, so that reports can be made without training."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from depthlit.answer import Answer
from depthlit.report.found import Found
from depthlit.report.page import Made
from depthlit.report.write import Options, write
from depthlit.shape import ShapeSpec

STEPS = 40
SEEDS = ("seed_everything", "model.init_seed", "data.seed")
DOMAINS = ("coding", "stem", "math")


def shape(n_layer: int, d_model: int, **rest: Any) -> ShapeSpec:
    """Small heads, so that any even width will do."""
    return ShapeSpec(n_layer, d_model, n_head=1, vocab_size=64, **rest)


def triangle(rng: np.random.Generator, L: int) -> np.ndarray:
    """(L, L) with values above the diagonal."""
    return np.where(np.triu(np.ones((L, L)), 1) > 0, rng.random((L, L)), np.nan)


def answers(strategy: str, spec: ShapeSpec, seed: int) -> dict[str, tuple[dict[str, float], dict[str, np.ndarray]]]:
    """Numbers and arrays of every diagnostic."""
    rng, L = np.random.default_rng([seed, spec.n_layer, *strategy.encode()]), spec.n_layer
    causal, perm = triangle(rng, L), triangle(rng, L)
    threshold, curve = np.linspace(0, 1, 81), np.linspace(1, 0, 81)
    change, readers = rng.random(L), 2 * L + 1
    bars = {"low": change - 0.1, "high": change + 0.1}
    distance = np.triu(rng.random((L + 1, L + 1)))
    weight = np.where(np.tril(np.ones((readers, readers))) > 0, rng.normal(size=(readers, readers)), np.nan)
    erank, spectrum = 1 + rng.random(L), np.sort(rng.random(4))[::-1]
    running = rng.random(readers)
    bands = {f"{key}_{end}": value for key, value in (("erank", erank), ("overlap", erank / 4), ("spectrum", spectrum))
             for end in ("low", "high")}  # fmt: skip
    found = {
        "CausalScore": ({"R_causal": rng.random()}, {"score": causal, "norms": causal, "sweep_threshold": threshold,
                                                     "sweep": curve}),
        "PermutationScore": ({"R_perm": rng.random()}, {"score": perm, "signed": perm - 0.5,
                                                        "sweep_threshold": threshold, "sweep": curve}),
        "AngularDistance": ({"mean_step": 0.2}, {"distance": distance, "step": np.diagonal(distance, 1).copy()}),
        "LogitLens": ({"final_ce": 2.0}, {"kl": np.linspace(2, 0, L + 1), "ce": np.linspace(4, 2, L + 1),
                                          "agreement": np.linspace(0, 1, L + 1)}),
        "LayerPruning": ({"mean_change": 0.5}, {"change": change, **bars}),
        "ArcEasy": ({"acc_norm": 0.4, "questions": 100.0}, {"drop": change, **bars}),
        "PathWeights": ({"smallest": -1.0}, {"weight": weight, "spread": np.abs(weight)}),
        "BlockReads": ({"low_use_segment": 2.0}, {"running": running, "saved": 1 - running,
                                                  "border": (np.arange(readers) % 4 == 0).astype(float),
                                                  "by_layer": running[:L]}),
        "Propagation": ({"final_erank": erank[-1], "final_overlap": 0.5},
                        {"erank": erank, "overlap": erank / 4, "spectrum": spectrum, **bands}),
        "DomainNLL": ({key: 1.5 + rng.random() for key in DOMAINS}, {}),
        "CostMeter": ({"prefill_flops": 1e9 * L, "kv_bytes": 1e6 * L, "peak_bytes": 1e8,
                       "hours_per_1b_prefill_tokens": 2.0, "parameters_total": float(spec.parameters() + 10 * L)}, {}),
    }  # fmt: skip
    for name, kept in (("BlockReads", "Block"), ("Propagation", "HC")):
        if kept not in strategy:
            del found[name]
    return found


METRIC: Mapping[str, Callable[[str], str]] = {
    "DomainNLL": "nll/{}".format, "ArcEasy": "eval/arc_easy/{}".format, "CostMeter": "cost/{}".format,
}  # fmt: skip


def run(
    folder: Path, strategy: str = "PreLN", spec: ShapeSpec | None = None, seed: int = 0, loss: float = 2.0,
    steps: int = STEPS, planned: int | None = STEPS, validated: bool = True, diagnostics: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None, data_seed: int | None = None, data: str | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """Write a run folder.

    Args:
        folder: where.
        strategy: class of the residual strategy.
        spec: shape.
        seed: of everything.
        loss: the last validation loss.
        steps: how far it came.
        planned: how far it was to come; None for a budget that says so.
        validated: whether it has validation losses.
        diagnostics: which answers it has; all if None.
        options: of the strategy.
        data_seed: of the order of its data, if it is another.
        data: fingerprint of its data.
        settings: further keys of the configuration, with __ for dots.
    """
    spec = spec or shape(4, 32)
    rng = np.random.default_rng([seed, spec.n_layer, len(strategy)])
    folder.mkdir(parents=True, exist_ok=True)
    seeds = dict.fromkeys(SEEDS, seed) | {"data.seed": seed if data_seed is None else data_seed}
    keys = {"trainer.max_steps": planned or -1, "data.path": "builtin:pydoc", "model.optimizer.lr": None,
            "data.block_size": 64, **{key.replace("__", "."): value for key, value in settings.items()},
            **seeds}  # fmt: skip
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        place = tree
        for part in key.split(".")[:-1]:
            place = place.setdefault(part, {})
        place[key.split(".")[-1]] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    model = {"shape": asdict(spec), "residual": {"class_path": f"depthlit.residuals.x.{strategy}",
                                                 "init_args": dict(options or {})}}  # fmt: skip
    (folder / "env.json").write_text(json.dumps({"seeds": seeds, "data": data, "model": model, "ranks": 1}))
    found = answers(strategy, spec, seed)
    logged: dict[str, float] = {}
    for name in found if diagnostics is None else diagnostics:
        if name in found:
            numbers, values = found[name]
            about = {"strategy": strategy, "shape": asdict(spec)}
            answer = Answer(name, f"callbacks.{name}", "what", {}, about, steps, {"unit": "window"}, numbers, values)
            answer.save(folder / "analysis" / f"step_{steps:07d}")
            logged |= {METRIC.get(name, f"depth/{name}/{{}}".format)(key): value for key, value in numbers.items()}
    rate = settings.get("model__optimizer__lr") or 1e-3
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "train/loss": loss + 1 / step + 0.01 * rng.random(), "optim/lr": rate * min(1, step / 4),
               "optim/grad_norm": 1.0, "throughput/tokens_per_sec": 1000.0}  # fmt: skip
        if validated and step % 10 == 0:
            row["val/loss"] = loss + (1 / step if step < steps else 0)
        rows.append(row | (logged if step == steps else {}))
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)
    return folder


def sweep(folder: Path, cells: Sequence[tuple[Mapping[str, str], Mapping[str, Any]]], name: str = "") -> Path:
    """Write the folder of a sweep.

    Args:
        folder: where; its name is the study's if none is given.
        cells: labels, and arguments of `run`.
        name: of the study.
    """
    listed = []
    for labels, arguments in cells:
        spec, seed = arguments.get("spec") or shape(4, 32), arguments.get("seed", 0)
        run_name = "_".join([*labels.values(), f"s{seed}"]).lower().replace(" ", "-")
        run(folder / run_name, **arguments)
        (folder / run_name / "sweep.json").write_text(json.dumps({"finished": True, "attempts": [], "error": ""}))
        told = {"steps": arguments.get("planned", STEPS), "tokens": 1, "flops": 1.0 * spec.forward_flops(64),
                "parameters": spec.parameters() + 10 * spec.n_layer, "settings": {}, "command": []}  # fmt: skip
        listed.append({"run": run_name, "labels": dict(labels), "seed": seed, **told})
    study = {"study": name or folder.name, "title": "", "file": "", "axes": {}, "depthlit": "0.1.0", "written": "",
             "cells": listed}  # fmt: skip
    (folder / "study.json").write_text(json.dumps(study))
    return folder


SAME_TOTAL = [shape(4, 64), shape(8, 46)]
DESIGNS = ("PreLN", "HC", "BlockAttnRes")


def aspect(folder: Path, seeds: Sequence[int] = (0, 1, 2), designs: Sequence[str] = DESIGNS, **rest: Any) -> Path:
    """A study of designs over shapes of equal size."""
    rng = np.random.default_rng(5)
    return sweep(folder, [
        ({"design": design, "shape": f"L{spec.n_layer}"},
         {"strategy": design, "spec": spec, "seed": seed, "loss": 2 + 0.1 * rng.random(), **rest})
        for design in designs for spec in SAME_TOTAL for seed in seeds
    ])  # fmt: skip


def everything(folder: Path) -> list[Path]:
    """Sweeps that together fill every figure and table."""
    rates = (1e-3, 2e-3, 4e-3)
    return [
        aspect(folder / "aspect", seeds=(0, 1)),
        sweep(folder / "backbone", [
            ({"design": d, "shape": str(L)}, {"strategy": d, "spec": shape(L, width, d_ff=ff), "seed": s,
                                              "diagnostics": ()})
            for d in ("PreLN", "HC") for L, width, ff in ((4, 64, 176), (16, 32, 88)) for s in (0,)
        ]),
        sweep(folder / "scale", [
            ({"design": d, "shape": f"{L}-{width}"}, {"strategy": d, "spec": shape(L, width), "diagnostics": ()})
            for d in ("PreLN", "HC") for L, width in ((4, 32), (8, 32), (6, 48), (12, 48), (8, 64), (16, 64))
        ]),
        sweep(folder / "grouped", [
            ({"design": d, "shape": str(L)},
             {"strategy": d, "spec": ShapeSpec(L, width, n_head=2, n_kv_head=1, vocab_size=64), "diagnostics": ()})
            for d in ("PreLN", "HC") for L, width in ((4, 64), (8, 48))
        ]),
        sweep(folder / "rates", [
            ({"design": d, "rate": str(lr)},
             {"strategy": d, "spec": shape(8, 32), "seed": s, "loss": 2 + 100 * lr + s / 100,
              "model__optimizer__lr": lr, "diagnostics": ("AngularDistance",)})
            for d in ("PreLN", "LNS") for lr in rates for s in (0, 1)
        ]),
        sweep(folder / "norms", [
            ({"design": f"moda-{norm}"}, {"strategy": "MoDA", "options": {"norm": norm}, "seed": s, "diagnostics": ()})
            for norm in ("pre", "post") for s in (0, 1)
        ]),
        sweep(folder / "depths", [
            ({"mechanism": d, "depth": str(L), "corpus": corpus},
             {"strategy": d, "spec": shape(L, 32), "seed": s, "loss": 2 + s / 50 + (d == "WAV") / L,
              "data__path": corpus, "diagnostics": ()})
            for d in ("PreLN", "BlockAttnRes", "WAV") for L in (12, 48)
            for corpus in ("text8", "tinystories-char") for s in (0, 1, 2)
        ]),
    ]  # fmt: skip


TEN = ("PreLN", "SandwichLN", "LNS", "DeepNorm", "KEEL", "HC", "MHC", "FullAttnRes", "BlockAttnRes", "MoDA")


def many(folder: Path) -> Path:
    """Two hundred runs: ten designs at the paper's depths, five seeds, all diagnostics, four hundred steps."""
    rng = np.random.default_rng(5)
    return sweep(folder, [
        ({"design": design, "shape": f"L{L}"},
         {"strategy": design, "spec": shape(L, width), "seed": seed, "loss": 2 + 0.1 * rng.random(), "steps": 400,
          "planned": 400})
        for design in TEN for L, width in ((16, 64), (20, 58), (24, 52), (32, 46)) for seed in range(5)
    ])  # fmt: skip


Report = tuple[Path, Found, dict[str, Made]]


def made_of(folders: list[Path], output: Path, **options: object) -> Report:
    """Write a report; its folder, what was found, and entries by name."""
    found, made = write(folders, output, Options(**options))  # type: ignore[arg-type]
    return output, found, {one.entry.name: one for one in made}
