"""Documents out of files: the same ones however a file is cut, compressed or named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import prepared, write_jsonl

from depthlit.data.prepare import Preparation, prepare
from depthlit.data.sources import Piece, Reading, cut, list_files, read, row_of
from depthlit.data.tokenizers import Bytes, Chars, Subwords, load_tokenizer, open_tokenizer

ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


def texts_of(pieces: list[Piece], how: Reading) -> list[str]:
    return [document.text for piece in pieces for document in read(piece, how)]


# Cutting


@given(st.lists(ANY_TEXT, min_size=1, max_size=20), st.integers(1, 60))
@settings(max_examples=60, deadline=None)
def test_json_lines_are_the_same_however_they_are_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], target: int
) -> None:
    path = write_jsonl(tmp_path_factory.mktemp("cut") / "a.jsonl", texts)
    pieces = cut([str(path)], Reading(), target)
    assert texts_of(pieces, Reading()) == texts
    places = [(piece, document) for piece in pieces for document in read(piece, Reading())]
    assert [row_of(piece, document.place) for piece, document in places] == list(range(len(texts)))


@given(st.lists(st.text("ab<|>\n", max_size=9), max_size=12), st.integers(1, 40), st.sampled_from(["<|>", "\n\n", "|"]))
@settings(max_examples=100, deadline=None)
def test_separated_text_is_the_same_however_it_is_cut(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], target: int, separator: str
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_text(separator.join(texts))
    how = Reading(separator=separator)
    expected = [t for part in separator.join(texts).split(separator) if (t := part.strip("\r\n"))]
    assert texts_of(cut([str(path)], how, target), how) == expected


@pytest.mark.parametrize("rows", [1, 16, 100])
def test_parquet_is_the_same_however_it_is_cut(tmp_path: Path, rows: int) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [f"document {i}" for i in range(100)]
    pq.write_table(pa.table({"id": texts, "text": texts}), tmp_path / "a.parquet", row_group_size=rows)
    for target in (50, 500, 10**6):
        assert texts_of(cut([str(tmp_path / "a.parquet")], Reading(), target), Reading()) == texts


def test_compressed_files_are_read(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    texts = [f"document {i}" for i in range(50)]
    plain = write_jsonl(tmp_path / "a.jsonl", texts).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(plain[:300]) + gzip.compress(plain[300:]))
    frames = [zstandard.ZstdCompressor().compress(part) for part in (plain[:300], plain[300:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    for name in ("a.jsonl.gz", "a.jsonl.zst"):
        assert texts_of(cut([str(tmp_path / name)], Reading()), Reading()) == texts


def test_folders_and_globs_are_listed_in_order(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "notes.doc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, [name])
    everything = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl", "deep/c.jsonl")]
    assert list_files([str(tmp_path)]) == everything
    assert list_files([str(tmp_path / "*.jsonl")]) == everything[:2]
    with pytest.raises(ValueError, match="no file matches"):
        list_files([str(tmp_path / "*.parquet")])


# Tokenizers


@given(ANY_TEXT)
@settings(max_examples=100, deadline=None)
def test_chars_and_bytes_decode_what_they_encode(text: str) -> None:
    for tokenizer in (Chars(text + "x"), Chars(text + "x", "none"), Bytes(), Bytes("none")):
        ids = tokenizer.encode([text])[0]
        assert tokenizer.decode(ids) == text and (ids < tokenizer.vocab_size).all()
        again = load_tokenizer(tokenizer.content(), tokenizer.eos_id)
        assert again.fingerprint == tokenizer.fingerprint and (again.encode([text])[0] == ids).all()


def test_27_symbols_stay_27() -> None:
    assert Chars("abcdefghijklmnopqrstuvwxyz ", "none").vocab_size == 27
    with pytest.raises(ValueError, match="character 'é' is not in the alphabet"):
        Chars("acf").encode(["caf\u00e9"])


@pytest.fixture(scope="module")
def subwords(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BPE with an EOS that its own post-processor appends."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    model.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    path = tmp_path_factory.mktemp("subwords") / "tokenizer.json"
    model.save(str(path))
    return path


def test_subwords_have_one_eos_per_document_and_none_inside(subwords: Path, tmp_path: Path) -> None:
    texts = ["the cat <|endoftext|> sat", "on the mat", "<|endoftext|>"]
    root = prepared(tmp_path, texts, tokenizer=str(subwords))
    manifest = json.loads((root / "manifest.json").read_text())
    assert (manifest["eos_id"], manifest["eos_added"], manifest["documents"]) == (0, 3, 3)
    data = np.fromfile(root / "train" / "chunk-0-0.bin", np.uint16)[-manifest["tokens"] :]
    assert (data == 0).sum() == 3
    tokenizer = load_tokenizer((root / "tokenizer.json").read_text(), 0)
    assert [tokenizer.decode(part) for part in np.split(data, np.flatnonzero(data == 0) + 1)[:-1]] == texts


def test_an_eos_of_the_tokenizers_own_is_not_doubled(subwords: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer.from_file(str(subwords))
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    model.save(str(tmp_path / "ending.json"))
    plain = prepared(tmp_path / "a", ["the cat", "sat"], tokenizer=str(subwords))
    ending = prepared(tmp_path / "b", ["the cat", "sat"], tokenizer=str(tmp_path / "ending.json"))
    a, b = (json.loads((p / "manifest.json").read_text()) for p in (plain, ending))
    assert (a["tokens"], a["eos_added"]) == (b["tokens"], 2) and b["eos_added"] == 0
    assert a["splits"]["train"]["fingerprint"] == b["splits"]["train"]["fingerprint"]


def test_another_eos_id_widens_the_vocabulary(subwords: Path) -> None:
    tokenizer = open_tokenizer(str(subwords), eos=400)
    assert tokenizer is not None and (tokenizer.eos_id, tokenizer.vocab_size) == (400, 401)
    assert Subwords(subwords.read_text(), "none").eos_id is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing.json", "no such file"),
        ("no/such-tokenizer", "neither a file, nor chars or bytes"),
        ("broken.json", "not JSON"),
        ("other.json", r"not a tokenizer\.json"),
    ],
)
def test_bad_tokenizers(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "hf_hub_download", offline)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match=message):
        open_tokenizer(name)


# Splits


def test_hash_splits_are_disjoint_and_do_not_depend_on_order(tmp_path: Path) -> None:
    texts = [f"w{i}" for i in range(300)]
    texts += texts[:50]  # duplicates land on one side
    one = prepared(tmp_path / "a", texts, val_fraction=0.3, test_fraction=0.2)
    two = prepared(tmp_path / "b", texts[::-1], val_fraction=0.3, test_fraction=0.2)

    def sets(root: Path) -> dict[str, set[str]]:
        tokenizer = load_tokenizer((root / "tokenizer.json").read_text(), 256)
        found = {}
        for split in ("train", "val", "test"):
            chunks = json.loads((root / split / "index.json").read_text())["chunks"]
            ids = [np.fromfile(root / split / c["filename"], np.uint16)[-c["dim"] :] for c in chunks]
            row = np.concatenate(ids)
            found[split] = {tokenizer.decode(part) for part in np.split(row, np.flatnonzero(row == 256) + 1)[:-1]}
        return found

    a, b = sets(one), sets(two)
    assert a == b and set().union(*a.values()) == set(texts)
    assert not (a["train"] & a["val"] or a["train"] & a["test"] or a["val"] & a["test"])
    assert 60 < len(a["val"]) < 120 and 35 < len(a["test"]) < 85


def test_splits_by_file_and_by_position(tmp_path: Path) -> None:
    for name in ("train-0", "train-1", "valid-0"):
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {i}" for i in range(5)])
    by_file = Preparation([str(tmp_path)], "bytes", split="file", val_files=["valid"])
    manifest = prepare(by_file, tmp_path / "out" / "a", quiet=True)
    assert [manifest["splits"][s]["documents"] for s in ("train", "val")] == [10, 5]

    (tmp_path / "text8.txt").write_text("abcdefghij" * 1000)
    by_position = Preparation([str(tmp_path / "text8.txt")], "chars", eos="none", split="position", val_fraction=0.05,
                              test_fraction=0.05)  # fmt: skip
    manifest = prepare(by_position, tmp_path / "out" / "b", quiet=True)
    assert {s: c["tokens"] for s, c in manifest["splits"].items()} == {"train": 9000, "val": 500, "test": 500}
    assert manifest["vocab_size"] == 10


def test_one_text_file_holds_out_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("abcdefghij" * 100)
    manifest = prepare(Preparation([str(tmp_path / "book.txt")], "chars", val_fraction=0.1), tmp_path / "out")
    assert {s: c["tokens"] for s, c in manifest["splits"].items()} == {"train": 901, "val": 101}
    assert "its end is held out" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_the_shards_do_not_depend_on_workers(workers: int, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [f"document {i} " * 400 for i in range(300)])
    assert len(cut([str(source)], Reading())) > 3
    settings = Preparation([str(source)], "chars", val_fraction=0.2)
    a = prepare(settings, tmp_path / "a", 0, quiet=True)
    b = prepare(settings, tmp_path / "b", workers, quiet=True)
    assert a["fingerprint"] == b["fingerprint"] and a["splits"] == b["splits"]
