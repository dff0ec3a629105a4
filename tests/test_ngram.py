"""Cross-entropies of counting, against a naive count with dictionaries."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from depthlit.data.corpus import open_corpus
from depthlit.data.ngram import cross_entropies, of_corpus, tokens_of
from depthlit.data.prepare import Preparation, prepare

V = 4
TEXT = st.lists(st.integers(0, V - 1), min_size=1, max_size=40)


def naive(train: list[int], held_out: list[int], n: int) -> float:
    """Witten and Bell's interpolation as it is written down, token by token."""
    counts = Counter(tuple(train[i : i + k]) for k in range(1, n + 1) for i in range(len(train) - k + 1))

    def p(x: int, history: tuple[int, ...]) -> float:
        following = {y: counts[(*history, y)] for y in range(V) if counts[(*history, y)]}
        lower = p(x, history[1:]) if history else 1 / V
        kinds, total = len(following), sum(following.values())
        return (following.get(x, 0) + kinds * lower) / (total + kinds) if total else lower

    losses = [-math.log(p(x, tuple(held_out[max(0, i - n + 1) : i]))) for i, x in enumerate(held_out)]
    return sum(losses) / len(losses)


@settings(max_examples=60, deadline=None)
@given(train=TEXT, held_out=TEXT)
def test_it_is_the_naive_count(train: list[int], held_out: list[int]) -> None:
    found = cross_entropies(np.array(train), np.array(held_out), V)
    assert found == pytest.approx([naive(train, held_out, n) for n in (1, 2, 3)], rel=1e-12)


def test_the_probabilities_of_all_continuations_sum_to_one() -> None:
    train = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 2, 1])
    for history in ([0, 1], [3, 3], [2, 0]):
        total = 0.0
        for x in range(V):
            with_x, without = (
                cross_entropies(train, np.array(ids), V)[2] * len(ids) for ids in ([*history, x], history)
            )
            total += math.exp(without - with_x)
        assert total == pytest.approx(1, abs=1e-12)


def test_text_of_independent_tokens_gains_nothing_from_context() -> None:
    """The entropy of the source, and no less for longer contexts: held-out text cannot be fooled."""
    rng, p = np.random.default_rng(0), np.array([0.5, 0.25, 0.125, 0.125])
    train, held_out = (rng.choice(V, size=size, p=p) for size in (200_000, 50_000))
    one, two, three = cross_entropies(train, held_out, V)
    assert one == pytest.approx(1.75 * math.log(2), abs=0.01)
    assert one < two + 1e-3 and two < three + 1e-3 and three < one + 0.001


def test_a_text_that_repeats_itself_is_known_from_its_bigrams() -> None:
    ids = np.tile(np.arange(V), 5000)
    one, two, _ = cross_entropies(ids, ids, V)
    assert one == pytest.approx(math.log(V), abs=1e-3) and two < 1e-3


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        cross_entropies(np.array([], dtype=np.int64), np.array([1]), V)
    with pytest.raises(ValueError, match="64 bits"):
        cross_entropies(np.array([1]), np.array([1]), 50_000, order=5)


def test_the_tokens_of_a_corpus_are_read_whole_and_in_order(tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text("".join(f'{{"text": "document {i * 7919} of many"}}\n' for i in range(400)))
    prepare(Preparation([str(tmp_path / "text.jsonl")], "chars", val_fraction=0.2), tmp_path / "out", quiet=True)
    corpus = open_corpus(str(tmp_path / "out"))
    for split in ("train", "val"):
        ids = tokens_of(corpus, split)
        assert len(ids) == corpus.manifest["splits"][split]["tokens"]
        shards = corpus.shards(split, 7)
        assert ids.tolist() == [int(shards[0][0]), *(int(x) for i in range(len(shards)) for x in shards[i][1:])]
    assert tokens_of(corpus, "train", at_most=100).tolist() == tokens_of(corpus, "train")[:100].tolist()
    assert of_corpus(str(tmp_path / "out")) == cross_entropies(
        tokens_of(corpus, "train"), tokens_of(corpus, "val"), corpus.vocab_size
    )
