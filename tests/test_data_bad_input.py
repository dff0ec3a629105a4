"""Bad input is named in one line with file and row, and nothing half-written passes for whole."""

from __future__ import annotations

import errno
import gzip
import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data import prepared, take, write_jsonl

from depthlit.data import TokenData, writing
from depthlit.data import prepare as preparation
from depthlit.data.corpus import open_corpus
from depthlit.data.prepare import Preparation, prepare
from depthlit.data.sources import cut, list_files

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
MANIFEST, INDEX = "manifest.json", "train/index.json"
TEXTS = [f"document {i}" for i in range(40)]


def parquet(path: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=16)
    return path


def truncated_parquet(folder: Path) -> Path:
    path = parquet(folder / "a.parquet", text=TEXTS)
    path.write_bytes(path.read_bytes()[:-40])
    return path


def damaged_pages(folder: Path) -> Path:
    path = parquet(folder / "a.parquet", text=["x" * 500 + t for t in TEXTS])
    content = bytearray(path.read_bytes())
    content[8:400] = bytes(392)
    path.write_bytes(content)
    return path


def parquet_with_bad_utf8(folder: Path) -> Path:
    texts = [t.encode() for t in TEXTS]
    texts[21] = b"caf\xe9"
    pq.write_table(pa.table({"text": pa.array(texts, pa.binary()).view(pa.string())}), folder / "a.parquet")
    return folder / "a.parquet"


def lines(folder: Path, row: int, line: bytes) -> Path:
    path = write_jsonl(folder / "a.jsonl", TEXTS)
    rows = path.read_bytes().splitlines()
    rows[row] = line
    path.write_bytes(b"\n".join(rows) + b"\n")
    return path


def text_with_bad_utf8(folder: Path) -> Path:
    (folder / "a.txt").write_bytes(b"one\ntwo\nthr\xffee\n")
    return folder / "a.txt"


def truncated_gzip(folder: Path) -> Path:
    content = gzip.compress(write_jsonl(folder / "a", [str(i) * 99 for i in range(999)]).read_bytes(), mtime=0)
    (folder / "a.jsonl.gz").write_bytes(content[: len(content) // 2])
    return folder / "a.jsonl.gz"


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated parquet": (truncated_parquet, r"a\.parquet: not a whole Parquet file, perhaps a truncated download"),
    "damaged parquet": (damaged_pages, r"a\.parquet, row 0: damaged Parquet data"),
    "missing column": (
        lambda f: parquet(f / "a.parquet", body=TEXTS, id=TEXTS),
        r"a\.parquet: no column 'text'; it has body, id",
    ),
    "column of numbers": (
        lambda f: parquet(f / "a.parquet", text=[1, 2]),
        r"a\.parquet: column 'text' holds int64, not strings",
    ),
    "parquet not utf-8": (parquet_with_bad_utf8, r"a\.parquet, row 21: invalid UTF-8"),
    "text not utf-8": (text_with_bad_utf8, r"a\.txt, row 2: invalid UTF-8 .* at byte 11"),
    "line not utf-8": (lambda f: lines(f, 30, b'{"text": "caf\xe9"}'), r"a\.jsonl, row 30: invalid UTF-8"),
    "line not json": (lambda f: lines(f, 31, b'{"text": "caf'), r"a\.jsonl, row 31: not JSON"),
    "line without key": (lambda f: lines(f, 7, b'{"body": "x"}'), r"a\.jsonl, row 7: no key 'text'; it has body"),
    "line of a number": (lambda f: lines(f, 7, b'{"text": 3}'), r"a\.jsonl, row 7: 'text' holds int, not a string"),
    "lone surrogate": (lambda f: lines(f, 7, b'{"text": "\\ud800"}'), r"a\.jsonl, row 7: .*surrogate"),
    "truncated gzip": (truncated_gzip, r"a\.jsonl\.gz, row \d+: damaged or truncated file"),
    "nothing but empty documents": (lambda f: write_jsonl(f / "a.jsonl", ["", ""]), r"a\.jsonl: no document with text"),
    "unknown kind": (lambda f: shutil.copy(write_jsonl(f / "a", ["x"]), f / "a.csv"), r"a\.csv: unknown kind of file"),
    "empty folder": (lambda f: f, "no .parquet, .* file in this folder"),
    "no such file": (lambda f: f / "nothing.txt", "no such file or folder"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_sources(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, message = BAD[name]
    source = make(tmp_path)
    monkeypatch.setattr(
        preparation, "cut", lambda files, how: cut(files, how, target=300)
    )  # several pieces, so that rows matter
    with pytest.raises(ValueError, match=message) as caught:
        prepare(Preparation([str(source)], "bytes"), tmp_path / "out", quiet=True)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out" / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"never finished|no such folder"):
        TokenData(str(tmp_path / "out"))


def test_a_source_that_was_mended_is_prepared_anew(tmp_path: Path) -> None:
    path = lines(tmp_path, 30, b'{"text": 3}')
    with pytest.raises(ValueError, match="row 30"):
        prepare(Preparation([str(path)], "bytes"), tmp_path / "out", quiet=True)
    write_jsonl(path, TEXTS)
    assert prepare(Preparation([str(path)], "bytes"), tmp_path / "out", quiet=True)["documents"] == len(TEXTS)


def test_a_worker_reports_like_the_main_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a\.jsonl, row 30: not JSON"):
        prepare(Preparation([str(lines(tmp_path, 30, b"{"))], "bytes"), tmp_path / "out", 2, quiet=True)


def test_empty_documents_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", ["a", "", "b", "c", ""])
    manifest = prepare(Preparation([str(source)], "bytes", val_fraction=0), tmp_path / "out")
    assert (manifest["documents_in"], manifest["documents"], manifest["empty_documents"]) == (5, 3, 2)
    assert re.search(r"left out 2 empty documents, the first at .*a\.jsonl, row 1", capsys.readouterr().err)


def test_a_document_of_50_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "CHUNK_BYTES", 8_000_000)
    text = "abcdefghi " * 5_000_000
    (tmp_path / "a.txt").write_text(text)
    manifest = prepare(Preparation([str(tmp_path / "a.txt")], "bytes", val_fraction=0), tmp_path / "out", quiet=True)
    assert (manifest["documents"], manifest["tokens"]) == (1, 50_000_001)
    chunks = json.loads((tmp_path / "out" / "train" / "index.json").read_text())["chunks"]
    assert len(chunks) >= 12 and max(c["chunk_bytes"] for c in chunks) < 17_000_000
    shards = open_corpus(str(tmp_path / "out")).shards("train", 1_000_000)
    assert shards[49][:20].tobytes() == np.frombuffer(b"abcdefghi abcdefghi ", np.uint8).astype(np.uint16).tobytes()


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from litdata.streaming.writer import BinaryWriter

    whole = BinaryWriter.write_chunk_to_file

    def full(self: Any, data: bytes, filename: str, **options: Any) -> None:
        with open(Path(self._cache_dir) / filename, "wb") as file:
            file.write(data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    settings = Preparation([str(write_jsonl(tmp_path / "a.jsonl", TEXTS))], "bytes")
    monkeypatch.setattr(BinaryWriter, "write_chunk_to_file", full)
    with pytest.raises(ValueError, match="the disk is full; make room and run the same command again"):
        prepare(settings, tmp_path / "out", quiet=True)
    with pytest.raises(ValueError, match="never finished"):
        TokenData(str(tmp_path / "out"))
    monkeypatch.setattr(BinaryWriter, "write_chunk_to_file", whole)
    prepare(settings, tmp_path / "out", quiet=True)
    TokenData(str(tmp_path / "out"), block_size=4).setup("fit")


# Prepared folders


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return prepared(tmp_path, [f"document {i} " * 9 for i in range(60)], val_fraction=0.2)


def first_chunk(corpus: Path) -> Path:
    return sorted((corpus / "train").glob("chunk-*.bin"))[0]


def flip_a_byte(corpus: Path) -> None:
    content = bytearray(first_chunk(corpus).read_bytes())
    content[len(content) // 2] ^= 1
    first_chunk(corpus).write_bytes(content)


def cut_short(corpus: Path) -> None:
    first_chunk(corpus).write_bytes(first_chunk(corpus).read_bytes()[:-2])


def change(name: str, changed: Callable[[Any], Any]) -> Callable[[Path], Any]:
    """Rewrites a JSON file of the corpus."""
    return lambda corpus: (corpus / name).write_text(json.dumps(changed(json.loads((corpus / name).read_text()))))


def chunk(**fields: Any) -> Callable[[Path], Any]:
    """Rewrites the first chunk's entry in the index."""
    return change(INDEX, lambda m: m | {"chunks": [m["chunks"][0] | fields, *m["chunks"][1:]]})


SPOILT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing chunk": (lambda c: first_chunk(c).unlink(), r"chunk-0-0\.bin is missing; prepare .* anew"),
    "shortened chunk": (cut_short, r"chunk-0-0\.bin has \d+ bytes, \d+ were written"),
    "changed chunk": (flip_a_byte, r"chunk-0-0\.bin is not what was written \(checksum\)"),
    "missing index": (lambda c: (c / "train" / "index.json").unlink(), r"train/index\.json is missing or damaged"),
    "index of something else": (change(INDEX, lambda m: [m]), r"index\.json is damaged \(not a mapping\)"),
    "no chunks": (change(INDEX, lambda m: {}), r"index\.json is damaged \(chunks is missing\); prepare"),
    "chunks in a mapping": (change(INDEX, lambda m: m | {"chunks": {}}), r"\(chunks is \{\}\)"),
    "index without dim": (chunk(dim=None), r"train/index\.json is damaged \(chunks\.0\.dim is null\); prepare .* anew"),
    "negative chunk": (chunk(chunk_size=-1), r"\(chunks\.0\.chunk_size is -1\)"),
    "fewer tokens": (chunk(dim=3), r"train/index\.json does not agree with manifest\.json"),
    "chunk outside": (chunk(filename="../../x"), r"index\.json names a chunk outside its folder, '\.\./\.\./x'"),
    "no format": (change(INDEX, lambda m: m | {"config": None}), r"does not agree with manifest\.json"),
    "format of a number": (change(INDEX, lambda m: m | {"config": {"data_format": 3}}), "data_format is 3"),
    "index not UTF-8": (lambda c: (c / INDEX).write_bytes(b"\xff"), r"index\.json is damaged \(not JSON\)"),
    "missing manifest": (lambda c: (c / "manifest.json").unlink(), r"never finished: run the same tools/prepare\.py"),
    "damaged manifest": (lambda c: (c / MANIFEST).write_text("{"), r"manifest\.json is damaged \(not JSON\)"),
    "manifest not UTF-8": (lambda c: (c / MANIFEST).write_bytes(b"\xff"), r"manifest\.json is damaged"),
    "manifest of something else": (change(MANIFEST, lambda m: [m]), r"damaged \(not a mapping\); prepare .* anew"),
    "tokens as text": (change(MANIFEST, lambda m: m | {"tokens": "3"}), r"damaged \(tokens is \"3\"\); prepare"),
    "tokens of a bool": (change(MANIFEST, lambda m: m | {"tokens": True}), r"\(tokens is true\)"),
    "eos as text": (change(MANIFEST, lambda m: m | {"eos_id": "x"}), r"\(eos_id is \"x\"\)"),
    "no vocabulary": (change(MANIFEST, lambda m: m.pop("vocab_size") and m), r"\(vocab_size is missing\)"),
    "list of splits": (change(MANIFEST, lambda m: m | {"splits": [1]}), r"\(splits is \[1\]\)"),
    "no train split": (change(MANIFEST, lambda m: m | {"splits": {}}), r"\(splits\.train is missing\)"),
    "split of a number": (change(MANIFEST, lambda m: m | {"splits": m["splits"] | {"val": 3}}), "splits.val is 3"),
    "no entropy": (change(MANIFEST, lambda m: m | {"unigram_entropy": None}), r"\(unigram_entropy is null\)"),
    "tokenizer as text": (change(MANIFEST, lambda m: m | {"tokenizer": "x"}), r"\(tokenizer is \"x\"\)"),
    "another format": (lambda c: (c / "manifest.json").write_text('{"format": 9}'), "has format 9"),
    "no folder": (shutil.rmtree, r"no such folder; make it with tools/prepare\.py"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_spoilt_folders_are_refused_before_training(name: str, corpus: Path) -> None:
    spoil, message = SPOILT[name]
    spoil(corpus)
    with pytest.raises(ValueError, match=message) as caught:
        TokenData(str(corpus), block_size=16).setup("fit")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_chunk_lost_while_reading_is_named(corpus: Path, workers: int) -> None:
    data = TokenData(str(corpus), block_size=16, num_workers=workers)
    first_chunk(corpus).unlink()
    with pytest.raises(ValueError, match=r"chunk-0-0\.bin is missing; prepare the folder anew$") as caught:
        take(data, 50)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_ids_beyond_the_vocabulary_are_named(corpus: Path, workers: int) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    (corpus / "manifest.json").write_text(json.dumps(manifest | {"vocab_size": 120}))
    data = TokenData(str(corpus), block_size=16, num_workers=workers)
    with pytest.raises(ValueError, match=r"train, block \d+: token id \d+ is not below the vocabulary of 120"):
        take(data, 50)


def test_the_wrong_tokenizer(corpus: Path, tmp_path: Path) -> None:
    other = prepared(tmp_path / "chars", TEXTS, tokenizer="chars")
    with pytest.raises(ValueError, match="were prepared with different tokenizers"):
        TokenData([str(corpus), str(other)])
    shutil.copy(other / "tokenizer.json", corpus / "tokenizer.json")
    with pytest.raises(ValueError, match="is not the tokenizer that the shards were written with"):
        _ = open_corpus(str(corpus)).tokenizer


def test_another_folder_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    source = str(write_jsonl(tmp_path / "b.jsonl", TEXTS))
    with pytest.raises(ValueError, match="already prepared with other settings"):
        prepare(Preparation([source], "bytes"), corpus, quiet=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match="was not made by prepare"):
        prepare(Preparation([source], "bytes"), tmp_path / "mine", quiet=True)
    assert prepare(Preparation([source], "bytes"), corpus, overwrite=True, quiet=True)["documents"] == len(TEXTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, r"the path of the data is empty; give a folder"),
        ({"path": []}, r"data\.path names no corpus"),
        ({"block_size": 0}, r"data\.block_size must be at least 1"),
        ({"batch_size": 0}, r"data\.batch_size must be at least 1"),
        ({"num_workers": -1}, r"data\.num_workers must be at least 0, not -1"),
        ({"shuffle_window": 0}, r"data\.shuffle_window must be at least 1, not 0"),
        ({"weights": [0]}, r"data\.weights \[0\]: every one must be a positive number"),
        ({"weights": [-1.0]}, r"data\.weights \[-1\.0\]: every one must be a positive number"),
        ({"weights": [float("nan")]}, r"data\.weights \[nan\]: every one must be a positive number"),
        ({"weights": [float("inf")]}, r"data\.weights \[inf\]: every one must be a positive number"),
        ({"cache_size": "1.2.3GB"}, r"data\.cache_size '1\.2\.3GB' is not a size"),
        ({"cache_size": 0}, r"data\.cache_size 0 is not a size"),
        ({"weights": [1.0, 2.0]}, r"data\.weights has 2 numbers for 1 corpora"),
        ({"block_size": 100_000}, r"train holds 0 blocks of 100000 tokens, 8 needed \(1 x 8 blocks per step\)"),
        ({"cache_size": "much"}, r"data\.cache_size 'much' is not a size"),
    ],
)
def test_bad_settings(corpus: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenData(**{"path": str(corpus), **options}).train_dataloader()


def test_an_empty_split_tells_how_to_fill_it(tmp_path: Path) -> None:
    data = TokenData(str(prepared(tmp_path, ["one", "two", "three"], val_fraction=1e-9)), block_size=4)
    with pytest.raises(ValueError, match=r"/val is empty, .* a larger --val_fraction, --split position, or more text$"):
        data.val_dataloader()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": [""]}, "--input is empty"),
        ({"separator": ""}, "separator is empty"),
        ({"val_fraction": 1.0}, r"val_fraction 1\.0 and test_fraction 0\.0: .* their sum below 1"),
        ({"val_fraction": float("nan")}, "val_fraction nan and"),
        ({"test_fraction": float("nan")}, "test_fraction nan: "),
        ({"num_workers": -2}, "num_workers is -2, it must be at least 0"),
        ({"output": "a.jsonl"}, r"a\.jsonl is a file, not a folder; give another --output"),
        ({"output": "a.jsonl/out"}, r"a\.jsonl/out: cannot prepare \(Not a directory"),
        ({"output": "/proc/out"}, r"/proc/out: cannot prepare \(No such file or directory"),
    ],
)
def test_bad_options_of_a_preparation(
    tmp_path: Path, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("a.jsonl"), TEXTS)
    settings = {"input": ["a.jsonl"], "tokenizer": "bytes", "output": "out", "num_workers": 0} | options
    output, workers = settings.pop("output"), settings.pop("num_workers")
    with pytest.raises(ValueError, match=message):
        prepare(Preparation(**settings), output, workers, quiet=True)
    assert not Path("out").exists() and Path("a.jsonl").is_file()


def test_a_damaged_manifest_is_overwritten_on_demand_only(corpus: Path, tmp_path: Path) -> None:
    settings = Preparation([str(write_jsonl(tmp_path / "b.jsonl", TEXTS))], "bytes")
    (corpus / MANIFEST).write_text("[]")
    with pytest.raises(ValueError, match=r"manifest\.json is damaged .*; give another --output, or --overwrite"):
        prepare(settings, corpus, quiet=True)
    assert prepare(settings, corpus, overwrite=True, quiet=True)["documents"] == len(TEXTS)


def test_what_a_killed_run_left_is_swept_up(tmp_path: Path) -> None:
    settings = Preparation([str(write_jsonl(tmp_path / "b.jsonl", TEXTS))], "bytes")
    (tmp_path / "out" / ".parts").mkdir(parents=True)
    (tmp_path / "out" / ".manifest.json.partial").write_text("{")
    prepare(settings, tmp_path / "out", quiet=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {MANIFEST, "tokenizer.json", "train", "val"}


@pytest.mark.parametrize("content", ["[]", "{", '{"kind": "chars"}', '{"kind": "chars", "alphabet": 3, "eos": "auto"}'])
def test_a_damaged_tokenizer(corpus: Path, content: str) -> None:
    (corpus / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer .*/tokenizer\.json: (not|damaged)") as caught:
        _ = open_corpus(str(corpus)).tokenizer
    assert "\n" not in str(caught.value)


def test_the_tools_take_what_the_configs_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are held out by their names, as words behind the option."""
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text<|endoftext|>more of it")
    arguments = ["--input", str(tmp_path), "--tokenizer", "chars", "--separator", "<|endoftext|>", "--split", "file",
                 "--val_files", "valid", "--output", str(tmp_path / "out"), "--num_workers", "0"]  # fmt: skip
    assert tool("prepare").main(arguments) == 0
    assert "train 2 documents" in (said := capsys.readouterr().err) and "val 2 documents" in said
    for options in (["--block_size", "0"], ["--blocks", "-1"]):
        assert tool("inspect_data").main([str(tmp_path / "out"), *options]) == 2
        assert "must be at least" in capsys.readouterr().err


def tool(name: str) -> Any:
    """A script of tools/ as a module."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent.parent / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_missing_library_or_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def offline(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(fsspec.core, "url_to_fs", offline)
    for name in ("hf://datasets/HuggingFaceFW/fineweb-edu/sample/10BT", "HuggingFaceFW/fineweb-edu"):
        with pytest.raises(ValueError, match=r"cannot reach huggingface\.co \(ConnectionError; offline"):
            list_files([name])
