"""Prepared folders that are written anew: what was there stays until the new content is whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from test_data import prepared, write_jsonl

from depthlit.data import TokenData
from depthlit.data import prepare as preparation
from depthlit.data.corpus import open_corpus
from depthlit.data.prepare import Preparation, prepare

TEXTS = [f"document {i}" for i in range(40)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return prepared(tmp_path, [f"older document {i} " * 9 for i in range(60)], val_fraction=0.2)


def test_a_failed_overwriting_leaves_what_was_there(corpus: Path, tmp_path: Path) -> None:
    """Until the new content is whole the old one can be read; then the new one is all there is, and a note stays."""
    old, source = open_corpus(str(corpus)).fingerprint, tmp_path / "a.jsonl"
    source.write_text('{"text": "fine"}\n{')
    (corpus / "note.txt").write_text("mine")
    settings = Preparation([str(source)], "chars", val_fraction=0)
    for _ in range(2):
        with pytest.raises(ValueError, match="row 1: not JSON"):
            prepare(settings, corpus, overwrite=True, quiet=True)
        TokenData(str(corpus), block_size=16).setup("fit")
        assert open_corpus(str(corpus)).fingerprint == old
    write_jsonl(source, TEXTS)
    manifest = prepare(settings, corpus, overwrite=True, quiet=True)
    assert prepare(settings, tmp_path / "fresh", quiet=True)["fingerprint"] == manifest["fingerprint"] != old
    TokenData(str(corpus), block_size=16).setup("fit")
    assert {p.name for p in corpus.iterdir()} == {"manifest.json", "tokenizer.json", "train", "note.txt"}


@pytest.mark.parametrize("calls", range(4))
def test_a_swap_that_was_killed_is_finished(calls: int, corpus: Path, tmp_path: Path) -> None:
    """Killed at each of its renames: the folder is refused, and the next run needs no source to make it whole."""
    settings = Preparation([str(write_jsonl(tmp_path / "b.jsonl", TEXTS))], "bytes", val_fraction=0.2)
    moved = 0

    def limited(move: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
        def once(source: Path, target: Path) -> Path:
            nonlocal moved
            if source.parent.name == preparation.NEW and not source.name.endswith(".partial"):
                if moved == calls:
                    raise KeyboardInterrupt
                moved += 1
            return move(source, target)

        return once

    with pytest.MonkeyPatch.context() as patched:
        for name in ("rename", "replace"):
            patched.setattr(Path, name, limited(getattr(Path, name)))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings, corpus, overwrite=True, quiet=True)
    with pytest.raises(ValueError, match="never finished"):
        open_corpus(str(corpus))
    manifest = prepare(settings, corpus, quiet=True)
    assert manifest["documents"] == len(TEXTS)
    assert {p.name for p in corpus.iterdir()} == {"manifest.json", "tokenizer.json", "train", "val"}
    TokenData(str(corpus), block_size=4).setup("fit")


def test_an_edited_source_is_noticed(tmp_path: Path) -> None:
    """Also one of the same size; the fingerprint tells of the tokens alone."""
    path = write_jsonl(tmp_path / "a.jsonl", ["one two", "three"])
    settings = Preparation([str(path)], "bytes", val_fraction=0)
    first = prepare(settings, tmp_path / "out", quiet=True)
    assert prepare(settings, tmp_path / "out", quiet=True) == first
    write_jsonl(path, ["one 222", "three"])
    os.utime(path, ns=(0, 10**18))
    with pytest.raises(
        ValueError, match=r"a\.jsonl has changed since .*/out was prepared; --overwrite prepares it anew"
    ):
        prepare(settings, tmp_path / "out", quiet=True)
    second = prepare(settings, tmp_path / "out", overwrite=True, quiet=True)
    assert second["fingerprint"] != first["fingerprint"]
    os.utime(path, ns=(0, 2 * 10**18))
    third = prepare(settings, tmp_path / "out", overwrite=True, quiet=True)
    assert third["fingerprint"] == second["fingerprint"] and third["identity"] == first["identity"]
