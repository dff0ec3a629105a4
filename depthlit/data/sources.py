"""Documents out of files: Parquet, JSON lines, plain text, the built-in corpus; on disk or behind a URL."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

from depthlit.data.builtin import CORPORA

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".ndjson")
TEXT = (".txt", ".txt.gz", ".txt.zst", ".text", ".md")
BUILTIN = "builtin:"


@dataclass(frozen=True)
class Piece:
    """A part of a source that one worker reads on its own.

    Args:
        path: file, URL, or `builtin:NAME`.
        kind: parquet, jsonl, text or builtin.
        start: first row (parquet) or byte (jsonl, text).
        stop: one past the last; -1 is the end.
        size: about how many bytes of text, for the progress bar.
    """

    path: str
    kind: str
    start: int = 0
    stop: int = -1
    size: int = 1


@dataclass(frozen=True)
class Document:
    """A text and its place in the file: a row of Parquet, or the byte at which it begins; see `row_of`."""

    text: str
    place: int


@dataclass(frozen=True)
class Reading:
    """How documents are found in a file.

    Args:
        text_column: column (Parquet) or key (JSON lines) of the text.
        separator: what stands between the documents of a plain text file, with the newlines around it; None: the file
            is one document.
    """

    text_column: str = "text"
    separator: str | None = None


def list_files(inputs: list[str]) -> list[str]:
    """The files behind paths, folders, globs, URLs and Hugging Face ids, in a fixed order.

    Raises:
        ValueError: when an input is nothing of that, or holds no file of a known kind.
    """
    files: list[str] = []
    for name in inputs:
        if not name:
            raise ValueError("--input is empty; give files, folders, URLs, or Hugging Face ids")
        if name.startswith(BUILTIN):
            if name.removeprefix(BUILTIN) not in CORPORA:
                raise ValueError(f"{name}: unknown; built-in corpora: {', '.join(BUILTIN + c for c in CORPORA)}")
            files.append(name)
        elif "://" in name:
            files += _list_url(name)
        elif (path := Path(name).expanduser()).is_file():
            files.append(str(path))
        elif path.is_dir():
            found = sorted(str(p) for p in path.rglob("*") if p.is_file() and kind_of(str(p), strict=False))
            if not found:
                raise ValueError(
                    f"{name}: no .parquet, {', '.join(JSON_LINES)} or {', '.join(TEXT)} file in this folder"
                )
            files += found
        elif any(c in name for c in "*?["):
            found = sorted(
                map(str, Path(path.anchor or ".").glob(str(path.relative_to(path.anchor) if path.anchor else path)))
            )
            if not found:
                raise ValueError(f"{name}: no file matches")
            files += found
        elif name.count("/") >= 1 and not name.startswith((".", "/", "~")) and not Path(name).suffix:
            files += _list_url(f"hf://datasets/{name}")
        else:
            raise ValueError(f"{name}: no such file or folder")
    return files


def _list_url(url: str) -> list[str]:
    import fsspec

    scheme = url.split("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
        found = [path] if kind_of(path, strict=False) else sorted(system.find(path))
    except ImportError as error:
        raise ValueError(f"{url}: {error}") from None
    except Exception as error:
        where = "huggingface.co" if scheme == "hf" else "the store"
        raise ValueError(f"{url}: cannot reach {where} ({type(error).__name__}; offline, or no access?)") from None
    files = [f"{scheme}://{p}" for p in found if kind_of(p, strict=False)]
    if not files:
        raise ValueError(f"{url}: no .parquet, {', '.join(JSON_LINES)} or {', '.join(TEXT)} file there")
    return files


def kind_of(path: str, strict: bool = True) -> str | None:
    """parquet, jsonl, text or builtin, by the file's name.

    Raises:
        ValueError: for an unknown ending, when strict.
    """
    if path.startswith(BUILTIN):
        return "builtin"
    name = path.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(JSON_LINES):
        return "jsonl"
    if name.endswith(TEXT):
        return "text"
    if not strict:
        return None
    if "." not in Path(path).name:  # text8 has no ending
        return "text"
    raise ValueError(f"{path}: unknown kind of file; known: .parquet, {', '.join(JSON_LINES + TEXT)}")


def cut(files: list[str], how: Reading, target: int | None = None) -> list[Piece]:
    """Files cut into pieces of about `target` bytes of text; the cuts depend on the files alone, not on workers."""
    extents = [_extent(path) for path in files]
    if target is None:
        target = min(max(sum(size for size, _ in extents) // 32, 1 << 18), 1 << 27)
    pieces: list[Piece] = []
    for path, (size, end) in zip(files, extents, strict=True):
        kind = str(kind_of(path))
        if kind != "parquet" and not _can_be_cut(path, kind, how):
            pieces.append(Piece(path, kind, size=size))
            continue
        parts = max(1, min(-(-size // target), end))
        edges = [end * i // parts for i in range(parts + 1)]
        pieces += [Piece(path, kind, a, b, size // parts) for a, b in pairwise(edges)]
    return pieces


def _can_be_cut(path: str, kind: str, how: Reading) -> bool:
    """Whether a piece can begin inside the file: not if it is compressed, nor if separators could overlap."""
    if path.endswith((".gz", ".zst")) or kind == "builtin":
        return False
    mark = "\n" if kind == "jsonl" else how.separator
    return mark is not None and not any(mark[:k] == mark[-k:] for k in range(1, len(mark)))


def _extent(path: str) -> tuple[int, int]:
    """About how many bytes of text a file holds, and how many rows or bytes it can be cut into."""
    kind = kind_of(path)
    if kind == "builtin":
        return 1 << 21, 1
    if kind == "parquet":
        rows = _parquet(path).metadata
        return sum(rows.row_group(i).total_byte_size for i in range(rows.num_row_groups)), rows.num_rows
    with open_file(path) as file:
        size = file.seek(0, io.SEEK_END)
    return size * (3 if path.endswith((".gz", ".zst")) else 1), size


def open_file(path: str) -> IO[bytes]:
    """A local file or a URL, opened for reading bytes as they are."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return fsspec.open(path, "rb").open()


def _parquet(path: str) -> Any:
    try:
        import pyarrow.parquet as pq
    except ModuleNotFoundError:
        raise ValueError(f"{path}: reading Parquet needs pyarrow: pip install 'depthlit[data]'") from None
    try:
        return pq.ParquetFile(open_file(path))
    except OSError as error:  # ArrowInvalid is a ValueError, ArrowIOError an OSError
        raise ValueError(f"{path}: cannot be read ({_line(error)})") from None
    except ValueError as error:
        raise ValueError(f"{path}: not a whole Parquet file, perhaps a truncated download ({_line(error)})") from None


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def read(piece: Piece, how: Reading) -> Iterator[Document]:
    """The documents of a piece, in order.

    Raises:
        ValueError: one line with file and row, for anything that cannot be read.
    """
    return {"parquet": _read_parquet, "jsonl": _read_json_lines, "text": _read_text, "builtin": _read_builtin}[
        piece.kind
    ](piece, how)


def _read_builtin(piece: Piece, how: Reading) -> Iterator[Document]:
    for row, (_, text) in enumerate(CORPORA[piece.path.removeprefix(BUILTIN)]()):
        yield Document(text, row)


def _read_parquet(piece: Piece, how: Reading) -> Iterator[Document]:
    file = _parquet(piece.path)
    column, names = how.text_column, file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{piece.path}: no column {column!r}; it has {', '.join(names)}")
    if str(file.schema_arrow.field(column).type) not in ("string", "large_string", "string_view"):
        raise ValueError(f"{piece.path}: column {column!r} holds {file.schema_arrow.field(column).type}, not strings")
    row = 0
    for group in range(file.metadata.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if row + rows <= piece.start or row >= piece.stop:
            row += rows
            continue
        try:
            for batch in file.iter_batches(batch_size=1024, row_groups=[group], columns=[column]):
                if row + len(batch) > piece.start and row < piece.stop:
                    a, b = max(piece.start - row, 0), min(piece.stop - row, len(batch))
                    yield from _rows(piece, batch.column(0).slice(a, b - a), row + a)
                row += len(batch)
        except (OSError, ValueError) as error:
            if isinstance(error, ValueError) and ", row " in str(error):
                raise
            raise ValueError(f"{piece.path}, row {row}: damaged Parquet data ({_line(error)})") from None


def _rows(piece: Piece, column: Any, first: int) -> Iterator[Document]:
    try:
        texts = column.to_pylist()
    except UnicodeDecodeError:
        for i in range(len(column)):
            try:
                column[i].as_py()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{piece.path}, row {first + i}: invalid UTF-8 ({error.reason} at byte {error.start})"
                ) from None
        raise
    for i, text in enumerate(texts):
        yield Document(text or "", first + i)


def _decompressed(path: str) -> IO[bytes]:
    file = open_file(path)
    if path.endswith(".gz"):
        return gzip.open(file, "rb")  # type: ignore[return-value]
    if path.endswith(".zst"):
        try:
            import zstandard
        except ModuleNotFoundError:
            raise ValueError(f"{path}: reading .zst needs zstandard: pip install 'depthlit[data]'") from None
        return io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True))
    return file


def row_of(piece: Piece, place: int) -> int:
    """Row in the file, counted from 0, of a document's place: lines are only counted when something is wrong."""
    if piece.kind not in ("jsonl", "text"):
        return place
    rows = 0
    with _decompressed(piece.path) as file:
        while place > 0 and (part := file.read(min(1 << 22, place))):
            place, rows = place - len(part), rows + part.count(b"\n")
    return rows


def _read_json_lines(piece: Piece, how: Reading) -> Iterator[Document]:
    for line, place in _between(piece, b"\n"):
        if line.strip():
            yield Document(_text_of(line, piece, place, how.text_column), place)


def _between(piece: Piece, mark: bytes) -> Iterator[tuple[bytes, int]]:
    """(bytes, place) of everything that stands between marks and begins inside the piece."""
    with _decompressed(piece.path) as file:
        begin = max(0, piece.start - len(mark))  # a mark may end just before the piece's first byte
        if begin:
            file.seek(begin)
        held, at, seen, skip = b"", 0, 0, piece.start > 0
        while piece.stop < 0 or begin < piece.stop or skip:
            found = held.find(mark, seen)
            if found >= 0:
                if not skip:
                    yield held[at:found], begin
                begin, at, seen, skip = begin + found + len(mark) - at, found + len(mark), found + len(mark), False
                continue
            try:
                more = file.read(max(1 << 20, len(held) - at))
            except Exception as error:  # gzip, zlib and zstandard each raise their own
                raise _bad(piece, begin, f"damaged or truncated file ({_line(error)})") from None
            if not more:
                if not skip and at < len(held):
                    yield held[at:], begin
                return
            held, seen, at = held[at:] + more, max(0, len(held) - at - len(mark) + 1), 0


def _bad(piece: Piece, place: int, reason: str) -> ValueError:
    return ValueError(f"{piece.path}, row {row_of(piece, place)}: {reason}")


def _text_of(line: bytes, piece: Piece, place: int, column: str) -> str:
    try:
        fields = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _bad(piece, place, f"invalid UTF-8 ({error.reason} at byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _bad(piece, place, f"not JSON ({error.msg} at column {error.colno}); a truncated file?") from None
    if not isinstance(fields, dict) or column not in fields:
        has = ", ".join(fields) if isinstance(fields, dict) else type(fields).__name__
        raise _bad(piece, place, f"no key {column!r}; it has {has}")
    text = fields[column]
    if text is not None and not isinstance(text, str):
        raise _bad(piece, place, f"{column!r} holds {type(text).__name__}, not a string")
    if text and b"\\u" in line:  # the only way that half a surrogate pair gets into a string
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise _bad(piece, place, f"half a surrogate pair at character {error.start}; not Unicode text") from None
    return text or ""


def _read_text(piece: Piece, how: Reading) -> Iterator[Document]:
    separator = how.separator
    parts = iter([(_whole(piece), 0)]) if separator is None else _between(piece, separator.encode())
    for content, place in parts:
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            at = place + error.start
            raise _bad(piece, at, f"invalid UTF-8 ({error.reason} at byte {at})") from None
        text = text if separator is None else text.strip("\r\n")
        if text or separator is None:  # what stands before the first separator and behind the last is often nothing
            yield Document(text, place)


def _whole(piece: Piece) -> bytes:
    with _decompressed(piece.path) as file:
        try:
            return file.read()
        except Exception as error:
            raise _bad(piece, 0, f"damaged or truncated file ({_line(error)})") from None
