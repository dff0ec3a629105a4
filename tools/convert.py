"""Checkpoints from one form into another.

python tools/convert.py consolidate RUN/checkpoints/last.ckpt --output whole.ckpt    sharded -> one file to go on with
python tools/convert.py import HF_FOLDER --output llama.ckpt                         public Llama-type model -> ours
python tools/convert.py export whole.ckpt --output DIR --to huggingface              Pre-LN -> transformers
python tools/convert.py export whole.ckpt --output DIR                               any design -> safetensors + config
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from depthlit import convert


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    for name, what in (
        ("consolidate", "make one file of a sharded checkpoint (FSDP, FSDP2, DeepSpeed)"),
        ("import", "read a Llama-type model as Hugging Face keeps it"),
        ("export", "write safetensors and config"),
    ):
        action = actions.add_parser(name, help=what)
        action.add_argument("input", type=Path)
        action.add_argument("--output", type=Path, required=True)
        if name == "export":
            action.add_argument("--to", choices=["safetensors", "huggingface"], default="safetensors")
    args = parser.parse_args()
    try:
        if args.action == "consolidate":
            convert.consolidate(args.input, args.output)
        elif args.action == "import":
            shape = convert.import_llama(args.input, args.output)
            print(f"{shape.parameters():,} parameters, {shape}")
        else:
            convert.export(args.input, args.output, args.to)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
