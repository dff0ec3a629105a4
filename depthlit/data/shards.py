"""Blocks out of LitData shards: every block size reads every token, across the borders of chunks.

LitData's own TokensLoader cuts blocks chunk by chunk: it drops the tail of every chunk, and a block longer than a chunk
yields nothing. `SpanLoader` sees the chunks of a split as one stream of tokens.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from litdata import StreamingDataset
from litdata.streaming.item_loader import BaseItemLoader, Interval
from litdata.streaming.sampler import ChunkedIndex
from numpy.typing import NDArray

if TYPE_CHECKING:
    from depthlit.data.mirror import Fetcher

OPEN_CHUNKS = 256
"""Mapped files kept open per process; the usual limit of a process is 1024."""


class SpanLoader(BaseItemLoader):
    """LitData item loader whose item i is the tokens [i T, i T + T] of the split: T inputs and their T targets.

    Neighbouring blocks share one token, so that every token but the very first is a target. The last block may be
    shorter. Shards written with this loader hold rows of ids without headers; a row is a run of documents.

    Args:
        block_size: context T in tokens. Writing does not depend on it.
        fetcher: fetches chunks that are not in the folder.
    """

    def __init__(self, block_size: int = 1, fetcher: Fetcher | None = None) -> None:
        self.block_size, self.fetcher = block_size, fetcher
        self._maps: OrderedDict[int, NDArray[Any]] = OrderedDict()

    def setup(self, config: dict, chunks: list, serializers: dict, region_of_interest: Any = None) -> None:
        kind, _, _ = config["data_format"][0].partition(":")
        if kind != "no_header_numpy" or any(chunk["dim"] is None for chunk in chunks):
            raise ValueError("the shards do not hold rows of token ids; prepare them anew")
        super().setup(config, chunks, serializers, region_of_interest)
        self.dtype = self._serializers[config["data_format"][0]]._dtype
        self.start = np.concatenate(([0], np.cumsum([chunk["dim"] for chunk in chunks]))).astype(np.int64)
        self._ends: list[int] = self.start[1:].tolist()

    def state_dict(self) -> dict:
        return {"block_size": self.block_size}

    def generate_intervals(self) -> list[Interval]:
        """The blocks that begin in each chunk."""
        first = -(-self.start // self.block_size)
        first[-1] = max(0, -(-(int(self.start[-1]) - 1) // self.block_size))
        first = np.minimum(first, first[-1]).tolist()
        return [Interval(a, a, b, b) for a, b in pairwise(first)]

    def pre_load_chunk(self, chunk_index: int, chunk_filepath: str) -> None:
        """Nothing to do: chunks are mapped when they are first read."""

    def load_item_from_chunk(
        self, index: int, chunk_index: int, chunk_filepath: str, begin: int, filesize_bytes: int
    ) -> NDArray[Any]:
        start = index * self.block_size
        stop = start + self.block_size + 1
        if stop <= self._ends[chunk_index]:
            begin = self._ends[chunk_index - 1] if chunk_index else 0
            return self._map(chunk_index, chunk_filepath)[start - begin : stop - begin]
        folder, stop, parts = os.path.dirname(chunk_filepath), min(stop, self._ends[-1]), []
        while start < stop:
            chunk = int(np.searchsorted(self.start, start, side="right")) - 1
            begin, end = int(self.start[chunk]), int(self.start[chunk + 1])
            path = os.path.join(folder, self._chunks[chunk]["filename"])
            parts.append(self._tokens(chunk, path, start - begin, min(stop, end) - begin, whole=chunk == chunk_index))
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _tokens(self, chunk: int, path: str, start: int, stop: int, whole: bool) -> NDArray[Any]:
        """Some tokens of a chunk; `whole` says that more of it will be read."""
        if self.fetcher is not None and not whole and chunk not in self._maps:
            offset = 4 * (self._chunks[chunk]["chunk_size"] + 2) + start * self.dtype.itemsize
            part = self.fetcher.span(chunk, offset, (stop - start) * self.dtype.itemsize)
            if part is not None:
                return np.frombuffer(part, dtype=self.dtype)
        return self._map(chunk, path)[start:stop]

    def _map(self, chunk: int, path: str) -> NDArray[Any]:
        """The tokens of one chunk, mapped."""
        if chunk in self._maps:
            self._maps.move_to_end(chunk)
            return self._maps[chunk]
        limit = (self.fetcher and self.fetcher.open_chunks) or OPEN_CHUNKS
        while len(self._maps) >= min(limit, OPEN_CHUNKS):
            self._maps.popitem(last=False)
        info = self._chunks[chunk]
        for _ in range(100 if self.fetcher else 1):  # another process may remove a chunk before it is mapped here
            try:
                if self.fetcher is not None:
                    self.fetcher(chunk)
                size = os.stat(path).st_size
                if size != info["chunk_bytes"]:
                    raise ValueError(f"{path} has {size} bytes, {info['chunk_bytes']} were written; prepare it anew")
                header = 4 * (info["chunk_size"] + 2)  # the number of items and their offsets, uint32
                mapped = np.memmap(path, self.dtype, mode="r", offset=header, shape=(info["dim"],))
                self._maps[chunk] = mapped.view(np.ndarray)  # slices of a memmap cost three times as much
                return self._maps[chunk]
            except FileNotFoundError:
                continue
        raise ValueError(f"{path} is missing; prepare the folder anew")

    def delete(self, chunk_index: int, chunk_filepath: str) -> None:
        self._maps.pop(chunk_index, None)

    def encode_data(self, data: list[bytes], sizes: list[int], flattened: list[Any]) -> tuple[bytes, int]:
        """One row: its bytes and its number of tokens."""
        return data[0], len(flattened[0])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_maps": OrderedDict()}


class Shards:
    """One split of a prepared folder, read block by block at random through LitData's StreamingDataset.

    Args:
        folder: the split's folder, holding index.json and the chunks.
        block_size: context T in tokens.
        fetcher: fetches chunks that are not in the folder.

    Attributes:
        tokens: how many the split holds.
        first: the first block that begins in each chunk, and at the end the number of blocks.
    """

    def __init__(self, folder: str | Path, block_size: int, fetcher: Fetcher | None = None) -> None:
        self.folder, self.block_size, self.fetcher = str(folder), block_size, fetcher
        index = json.loads((Path(folder) / "index.json").read_text())
        self.tokens = sum(chunk["dim"] for chunk in index["chunks"])
        loader = SpanLoader(block_size)
        loader.start = np.concatenate(([0], np.cumsum([chunk["dim"] for chunk in index["chunks"]]))).astype(np.int64)
        self.first = np.array([0, *(interval[3] for interval in loader.generate_intervals())], dtype=np.int64)
        self._first: list[int] = self.first.tolist()
        self._dataset: StreamingDataset | None = None
        self._pid = -1

    def __len__(self) -> int:
        """Number of blocks, a shorter last one included."""
        return int(self.first[-1])

    @property
    def whole(self) -> int:
        """Number of blocks of T inputs and T targets."""
        return max(0, self.tokens - 1) // self.block_size

    @property
    def whole_per_chunk(self) -> NDArray[np.int64]:
        """Number of whole blocks that begin in each chunk."""
        return np.diff(np.minimum(self.first, self.whole))

    def __getitem__(self, block: int) -> NDArray[Any]:
        """The tokens of a block, at most T + 1."""
        if self._pid != os.getpid():  # opened once per process: workers must not share a parent's handles
            self._dataset = StreamingDataset(
                self.folder, item_loader=SpanLoader(self.block_size, self.fetcher), drop_last=True
            )
            self._pid = os.getpid()
        assert self._dataset is not None
        chunk = bisect_right(self._first, block) - 1
        return self._dataset[ChunkedIndex(block, chunk)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_dataset": None, "_pid": -1}
