"""A diagnostic that asks about evaluation sets instead of windows of validation text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor

from depthlit.asking import unfinished
from depthlit.data.tokenizers import Tokenizer, open_tokenizer
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Batch, Diagnostic, Share, Subject
from depthlit.interventions import prefixes
from depthlit.ranks import gathered, world
from depthlit.tasks.scoring import Encode, Scored, batches, score


class Evaluation(Diagnostic):
    """Scores pairs of prompt and reference. A subclass makes them in `load`, and names routes to score them along.

    Long scoring keeps what it has so far beside its future answer, so that a run killed in the middle goes on there.

    Args:
        tokenizer: a tokenizer.json or a hub id; the training data's own if left out.
        limit: only the first so many documents of each set.
        bos: id put in front of every prompt; none if left out, as GPT-NeoX's tokenizer adds none.
        tokens_per_batch: tokens, padding included, that go through the network at once.
        windows: of validation text: they are not asked about.
        length: of those.
    """

    def __init__(
        self,
        tokenizer: str | None = None,
        limit: int | None = None,
        bos: int | None = None,
        tokens_per_batch: int = 16_384,
        windows: int = 1,
        length: int = 1,
        **schedule: Any,
    ) -> None:
        super().__init__(windows=windows, length=length, **schedule)
        self.tokenizer, self.limit, self.bos, self.tokens_per_batch = tokenizer, limit, bos, tokens_per_batch
        self.items: list[Scored] = []
        self.sets: dict[str, int] = {}
        self.notes: list[str] = []

    def load(self, encode: Encode, max_seq_len: int) -> None:
        """Fill `items` with what is to be scored, `sets` with documents by set, `notes` with what is left out."""
        raise NotImplementedError(f"{type(self).__name__} must define load(encode, max_seq_len)")

    def routes(self, order: Order) -> list[Order]:
        """The orders along which every item is scored; the intact one first."""
        return [order]

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Read the sets now: what is missing must be known at the start, not after hours of training."""
        if stage not in ("fit", "validate") or self.items or self.notes:
            return
        data = trainer.datamodule  # type: ignore[attr-defined]
        self.prepare(self._tokenizer(data), pl_module.shape.max_seq_len)  # type: ignore[union-attr, arg-type]
        if trainer.is_global_zero:
            for note in self.notes:
                print(f"{self.name}: {note}", flush=True)

    def prepare(self, tokenizer: Tokenizer | Encode, max_seq_len: int) -> None:
        """Read and encode the sets; `setup` does it for a trainer.

        Args:
            tokenizer: of `depthlit.data`, or any function text -> ids.
            max_seq_len: longest input in tokens.
        """
        encode: Callable[[str], Sequence[int]]
        if isinstance(tokenizer, Tokenizer):
            own = tokenizer

            def encode(text: str) -> Sequence[int]:
                return own.encode([text])[0].tolist()

        else:
            encode = tokenizer
        self.items, self.sets, self.notes = [], {}, []
        self.load(encode, max_seq_len)

    def _tokenizer(self, data: Any) -> Tokenizer:
        if self.tokenizer is not None:
            found = open_tokenizer(self.tokenizer)
            if found is None:
                raise ValueError(f"{self.name}: tokenizer chars has no alphabet of its own; leave it out")
            return found
        if not hasattr(data, "corpora"):
            raise ValueError(f"{self.name}: the data module has no tokenizer; give one with `tokenizer`")
        return data.corpora[0].tokenizer

    def check(self, decoder: Decoder) -> None:
        highest = max((max(item.ids) for item in self.items if item.ids), default=0)
        if highest >= decoder.shape.vocab_size:
            raise ValueError(
                f"{self.name}: token id {highest} does not exist in a vocabulary of {decoder.shape.vocab_size}; "
                "the tokenizer is not the one of the training data"
            )

    def steps(self, order: Order) -> int:
        groups = len(batches(self.items, self.tokens_per_batch))
        return -(-groups // world()[1]) * prefixes(*self.routes(order))

    def about(self, batches: Sequence[Batch], source: str) -> dict[str, Any]:
        return {
            "source": ", ".join(self.sets), "count": sum(self.sets.values()), "seed": self.seed, "unit": "document",
            "tokens": sum(item.n_scored for item in self.items), "documents": dict(self.sets),
        }  # fmt: skip

    def measure(self, subject: Subject, batch: Batch) -> dict[str, Any]:
        return {}  # the windows are not asked about

    def together(self, subject: Subject, share: Share) -> dict[str, Any]:
        """`nll`: (n_route, n_item), sums over the scored tokens in nats."""
        routes = self.routes(subject.order)

        def forward(tokens: Tensor, targets: Tensor) -> Sequence[Tensor]:
            return subject.nll_along({"tokens": tokens, "targets": targets}, routes)

        rank, size = world()
        sums = np.zeros((len(routes), len(self.items)))
        device = next(subject.decoder.parameters()).device
        path, title = None, ""
        if subject.folder is not None and self.items:
            path, title = unfinished(subject.folder, self.name), self._title(subject, routes)
        done = gathered(self._read(path, title) if rank == 0 else {})[0]
        for i, values in done.items():
            sums[:, i] = values
        for mine, losses in score(
            forward, self.items, tokens_per_batch=self.tokens_per_batch, device=device, rank=rank, world=size,
            done=set(done),
        ):  # fmt: skip
            for theirs, values in gathered((mine, losses.numpy())):
                sums[:, theirs] = values
                if rank == 0 and path is not None:
                    self._append(path, title, theirs, values)
        return {"nll": sums}

    # What is done so far: a line that names what is scored, then one line per batch

    def _title(self, subject: Subject, routes: Sequence[Order]) -> str:
        """What is scored, along which routes, and by which weights: others give the longest item another loss. Every
        rank must call this."""
        content = repr([(item.ids, item.n_scored) for item in self.items]).encode()
        ids = torch.tensor(
            [max((item.ids for item in self.items), key=len)], device=next(subject.decoder.parameters()).device
        )
        loss = float(subject.nll({"tokens": ids[:, :-1], "targets": ids[:, 1:]}).double().sum())
        names = {"items": content, "routes": repr(list(routes)).encode()}
        digests = {name: hashlib.blake2b(text, digest_size=8).hexdigest() for name, text in names.items()}
        return json.dumps({**digests, "loss": f"{loss:.5g}"})

    def _append(self, path: Path, title: str, items: Sequence[int], values: np.ndarray) -> None:
        new = not path.is_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            if new:
                file.write(title + "\n")
            file.write(json.dumps([list(items), values.tolist()]) + "\n")

    def _read(self, path: Path | None, title: str) -> dict[int, list[float]]:
        """Sums by item; a line cut short by a kill counts as not there."""
        if path is None or not path.is_file():
            return {}
        first, *lines = path.read_text(encoding="utf-8").split("\n")
        done: dict[int, list[float]] = {}
        whole = [title]
        if first == title:
            for line in lines[:-1]:
                items, values = json.loads(line)
                done |= {i: [route[k] for route in values] for k, i in enumerate(items)}
                whole.append(line)
        if not done:
            path.unlink()
        elif lines[-1]:
            path.write_text("\n".join(whole) + "\n", encoding="utf-8")
        return done
