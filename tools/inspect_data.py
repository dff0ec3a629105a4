"""Show what is in a prepared folder: totals, lengths of documents, the first blocks as text, damage.

python tools/inspect_data.py data/book
python tools/inspect_data.py data/book --split val --blocks 5 --block_size 64 --verify
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
from jsonargparse import ArgumentParser

from depthlit.data.corpus import Corpus, open_corpus
from depthlit.data.mirror import is_url

BORDER = "\n~~~~~~~~ end of document ~~~~~~~~\n"


def inspect(path: str, split: str = "train", blocks: int = 2, block_size: int = 256, verify: bool = False) -> None:
    """Print a report.

    Args:
        path: prepared folder, URL of one, or builtin:pydoc.
        split: whose documents and blocks are shown.
        blocks: how many blocks to decode.
        block_size: context T in tokens.
        verify: compare every chunk with the checksum that was written.
    """
    if block_size < 1 or blocks < 0:
        raise ValueError(f"block_size {block_size} must be at least 1, and blocks {blocks} at least 0")
    corpus = open_corpus(path)
    m = corpus.manifest
    eos = "not marked" if m["eos_id"] is None else f"marked by {m['eos_id']}"
    print(f"{path}\n  tokenizer {m['tokenizer']['name']} ({m['tokenizer']['fingerprint']}): {m['vocab_size']:,} ids")
    print(f"  stored as {m['dtype']}; end of document {eos}")
    print(f"  {m['documents_in']:,} documents in, {m['empty_documents']:,} of them empty; {m['documents']:,} out")
    print(
        f"  {m['tokens']:,} tokens, {m['eos_added']:,} of them ends of documents put in; dropped {m['dropped_tokens']}"
    )
    print(f"  unigram entropy {m['unigram_entropy']:.4f} nats/token; hash {corpus.fingerprint}")
    rule = m["settings"]["split"]
    print(f"  held out by {rule}; versions {', '.join(f'{k} {v}' for k, v in m['versions'].items() if v)}")
    print(f"  sources: {len(m['sources'])}, the first {m['sources'][0]['path']}\n")
    heads = ("documents", "tokens", "chunks", f"blocks of {block_size}", "unread tail")
    print(f"  {'split':<6}" + "".join(f"{head:>16}" for head in heads))
    for name, s in m["splits"].items():
        whole = max(0, s["tokens"] - 1) // block_size
        tail = max(0, s["tokens"] - 1 - whole * block_size)
        print(f"  {name:<6}" + "".join(f"{n:>16,}" for n in (s["documents"], s["tokens"], s["chunks"], whole, tail)))
    if split not in m["splits"]:
        raise ValueError(f"{path} has no split {split!r}; it has {', '.join(m['splits'])}")
    if verify:
        if is_url(path):
            raise ValueError("--verify is for local folders; chunks behind a URL are checked when they are fetched")
        for name in m["splits"]:
            corpus.check(name)
        print("\n  every chunk is what was written")
    histogram(m["splits"][split])
    if m["splits"][split]["tokens"]:
        show(corpus, split, blocks, block_size)


def histogram(counts: dict[str, Any]) -> None:
    """Documents by length, in powers of two."""
    lengths = np.trim_zeros(np.array(counts["lengths"]), "b")
    if not lengths.size:
        return
    print("\n  tokens per document")
    for k in range(int(np.flatnonzero(lengths)[0]), len(lengths)):
        low, high = (1 << k) >> 1, (1 << k) - 1
        print(f"  {low:>10,} - {high:>10,} {lengths[k]:>12,} {'#' * round(50 * lengths[k] / lengths.max())}")


def show(corpus: Corpus, split: str, blocks: int, block_size: int) -> None:
    """The first blocks as text, documents apart."""
    shards, tokenizer = corpus.shards(split, block_size), corpus.tokenizer
    for b in range(min(blocks, len(shards))):
        ids = shards[b][:block_size]
        cuts = np.flatnonzero(ids == tokenizer.eos_id) + 1 if tokenizer.eos_id is not None else np.array([], dtype=int)
        print(f"\n==== {split}, block {b}: {len(ids)} tokens, {len(cuts)} ends of documents ====")
        print(BORDER.join(tokenizer.decode(part) for part in np.split(ids, cuts)))


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="inspect_data.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_function_arguments(inspect, skip={"verify"}, as_positional=True)
    parser.add_argument("--verify", action="store_true", help="compare every chunk with the checksum that was written")
    try:
        inspect(**parser.parse_args(argv).as_dict())
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"inspect_data.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
