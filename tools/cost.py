"""What designs cost at which shapes: parameters, FLOPs, cache, saved bytes; measured on request.

python tools/cost.py --list
python tools/cost.py --shape 400m-L24 --residual HC --tokens 4096 --json
python tools/cost.py --shape 400m-L16 400m-L32 --residual PreLN HC "BlockAttnRes(block_size=8)"
python tools/cost.py --shape small-L6 --residual PreLN FullAttnRes --tokens 512 --measure
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import depthlit.residuals as residuals
from depthlit.connection import ResidualStrategy
from depthlit.cost import cost
from depthlit.measure import measure
from depthlit.shape import NAMED, ShapeSpec


def strategy(text: str) -> ResidualStrategy:
    """`HC`, or `HC(streams=2, dynamic=False)`: a strategy's name, settings as Python literals."""
    try:
        call = ast.parse(text if "(" in text else f"{text}()", mode="eval").body
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args
        settings = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    except (SyntaxError, ValueError, AssertionError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a strategy such as HC or 'HC(streams=2)'") from None
    if call.func.id not in residuals.__all__:
        known = ", ".join(sorted(residuals.__all__))
        raise argparse.ArgumentTypeError(f"no strategy is named {call.func.id!r}; known: {known}")
    try:
        return getattr(residuals, call.func.id)(**settings)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def shape(name: str) -> ShapeSpec:
    try:
        return ShapeSpec.named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no positive number")
    return int(text)


def table(rows: list[list[str]]) -> str:
    """Aligned columns, the first to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [str.ljust, str.ljust, *[str.rjust] * (len(widths) - 2)]
    return "\n".join("  ".join(side(*cell) for side, *cell in zip(sides, row, widths, strict=True)) for row in rows)


def list_shapes() -> str:
    rows = [["shape", "heads", "L", "d", "d/L", "d_ff", "backbone M", "total M"]]
    for name, spec in NAMED.items():
        heads = f"{spec.n_head}" if spec.kv_heads == spec.n_head else f"{spec.n_head}/{spec.kv_heads}"
        sizes = f"{spec.aspect:.2f}", f"{spec.d_ff}", f"{spec.backbone() / 1e6:.2f}", f"{spec.parameters() / 1e6:.2f}"
        rows.append([name, heads, str(spec.n_layer), str(spec.d_model), *sizes])
    return table(rows)


def compare(results: list[dict[str, Any]]) -> str:
    rows = [["shape", "residual", "params M", "extra M", "TFLOP last", "TFLOP all", "routing", "KV MiB", "saved GiB"]]
    measured = "measured" in results[0]
    if measured:
        rows[0] += ["prefill ms", "prefill tok/s", "train tok/s", "peak GiB", "h / 1B tok", "MFU"]
    for result in results:
        parts, flops = result["parameters"], result["flops"]
        rows.append(
            [result["shape"], result["residual"], f"{parts['total'] / 1e6:.2f}", f"{parts['residual'] / 1e6:.3f}"]
            + [f"{flops[key] / 1e12:.4f}" for key in ("prefill_last", "prefill_all", "residual")]
            + [f"{result['kv_bytes'] / 2**20:.0f}", f"{result['saved_bytes'] / 2**30:.3f}"]
        )
        if measured:
            seen = result["measured"]
            rows[-1] += [
                f"{seen['prefill_seconds'] * 1e3:.1f}",
                f"{seen['prefill_tokens_per_second']:.0f}",
                f"{seen['training_tokens_per_second']:.0f}",
                f"{seen['peak_bytes'] / 2**30:.3f}",
                f"{seen['hours_per_1b_prefill_tokens']:.2f}",
                "-" if seen["mfu"] is None else f"{seen['mfu']:.3f}",
            ]
    return table(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", type=shape, default=[ShapeSpec.named("400m-L24")], help="named shapes")
    baseline = [strategy(residuals.BASELINE)]
    parser.add_argument("--residual", nargs="+", type=strategy, default=baseline, help="strategies")
    parser.add_argument("--tokens", type=positive, default=4096, help="sequence length T")
    parser.add_argument("--batch", type=positive, default=1, help="sequences per batch, for saved bytes and measuring")
    parser.add_argument("--counting", choices=["paper", "exact"], default="exact", help="how routing is counted")
    parser.add_argument("--measure", action="store_true", help="also run the model here: latency, tokens/s, memory")
    parser.add_argument("--json", action="store_true", help="print JSON: one object, or a list of several")
    parser.add_argument("--list", action="store_true", help="print every named shape")
    args = parser.parse_args()
    if args.list:
        print(list_shapes())
        return
    names = {spec: name for name, spec in reversed(NAMED.items())}
    results = []
    for spec in args.shape:
        for residual in args.residual:
            result = {"shape": names[spec], "residual": str(residual)}
            result |= cost(spec, residual, args.tokens, args.batch, args.counting)
            if args.measure:
                print(f"measuring {names[spec]} {residual}", file=sys.stderr)
                result["measured"] = measure(spec, residual, args.tokens, args.batch)
            results.append(result)
    if args.json:
        print(json.dumps(results[0] if len(results) == 1 else results, indent=2))
    else:
        print(compare(results))


if __name__ == "__main__":
    main()
