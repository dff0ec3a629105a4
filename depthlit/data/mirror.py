"""A corpus behind a URL, mirrored chunk by chunk into a local cache of a given size by LitData's downloaders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from depthlit.data.manifest import SPLITS, read_manifest
from depthlit.data.writing import checksum
from depthlit.files import replacing


def is_url(path: str) -> bool:
    return "://" in path or path.startswith("local:")


class Mirror:
    """The local copy of a prepared folder behind a URL; s3://, gs://, hf://, azure://, r2://, and local: for trying.

    Args:
        url: of the prepared folder. Credentials come from the environment, as the store's own tools take them.
        folder: where caches are kept.
        cache_size: bytes that the chunks may take; the ones unused for longest make room. None keeps all.

    Raises:
        ValueError: when there is no prepared folder, or no way to reach it.
    """

    def __init__(self, url: str, folder: Path, cache_size: int | None = None) -> None:
        self.url, self.cache_size = url.rstrip("/"), cache_size
        self.root = folder / f"mirror-{hashlib.blake2b(self.url.encode(), digest_size=8).hexdigest()}"
        self.root.mkdir(parents=True, exist_ok=True)
        with self.lock("manifest"):
            fresh = self._small("manifest.json")
            kept = self.root / "manifest.json"
            if not kept.exists() or kept.read_bytes() != fresh:
                for name in SPLITS:  # of an older corpus at the same place
                    shutil.rmtree(self.root / name, ignore_errors=True)
                kept.unlink(missing_ok=True)
                splits = read_manifest(fresh, f"{self.url}/manifest.json", "upload the prepared folder again")["splits"]
                for name in ["tokenizer.json", *(f"{split}/index.json" for split in SPLITS if split in splits)]:
                    self._keep(name, self._small(name))
                self._keep("manifest.json", fresh)

    def lock(self, name: str) -> Any:
        from filelock import FileLock  # comes with LitData

        return FileLock(str(self.root / f"{name}.lock"))

    def _keep(self, name: str, content: bytes) -> None:
        with replacing(self.root / name) as file:
            file.write(content)

    def _small(self, name: str) -> bytes:
        """A small file, fetched anew."""
        path = self.root / f"{name.replace('/', '-')}.{os.getpid()}.new"
        try:
            fetch(self.source(), f"{self.url}/{name}", path)
            return path.read_bytes()
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(
                f"{self.url}: cannot fetch {name} ({type(error).__name__}): "
                "no prepared folder there, no access, or offline?"
            ) from None
        finally:
            path.unlink(missing_ok=True)

    def source(self) -> Any:
        """LitData's downloader for this kind of URL."""
        from litdata.streaming.downloader import get_downloader

        try:
            return get_downloader(self.url, str(self.root), [])
        except ModuleNotFoundError as error:
            raise ValueError(f"{self.url}: {' '.join(map(str, error.args))}") from None

    def fetcher(self, split: str) -> Fetcher:
        return Fetcher(self, split)


def fetch(source: Any, remote: str, path: Path) -> None:
    """Download one file, whole or not at all.

    The stores' own libraries are asked, not the Rust client that LitData prefers for chunks: that one does not survive
    the fork of a DataLoader's worker, and refuses plain http.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "wb") as file:
            source.download_fileobj(remote, file)
            empty = file.tell() == 0
        if empty:  # hf:// and local: only know how to download to a path
            temporary.unlink()
            source.download_file(remote, str(temporary))
        temporary.replace(path)
    finally:
        for stray in path.parent.glob(f"{temporary.name}*"):
            stray.unlink(missing_ok=True)


class Fetcher:
    """Fetches chunks of one split into the mirror, and makes room for them."""

    def __init__(self, mirror: Mirror, split: str) -> None:
        self.mirror, self.folder = mirror, mirror.root / split
        self.chunks: list[dict[str, Any]] = json.loads((self.folder / "index.json").read_text())["chunks"]
        self._downloader: Any = None
        self._pid = -1

    @property
    def open_chunks(self) -> int | None:
        """How many chunks one process may keep mapped: a mapped file takes room even after it was removed."""
        if self.mirror.cache_size is None:
            return None
        return max(2, self.mirror.cache_size // max(c["chunk_bytes"] for c in self.chunks) // 2)

    def __call__(self, chunk: int) -> Path:
        """The chunk's file, fetched if it is not there.

        Raises:
            ValueError: when it cannot be had, or is not what was written.
        """
        info = self.chunks[chunk]
        path = self.folder / info["filename"]
        if not path.exists():
            with self.mirror.lock(info["filename"]):  # of the processes that want it, one fetches it
                if not path.exists():
                    for stale in path.parent.glob(f"{path.name}.*.part*"):  # of processes that were killed
                        stale.unlink(missing_ok=True)
                    self._make_room(info["chunk_bytes"])
                    try:
                        fetch(self._source(), self._remote(info), path)
                    except Exception as error:
                        raise ValueError(
                            f"{self.mirror.url}: cannot fetch {path.name} ({type(error).__name__}: {error})"
                        ) from None
                    self._verify(path, info)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # the chunk that was used last is the last to make room
        return path

    def span(self, chunk: int, offset: int, length: int) -> bytes | None:
        """Some bytes of a chunk that is not worth fetching whole; None where the store cannot serve parts."""
        from litdata.streaming.downloader import Downloader

        source = self._source()
        if self.mirror.cache_size is None or type(source).download_bytes is Downloader.download_bytes:
            return None
        info = self.chunks[chunk]
        part = source.download_bytes(self._remote(info), offset, length, str(self.folder / info["filename"]))
        return part if len(part) == length else None

    def _remote(self, info: dict[str, Any]) -> str:
        return f"{self.mirror.url}/{self.folder.name}/{info['filename']}"

    def _source(self) -> Any:
        if self._pid != os.getpid():  # connections do not survive a fork
            self._downloader, self._pid = self.mirror.source(), os.getpid()
        return self._downloader

    def _verify(self, path: Path, info: dict[str, Any]) -> None:
        if path.stat().st_size != info["chunk_bytes"] or checksum(path) != info["crc32"]:
            path.unlink(missing_ok=True)
            raise ValueError(f"{self.mirror.url}: {path.name} is not what was written (checksum); upload it again")

    def _make_room(self, wanted: int) -> None:
        if self.mirror.cache_size is None:
            return
        with self.mirror.lock("room"):
            files = sorted(self._files(), key=lambda f: f[0])
            held = sum(size for _, size, _ in files)
            for _, size, path in files:
                if held + wanted <= self.mirror.cache_size:
                    return
                path.unlink(missing_ok=True)
                held -= size

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        for split in SPLITS:
            for path in (self.mirror.root / split).glob("chunk-*.bin"):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    yield stat.st_mtime, stat.st_size, path

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_downloader": None, "_pid": -1}
