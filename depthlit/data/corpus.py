"""A prepared folder as its readers see it: the manifest, the splits, the built-in corpus in its cache."""

from __future__ import annotations

import os
import platform
import shutil
from functools import cached_property
from pathlib import Path
from typing import Any

from depthlit.data.manifest import FORMAT, read_index, read_manifest
from depthlit.data.mirror import Mirror, is_url
from depthlit.data.prepare import Preparation, prepare
from depthlit.data.shards import Shards
from depthlit.data.sources import BUILTIN, list_files
from depthlit.data.tokenizers import Tokenizer, load_tokenizer
from depthlit.data.writing import checksum


def cache_folder() -> Path:
    """Where prepared and fetched data is kept: $DEPTHLIT_CACHE, else depthlit in $XDG_CACHE_HOME or ~/.cache."""
    if "DEPTHLIT_CACHE" in os.environ:
        return Path(os.environ["DEPTHLIT_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "depthlit"


class Corpus:
    """A prepared folder.

    Args:
        path: as the user named it.
        root: the local folder that holds manifest.json.
        mirror: fetches the chunks, when `path` is a URL.

    Raises:
        ValueError: when the folder is not there, not whole, or of another format.
    """

    def __init__(self, path: str, root: Path, mirror: Mirror | None = None) -> None:
        self.path, self.root, self.mirror = path, root, mirror
        if not root.is_dir():
            raise ValueError(f"{path}: no such folder; make it with tools/prepare.py, as the config that names it says")
        file = root / "manifest.json"
        if not file.is_file():
            raise ValueError(
                f"{path} has no manifest.json, so it was never finished: run the same tools/prepare.py command again"
            )
        self.manifest = read_manifest(file.read_bytes(), str(file), self.remedy)

    @property
    def vocab_size(self) -> int:
        return self.manifest["vocab_size"]

    @property
    def eos_id(self) -> int | None:
        return self.manifest["eos_id"]

    @property
    def fingerprint(self) -> str:
        """Of the token ids and their order."""
        return self.manifest["fingerprint"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        file = self.root / "tokenizer.json"
        try:
            content = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ValueError(f"{file} is missing or damaged; {self.remedy}") from None
        tokenizer = load_tokenizer(content, self.eos_id, str(file))
        if tokenizer.fingerprint != self.manifest["tokenizer"]["fingerprint"]:
            raise ValueError(f"{file} is not the tokenizer that the shards were written with; {self.remedy}")
        return tokenizer

    def has(self, split: str) -> bool:
        return split in self.manifest["splits"]

    def shards(self, split: str, block_size: int) -> Shards:
        """A split, to be read in blocks.

        Raises:
            ValueError: when its index is missing or was not written by preparation.
        """
        self._index(split)
        return Shards(self.root / split, block_size, self.mirror.fetcher(split) if self.mirror else None)

    def _index(self, split: str) -> dict[str, Any]:
        return read_index(self.root / split, self.manifest["splits"][split]["tokens"], self.remedy)

    @property
    def remedy(self) -> str:
        return f"delete the folder {self.root}" if self.path.startswith(BUILTIN) else f"prepare {self.path} anew"

    def check(self, split: str, content: bool = True) -> None:
        """Compare every chunk on disk with what was written.

        Args:
            split: which one.
            content: compare checksums, not only sizes.

        Raises:
            ValueError: naming the first chunk that differs.
        """
        for chunk in self._index(split)["chunks"]:
            path = self.root / split / chunk["filename"]
            if not path.is_file():
                raise ValueError(f"{path} is missing; {self.remedy}")
            if (size := path.stat().st_size) != chunk["chunk_bytes"]:
                raise ValueError(f"{path} has {size} bytes, {chunk['chunk_bytes']} were written; {self.remedy}")
            if content and checksum(path) != chunk["crc32"]:
                raise ValueError(f"{path} is not what was written (checksum); {self.remedy}")


def open_corpus(path: str, cache: Path | None = None, cache_size: int | None = None) -> Corpus:
    """The corpus behind a path or URL; `builtin:pydoc` is prepared in the cache on first use.

    Args:
        path: prepared folder, URL of one, or `builtin:pydoc`.
        cache: where chunks behind a URL are kept.
        cache_size: bytes that they may take.
    """
    if not path:
        raise ValueError("the path of the data is empty; give a folder made by tools/prepare.py, or builtin:pydoc")
    if path.startswith(BUILTIN):
        return _built_in(path)
    path = path.removeprefix("file://")
    if is_url(path):
        mirror = Mirror(path, cache or cache_folder(), cache_size)
        return Corpus(path, mirror.root, mirror)
    return Corpus(path, Path(path).expanduser())


def _built_in(path: str) -> Corpus:
    """Prepared under a temporary name and renamed; of several processes that start at once, one does it."""
    from filelock import FileLock  # comes with LitData

    list_files([path])
    name = path.removeprefix(BUILTIN)
    root = cache_folder() / f"{name}-python{platform.python_version()}-format{FORMAT}"
    if not (root / "manifest.json").exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{root}.lock"):
            if not (root / "manifest.json").exists():
                print(f"preparing {path} in {root}", flush=True)
                for stale in root.parent.glob(f"{root.name}.*.tmp"):  # of processes that were killed
                    shutil.rmtree(stale)
                temporary = root.with_name(f"{root.name}.{os.getpid()}.tmp")
                prepare(Preparation([path], "chars", val_fraction=0.1), temporary, quiet=True)
                shutil.rmtree(root, ignore_errors=True)
                temporary.rename(root)
    return Corpus(path, root)
