"""Ask a trained model any task of lm-evaluation-harness.

pip install 'depthlit[harness]'
python tools/harness.py RUN/checkpoints/last.ckpt --tasks arc_easy hellaswag --data PREPARED_FOLDER
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

try:
    from lm_eval import simple_evaluate
except ImportError:
    raise SystemExit("harness.py: lm-evaluation-harness is missing; pip install -e '.[harness]'") from None

from depthlit.data.corpus import open_corpus
from depthlit.data.tokenizers import open_tokenizer
from depthlit.module import LanguageModel
from depthlit.tasks.harness import HarnessModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a single-file checkpoint of a run")
    parser.add_argument("--tasks", nargs="+", required=True, help="names of tasks of the harness")
    words = parser.add_mutually_exclusive_group(required=True)
    words.add_argument("--data", help="the prepared folder of the training data, whose tokenizer is used")
    words.add_argument("--tokenizer", help="a tokenizer.json, or the id of one on the Hugging Face hub")
    parser.add_argument("--num_fewshot", type=int, default=0)
    parser.add_argument("--limit", type=int, help="only the first so many documents of each task")
    args = parser.parse_args()
    tokenizer = open_corpus(args.data).tokenizer if args.data else open_tokenizer(args.tokenizer)
    if tokenizer is None:
        parser.error("the tokenizer chars has no alphabet of its own; give the prepared folder with --data")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    module = LanguageModel.load_from_checkpoint(args.checkpoint, map_location=device, weights_only=True)
    found = simple_evaluate(
        HarnessModel(module.decoder, tokenizer), tasks=args.tasks, num_fewshot=args.num_fewshot, limit=args.limit
    )
    print(json.dumps(found["results"] if found else {}, indent=2, default=str))


if __name__ == "__main__":
    main()
