"""Corpora behind a URL: chunks come into a cache of bounded size, whole or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_data import prepared, take

from depthlit.data import TokenData, writing
from depthlit.data.mirror import Mirror

CHUNK = 4000


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A prepared corpus of about twenty chunks, standing in for a bucket."""
    monkeypatch.setattr(writing, "CHUNK_BYTES", CHUNK)
    return prepared(tmp_path / "bucket", [f"document {i} " + "word " * (i % 40) for i in range(320)], val_fraction=0.1)


def cached(folder: Path) -> list[Path]:
    return sorted(folder.glob("mirror-*/*/chunk-*.bin"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_small_cache_gives_the_same_stream_and_stays_small(store: Path, tmp_path: Path, workers: int) -> None:
    options = {"block_size": 64, "batch_size": 4, "shuffle_window": 2, "num_workers": workers}
    there = TokenData(f"local:{store}", cache_dir=str(tmp_path / "cache"), cache_size=6 * CHUNK, **options)
    chunks = json.loads((store / "train" / "index.json").read_text())["chunks"]
    assert len(chunks) > 12
    steps = int(1.3 * there._open("train")[0].whole / 4)
    assert take(there, steps) == take(TokenData(str(store), **options), steps)
    held = sum(p.stat().st_size for p in cached(tmp_path / "cache"))
    assert 0 < held <= 6 * CHUNK


def test_without_a_limit_everything_is_kept_and_read_again(store: Path, tmp_path: Path) -> None:
    def batches() -> list[list[int]]:
        data = TokenData(f"local:{store}", block_size=64, batch_size=4, cache_dir=str(tmp_path / "cache"))
        return take(data, data._open("train")[0].whole // 4)

    first = batches()
    chunks = json.loads((store / "train" / "index.json").read_text())["chunks"]
    assert len(cached(tmp_path / "cache")) == len(chunks)
    for chunk in chunks:
        (store / "train" / chunk["filename"]).unlink()
    assert batches() == first


def test_a_cache_smaller_than_what_is_shuffled_is_refused(store: Path, tmp_path: Path) -> None:
    data = TokenData(f"local:{store}", block_size=64, cache_dir=str(tmp_path), cache_size=5 * CHUNK)
    with pytest.raises(ValueError, match=r"set data\.shuffle_window to at most"):
        data.train_dataloader()


def test_a_damaged_or_missing_chunk_is_named_and_not_kept(store: Path, tmp_path: Path) -> None:
    chunks = json.loads((store / "train" / "index.json").read_text())["chunks"]
    path = store / "train" / chunks[3]["filename"]
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    data = TokenData(f"local:{store}", block_size=64, batch_size=4, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=f"{path.name} is not what was written"):
        take(data, 200)
    assert path.name not in [p.name for p in cached(tmp_path / "cache")]
    path.unlink()
    with pytest.raises(ValueError, match=f"cannot fetch {path.name}"):
        take(data, 200)


def test_a_corpus_replaced_at_the_same_place_is_fetched_anew(store: Path, tmp_path: Path) -> None:
    url, cache = f"local:{store}", tmp_path / "cache"
    take(TokenData(url, block_size=64, batch_size=4, cache_dir=str(cache)), 40)
    assert cached(cache)
    manifest = store / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"seconds"', '"seconds_taken"'))
    Mirror(url, cache)
    assert not cached(cache)


def test_nothing_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot fetch manifest\.json") as caught:
        TokenData(f"local:{tmp_path}/nothing", cache_dir=str(tmp_path / "cache"))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_an_s3_bucket(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    boto3 = pytest.importorskip("boto3")
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "x")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        client = boto3.client("s3")
        client.create_bucket(Bucket="corpora")
        for path in store.rglob("*"):
            if path.is_file():
                client.upload_file(str(path), "corpora", f"small/{path.relative_to(store)}")
        options = {"block_size": 64, "batch_size": 4, "shuffle_window": 2, "num_workers": workers}
        there = TokenData("s3://corpora/small", cache_dir=str(tmp_path / "cache"), cache_size=6 * CHUNK, **options)
        steps = there._open("train")[0].whole // 4
        assert take(there, steps) == take(TokenData(str(store), **options), steps)
        assert 0 < sum(p.stat().st_size for p in cached(tmp_path / "cache")) <= 6 * CHUNK
        with pytest.raises(ValueError, match=r"cannot fetch manifest\.json"):
            TokenData("s3://corpora/nothing", cache_dir=str(tmp_path / "cache"))
    finally:
        server.stop()
