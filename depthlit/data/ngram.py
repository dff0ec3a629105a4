"""What counting alone reaches on a corpus: the held-out cross-entropy of unigrams, bigrams and trigrams.

A trained network should lie well below; one that does not has learnt no more than which tokens follow each other.

    p_n(x | h) = (c(h x) + d(h) p_(n-1)(x | h')) / (c(h) + d(h)),   p_0 = 1 / V

c counts in the training split, d(h) is how many different tokens follow h there, h' is h without its first token: the
interpolation of Witten and Bell (The zero-frequency problem, IEEE Trans. Inf. Theory 37, 1991), in the form of Chen and
Goodman (An empirical study of smoothing techniques for language modeling, 1998, Sec. 2.6). It has no setting to tune.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from depthlit.data.corpus import Corpus, open_corpus

Ids = NDArray[np.int64]
BLOCK = 1 << 16


def cross_entropies(train: Ids, held_out: Ids, vocab_size: int, order: int = 3) -> list[float]:
    """Nats per token of held-out text under models of order 1 to `order`, each counted on the training text.

    Both texts are read as one run of tokens. The first tokens of the held-out text, which have less before them, are
    judged by a lower order.

    Args:
        train: (N,) token ids.
        held_out: (M,) token ids.
        vocab_size: V.
        order: of the longest model.

    Raises:
        ValueError: a text is empty, or V^order does not fit into 64 bits.
    """
    if not len(train) or not len(held_out):
        raise ValueError("an n-gram model needs at least one token to count and one to judge")
    if vocab_size**order >= 2**63:
        raise ValueError(f"{order}-grams of {vocab_size} tokens are more than 64 bits can tell apart")
    p = np.full(len(held_out), 1 / vocab_size)
    found: list[float] = []
    for n in range(1, order + 1):
        if len(train) < n:  # nothing of this length was seen
            found.append(found[-1])
            continue
        seen, count = np.unique(_grams(train, n, vocab_size), return_counts=True)
        history, begin = np.unique(seen // vocab_size, return_index=True)
        total, kinds = np.add.reduceat(count, begin), np.diff(begin, append=len(seen))
        wanted = _grams(held_out, n, vocab_size)
        of_gram = _looked_up(seen, count, wanted)
        of_history, of_kinds = (_looked_up(history, table, wanted // vocab_size) for table in (total, kinds))
        lower = p[n - 1 :]
        known = of_history > 0
        lower[known] = (of_gram + of_kinds * lower)[known] / (of_history + of_kinds)[known]
        found.append(float(-np.log(p).mean()))
    return found


def _grams(ids: Ids, n: int, vocab_size: int) -> Ids:
    """(N - n + 1,): every run of n tokens as one number, the last token its lowest digit."""
    number = np.zeros(max(0, len(ids) - n + 1), dtype=np.int64)
    for i in range(n):
        number = number * vocab_size + ids[i : len(ids) - n + 1 + i]
    return number


def _looked_up(keys: Ids, values: NDArray[np.integer], wanted: Ids) -> NDArray[np.float64]:
    """Values of the wanted among sorted keys, 0 where there is none."""
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], 0).astype(np.float64)


def tokens_of(corpus: Corpus, split: str, at_most: int | None = None) -> Ids:
    """(N,) token ids of a split from its beginning, in order."""
    return np.concatenate([np.zeros(0, np.int64), *_pieces(corpus, split, at_most)])


def _pieces(corpus: Corpus, split: str, at_most: int | None) -> Iterator[Ids]:
    shards = corpus.shards(split, BLOCK)
    left = corpus.manifest["splits"][split]["tokens"] if at_most is None else at_most
    for i in range(len(shards)):
        piece = shards[i].astype(np.int64)[1 if i else 0 :]  # neighbouring blocks share a token
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def of_corpus(path: str, order: int = 3, at_most: int = 20_000_000) -> list[float]:
    """Nats per token of a prepared corpus' validation split under models of order 1 to `order`.

    Args:
        path: a prepared folder, or `builtin:pydoc`.
        order: of the longest model.
        at_most: tokens of the training split to count, from its beginning.

    Raises:
        ValueError: nothing was held out.
    """
    corpus = open_corpus(path)
    if not corpus.has("val"):
        raise ValueError(f"{path} has no validation split")
    return cross_entropies(tokens_of(corpus, "train", at_most), tokens_of(corpus, "val"), corpus.vocab_size, order)
