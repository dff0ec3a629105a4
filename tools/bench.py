"""Step time and saved bytes of designs over the baseline's, interleaved in one process.

python tools/bench.py --shape 24x512 --tokens 512                     every design, 8 heads, vocabulary 256
python tools/bench.py --shape 24x512 --residual PreLN HC --compiled   eager and compiled
python tools/bench.py --shape 24x256 --tokens 256 --vocab 64 --json
python tools/bench.py --overhead                                      Hugging Face's Llama, and Lightning's part
python tools/bench.py --pruning --residual PreLN HC                   all single-layer prunings, over a plain loop
python tools/bench.py --growth growth.png --shape 24x256              saved bytes from 24 to 96 layers, as a figure
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from cost import strategy, table
from lightning import LightningDataModule
from lightning.pytorch import Callback
from peers import installed, whole_models

from callbacks.layer_pruning import prunings
from depthlit import bench, plots, residuals
from depthlit.answer import replacing
from depthlit.cost import saved_bytes
from depthlit.decoder import Decoder, Order
from depthlit.interventions import abreast as side_by_side
from depthlit.interventions import prefixes, rerouted
from depthlit.module import LanguageModel
from depthlit.shape import NAMED, ShapeSpec
from depthlit.trainer import Trainer


def shape_of(text: str, heads: int, vocab: int) -> ShapeSpec:
    if text in NAMED:
        return ShapeSpec.named(text, vocab_size=vocab)
    try:
        n_layer, d_model = map(int, text.split("x"))
        return ShapeSpec(n_layer, d_model, n_head=heads, vocab_size=vocab)
    except ValueError as error:
        raise SystemExit(f"error: --shape {text}: give a named shape, or layers x width as 24x512 ({error})") from None


def show(rows: list[dict[str, Any]]) -> str:
    head = ["design", "step", "quartiles", "floor", "moved", "saved", "compiled", "compile s"]
    lines = [head]
    for row in rows:
        compiled = [f"{row['compiled']:.3f}", f"{row['compile_seconds']:.0f}"] if "compiled" in row else ["-", "-"]
        quartiles = f"{row['low']:.3f}-{row['high']:.3f}"
        ratios = [f"{row[key]:.3f}" for key in ("floor", "moved", "saved")]
        lines.append([row["name"], f"{row['step']:.3f}", quartiles, *ratios, *compiled])
    return table(lines)


def plain(rows: list[dict[str, Any]], *keys: str) -> str:
    return table([["design", *keys], *[[row["name"], *(f"{row[key]:.3f}" for key in keys)] for row in rows]])


def overhead(shape: ShapeSpec, tokens: int, batch: int, rounds: int) -> list[dict[str, Any]]:
    """Time of a step over that of a plain loop: of others' models, and of a run under the trainer."""
    ids = torch.randint(0, shape.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    baseline = getattr(residuals, residuals.BASELINE)()
    steps = {"plain loop": bench.training_step(Decoder(shape, baseline, seed=0), ids)}
    steps |= {name: bench.training_step(model, ids) for name, model in whole_models(shape).items()}
    rows = [{"name": name, "time": t.ratio} for name, t in bench.interleaved(steps, rounds).items()]
    rows.append({"name": "under the trainer", "time": under_trainer(shape, tokens, batch, rounds)})
    return rows


WARM = 3
"""Steps until memory is at hand and the optimizer has its moments."""


class Stopwatch(Callback):
    """When each micro-batch began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_train_batch_start(self, *call: Any) -> None:
        self.began.append(time.perf_counter())


def under_trainer(shape: ShapeSpec, tokens: int, batch: int, rounds: int) -> float:
    """Seconds per step of a run under depthlit's trainer over those of a plain loop, both with the optimizer.

    Medians of the steps behind the first few; of three pairs of such runs the middle one.
    """

    class Fixed(LightningDataModule):
        batch_size, block_size = batch, tokens

        def train_dataloader(self) -> Any:
            ids = torch.randint(0, shape.vocab_size, (64, tokens + 1), generator=torch.Generator().manual_seed(0))
            return torch.utils.data.DataLoader(
                [{"tokens": row[:-1], "targets": row[1:]} for row in ids], batch_size=batch
            )

    baseline = getattr(residuals, residuals.BASELINE)()
    n_step = rounds + WARM

    def trained(folder: Path) -> list[float]:
        watch = Stopwatch()
        trainer = Trainer(
            accelerator="cpu", max_steps=n_step + 1, validate_every=0, default_root_dir=folder, callbacks=[watch],
            enable_progress_bar=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(LanguageModel(shape, baseline), datamodule=Fixed())
        return [end - begin for begin, end in pairwise(watch.began)]

    def looped() -> list[float]:
        decoder = Decoder(shape, baseline, seed=0)
        optimizer = torch.optim.AdamW(decoder.parameters(), fused=True)
        batches = iter(list(Fixed().train_dataloader()) * n_step)
        times = []
        for _ in range(n_step):
            began = time.perf_counter()
            one = next(batches)
            decoder(one["tokens"], one["targets"]).mean().backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        return times

    with tempfile.TemporaryDirectory() as folder:
        pairs = [(trained(Path(folder) / str(repeat)), looped()) for repeat in range(3)]
    return sorted(median(ours[WARM:]) / median(plain[WARM:]) for ours, plain in pairs)[1]


def pruning(
    shape: ShapeSpec, chosen: dict[str, Any], tokens: int, batch: int, rounds: int, abreast: int = 4
) -> list[dict[str, Any]]:
    """Time of judging the intact network and each without one layer, over that of as many forwards in a plain loop."""
    ids = torch.randint(0, shape.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    rows = []
    for name, residual in chosen.items():
        decoder = Decoder(shape, residual, seed=0)
        routes = prunings(decoder.order)

        @torch.no_grad()
        def loop(decoder: Decoder = decoder, routes: list[Order] = routes) -> None:
            for route in routes:
                with rerouted(decoder, route):
                    decoder(ids, ids)

        @torch.no_grad()
        def shared(decoder: Decoder = decoder, routes: list[Order] = routes) -> None:
            with side_by_side(decoder, abreast):
                decoder(ids, ids, routes=routes)

        found = bench.interleaved({"loop": loop, "shared": shared}, rounds)["shared"]
        rows.append({"name": name, "time": found.ratio, "low": found.low, "high": found.high,
                     "blocks": prefixes(*routes) / sum(map(len, routes))})  # fmt: skip
    return rows


def growth(shape: ShapeSpec, chosen: dict[str, Any], tokens: int, batch: int, file: Path) -> list[dict[str, Any]]:
    """Saved bytes from n_layer to four times as many, drawn over those of the baseline at the first depth."""
    ids = torch.randint(0, shape.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(0))
    depths = [shape.n_layer * n for n in (1, 2, 3, 4)]
    saved = {
        name: np.array([float(saved_bytes(Decoder(replace(shape, n_layer=n), residual, seed=0), ids)) for n in depths])
        for name, residual in chosen.items()
    }
    first = saved[residuals.BASELINE][0]
    figure, axes = plots.blank(f"Bytes kept for backward: width {shape.d_model}, {batch} x {tokens} tokens", width=8.0)
    curves = {name: values / first for name, values in saved.items()}
    unit = f"bytes over those of {residuals.BASELINE} at {depths[0]} layers"
    plots.lines(axes, curves, "", "layers", unit, at=np.array(depths))
    with replacing(file) as out:
        out.write(plots.png(figure))
    return [{"name": name, **{str(n): v for n, v in zip(depths, curve, strict=True)}} for name, curve in curves.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="24x512", help="a named shape, or layers x width")
    parser.add_argument("--heads", type=int, default=8, help="query heads of a shape given by numbers")
    parser.add_argument("--vocab", type=int, default=256, help="vocabulary")
    parser.add_argument("--residual", "--residuals", nargs="+", default=["all"], help="strategies, or all")
    parser.add_argument("--tokens", type=int, default=512, help="sequence length T")
    parser.add_argument("--batch", type=int, default=1, help="sequences B")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds behind a median")
    parser.add_argument("--compiled", action="store_true", help="torch.compile, too")
    parser.add_argument("--peers", action="store_true", help="other people's packages, where installed")
    parser.add_argument("--overhead", action="store_true", help="the baseline against Hugging Face and a plain loop")
    parser.add_argument("--pruning", action="store_true", help="single-layer pruning by shared routes, over a loop")
    parser.add_argument("--growth", type=Path, metavar="PNG", help="draw how saved bytes grow with depth")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    shape = shape_of(args.shape, args.heads, args.vocab)
    about = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__, "threads": torch.get_num_threads(), "shape": args.shape, "tokens": args.tokens,
        "batch": args.batch, "rounds": args.rounds,
    }  # fmt: skip
    names = sorted(residuals.__all__) if args.residual == ["all"] else args.residual
    others = [name for name in names if name != residuals.BASELINE]
    try:
        chosen = {name: strategy(name) for name in [residuals.BASELINE, *others]}
    except argparse.ArgumentTypeError as error:
        parser.error(str(error))
    if args.overhead:
        rows = overhead(shape, args.tokens, args.batch, args.rounds)
        text = plain(rows, "time")
    elif args.pruning:
        rows = pruning(shape, chosen, args.tokens, args.batch, args.rounds)
        text = plain(rows, "time", "low", "high", "blocks")
    elif args.growth:
        rows = growth(shape, chosen, args.tokens, args.batch, args.growth)
        text = plain(rows, *[key for key in rows[0] if key != "name"])
    else:
        if args.peers:
            chosen |= installed()
        rows = bench.against_baseline(shape, chosen, args.tokens, args.batch, args.rounds, args.compiled)
        text = show(rows)
    print(json.dumps({**about, "rows": rows}, indent=2) if args.json else f"{about}\n{text}")


if __name__ == "__main__":
    main()
