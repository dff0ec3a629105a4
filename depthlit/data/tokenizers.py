"""Text to token ids and back: characters, bytes, or any tokenizer.json of the `tokenizers` library."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Eos = int | Literal["auto", "none"]
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")
"""Tokens that end a document, in the order in which a tokenizer.json is searched for them."""


class Tokenizer:
    """What preparation and inspection need of a tokenizer.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        eos_id: id that ends a document; None: documents are not marked.
        dtype: the narrowest unsigned integer that holds every id.
    """

    kind: str
    vocab_size: int
    eos_id: int | None

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Ids of each text, as the tokenizer has them; preparation sees to the EOS."""
        raise NotImplementedError(f"{type(self).__name__} must define encode(texts)")

    def decode(self, ids: NDArray[Any]) -> str:
        """Text of some ids; an EOS decodes to nothing."""
        raise NotImplementedError(f"{type(self).__name__} must define decode(ids)")

    def content(self) -> str:
        """What `load_tokenizer` builds it from again, stored as tokenizer.json in the prepared folder."""
        raise NotImplementedError(f"{type(self).__name__} must define content()")

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.min_scalar_type(self.vocab_size - 1)

    @property
    def fingerprint(self) -> str:
        return hashlib.blake2b(f"{self.kind}/{self.eos_id}/{self.content()}".encode(), digest_size=8).hexdigest()


class Chars(Tokenizer):
    """One id per character of a fixed alphabet, in the order of their code points; the EOS comes last.

    Args:
        alphabet: every character that may occur.
        eos: "none" leaves documents unmarked (Text8's 27 symbols stay 27).
    """

    kind = "chars"

    def __init__(self, alphabet: str, eos: Eos = "auto") -> None:
        if eos not in ("auto", "none"):
            raise ValueError(f"the character tokenizer places its own EOS; eos must be auto or none, not {eos}")
        self.alphabet = "".join(sorted(set(alphabet)))
        self._points = self._code_points(self.alphabet)
        self.eos_id = None if eos == "none" else len(self._points)
        self.vocab_size = len(self._points) + (self.eos_id is not None)

    @staticmethod
    def _code_points(text: str) -> NDArray[np.uint32]:
        return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> NDArray[Any]:
        points = self._code_points(text)
        ids = np.minimum(np.searchsorted(self._points, points), len(self._points) - 1)
        if (strange := self._points[ids] != points).any():
            raise ValueError(f"character {chr(points[strange.argmax()])!r} is not in the alphabet")
        return ids

    def decode(self, ids: NDArray[Any]) -> str:
        ids = np.asarray(ids)
        ids = ids if self.eos_id is None else ids[ids != self.eos_id]
        return self._points[ids].tobytes().decode("utf-32-le")

    def content(self) -> str:
        return json.dumps(
            {"kind": self.kind, "alphabet": self.alphabet, "eos": "none" if self.eos_id is None else "auto"}
        )


class Bytes(Tokenizer):
    """One id per byte of UTF-8; the EOS is 256."""

    kind = "bytes"

    def __init__(self, eos: Eos = "auto") -> None:
        if eos not in ("auto", "none"):
            raise ValueError(f"the byte tokenizer places its own EOS; eos must be auto or none, not {eos}")
        self.eos_id = None if eos == "none" else 256
        self.vocab_size = 256 + (self.eos_id is not None)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: NDArray[Any]) -> str:
        ids = np.asarray(ids)
        return ids[ids < 256].astype(np.uint8).tobytes().decode(errors="replace")

    def content(self) -> str:
        return json.dumps({"kind": self.kind, "eos": "none" if self.eos_id is None else "auto"})


class Subwords(Tokenizer):
    """A tokenizer.json of the `tokenizers` library.

    The names of special tokens inside a text are encoded as ordinary text, so that an EOS stands only between
    documents.

    Args:
        definition: the content of tokenizer.json.
        eos: id of the EOS; "auto" looks for the usual names, "none" leaves documents unmarked.
    """

    kind = "tokenizer.json"

    def __init__(self, definition: str, eos: Eos = "auto") -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ModuleNotFoundError:
            raise ValueError("a tokenizer.json needs the library `tokenizers`: pip install 'depthlit[data]'") from None
        self._definition = definition
        self._library = Library.from_str(definition)
        self._library.no_truncation()
        self._library.no_padding()
        self._library.encode_special_tokens = True
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values()) + 1
        if eos == "auto":
            found = [i for name in EOS_NAMES if (i := self._library.token_to_id(name)) is not None]
            if not found:
                raise ValueError("the tokenizer has none of the usual EOS tokens; give --eos ID, or --eos none")
            self.eos_id = found[0]
        else:
            self.eos_id = None if eos == "none" else eos
        if self.eos_id is not None and self.eos_id < 0:
            raise ValueError(f"eos must be an id of at least 0, auto or none, not {self.eos_id}")
        if self.eos_id is not None:  # an EOS beyond the table (50279 for GPT-NeoX) widens the vocabulary
            self.vocab_size = max(self.vocab_size, self.eos_id + 1)

    def encode(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        dtype = self.dtype
        return [np.array(e.ids, dtype=dtype) for e in self._library.encode_batch_fast(list(texts))]

    def decode(self, ids: NDArray[Any]) -> str:
        return self._library.decode(
            [i for i in np.asarray(ids).tolist() if i != self.eos_id], skip_special_tokens=False
        )

    def content(self) -> str:
        return self._definition


def open_tokenizer(name: str, eos: Eos = "auto") -> Tokenizer | None:
    """The tokenizer that a user named; None for `chars`, whose alphabet must first be collected from the corpus.

    Args:
        name: `chars`, `bytes`, the path of a tokenizer.json (or of a folder that holds one), or a Hugging Face id.
        eos: id of the EOS, auto, or none.
    """
    if name == "chars":
        return None
    if name == "bytes":
        return Bytes(eos)
    path = Path(name)
    path = path / "tokenizer.json" if path.is_dir() else path
    if path.is_file():
        return _parsed(path.read_text(encoding="utf-8"), str(path), eos)
    if name.endswith(".json") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ValueError(f"tokenizer {name}: no such file")
    try:
        from huggingface_hub import hf_hub_download
    except ModuleNotFoundError:
        raise ValueError("a Hugging Face tokenizer needs `huggingface_hub`: pip install 'depthlit[data]'") from None
    try:
        path = Path(hf_hub_download(name, "tokenizer.json"))
    except Exception as error:
        raise ValueError(
            f"tokenizer {name}: neither a file, nor chars or bytes, nor to be had from huggingface.co "
            f"({type(error).__name__}; offline?). Download its tokenizer.json and give the path."
        ) from None
    return _parsed(path.read_text(encoding="utf-8"), name, eos)


def load_tokenizer(content: str, eos_id: int | None, source: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer of a prepared folder, from the content of its tokenizer.json.

    Raises:
        ValueError: it is damaged; the message names the source.
    """
    return _parsed(content, source, "none" if eos_id is None else eos_id)


def _parsed(definition: str, source: str, eos: Eos) -> Tokenizer:
    try:
        fields = json.loads(definition)
        ours = isinstance(fields, dict) and fields.get("kind") in ("chars", "bytes")
    except json.JSONDecodeError as error:
        raise ValueError(f"tokenizer {source}: not JSON (line {error.lineno})") from None
    try:
        if ours:  # the tokenizer of a prepared folder
            return Chars(fields["alphabet"], fields["eos"]) if fields["kind"] == "chars" else Bytes(fields["eos"])
        return Subwords(definition, eos)
    except ValueError:
        raise
    except (KeyError, TypeError) as error:
        raise ValueError(f"tokenizer {source}: damaged ({error})") from None
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer {source}: not a tokenizer.json of the `tokenizers` library ({error})") from None
