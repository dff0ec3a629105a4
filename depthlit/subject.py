"""The network as a diagnostic meets it, and the forms in which an answer is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from depthlit.connection import Reader, State
from depthlit.decoder import Decoder, Order
from depthlit.interventions import abreast, headless, tapped

Batch = Mapping[str, Tensor]
"""`tokens` (B, T), `targets` (B, T) with -1 where a token does not count, and perhaps `documents` (B, T)."""


class Mean(NamedTuple):
    """A mean to be: totals and numbers are added over batches and ranks, and divided once."""

    total: Tensor
    number: Tensor


class Samples(NamedTuple):
    """Values of single windows or documents, one per row, kept apart: batches and ranks are laid end to end."""

    rows: Tensor


class NotApplicable(Exception):
    """Raised by `measure` where the question has no answer for this strategy; the message is kept as the answer."""


def token_mean(values: Tensor, counted: Tensor) -> Mean:
    """The mean over the tokens that count, summed in fp64.

    Args:
        values: (B, T, ...).
        counted: (B, T) bool.
    """
    chosen = values[counted]
    return Mean(chosen.sum(0, dtype=torch.float64), counted.sum())


def per_unit(values: Tensor, batch: Batch) -> tuple[Samples, Samples]:
    """Sums over the counted tokens of each document where borders are known, else of each window, in fp64.

    Args:
        values: (B, T, ...).
        batch: with `targets`, and perhaps `documents`.

    Returns:
        Totals (U, ...) and numbers of tokens (U,); a unit without counted tokens is left out.
    """
    targets, documents = batch["targets"], batch.get("documents")
    first = torch.zeros_like(targets, dtype=torch.bool)
    first[:, 0] = True
    if documents is not None:
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    counted = targets >= 0
    unit = (first.flatten().cumsum(0) - 1).view_as(targets)[counted]
    chosen = values[counted].double()
    units = int(first.sum())
    totals = chosen.new_zeros(units, *chosen.shape[1:]).index_add_(0, unit, chosen)
    numbers = chosen.new_zeros(units).index_add_(0, unit, chosen.new_ones(len(chosen)))
    return Samples(totals[numbers > 0]), Samples(numbers[numbers > 0])


def on_cpu(part: Mapping[str, Any]) -> dict[str, Any]:
    """What `measure` gave, as fp64 tensors on the CPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, Mean | Samples):
            return type(value)(*(torch.as_tensor(item).detach().to("cpu", torch.float64) for item in value))
        return torch.as_tensor(value).detach().to("cpu", torch.float64)

    return {key: moved(value) for key, value in part.items()}


def merged(parts: Sequence[Mapping[str, Any]], rows: Sequence[int]) -> dict[str, np.ndarray]:
    """Batches made one: sums of totals over sums of counts, rows end to end, plain values averaged over windows."""
    whole: dict[str, np.ndarray] = {}
    for key, first in (parts[0] if parts else {}).items():
        values = [part[key] for part in parts]
        if isinstance(first, Samples):
            whole[key] = torch.cat([value.rows for value in values]).numpy()
        elif isinstance(first, Mean):
            total, number = (sum(item) for item in zip(*values, strict=True))
            whole[key] = np.asarray(cast(Tensor, total / number).numpy())
        else:
            total = sum(value * n for value, n in zip(values, rows, strict=True))
            whole[key] = np.asarray(cast(Tensor, total / sum(rows)).numpy())
    return whole


def as_array(value: Any) -> np.ndarray:
    """A tensor or number as an array."""
    return np.asarray(value.detach().cpu().numpy() if isinstance(value, Tensor) else value)


class Subject:
    """The network as a diagnostic meets it, whatever strategy wires it and whatever engine runs it.

    Args:
        model: what is called: the engine's wrapper around the LightningModule, a LightningModule, or a decoder.
        decoder: the decoder in it.
        ran: called whenever a block runs, for a progress bar.
        folder: where the answer will be kept, for long work that saves its progress; None if it is not kept.

    Attributes:
        shape, strategy: of the decoder.
        layers: range(L), the blocks.
        order: the order of the intact network.
        evaluations: how many states have gone through a block so far.
        abreast: how many states of different routes may go through a block as one batch.
    """

    def __init__(
        self, model: nn.Module, decoder: Decoder, ran: Callable[[], Any] = lambda: None, folder: Path | None = None
    ) -> None:
        self.model, self.decoder, self.ran, self.folder = model, decoder, ran, folder
        self.shape, self.strategy = decoder.shape, decoder.strategy
        self.layers = range(decoder.shape.n_layer)
        self.order: Order = tuple(self.layers)
        self.evaluations, self.abreast = 0, 1

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count every run of a block in `evaluations`, and tell `ran`."""

        def count(*call: Any) -> None:
            for _ in self.decoder.paths:
                self.evaluations += 1
                self.ran()

        with ExitStack() as hooks:
            for block in self.decoder.blocks:
                hooks.callback(block.register_forward_pre_hook(count).remove)
            yield

    def forward(self, batch: Batch, **more: Any) -> Any:
        """The root forward, through the wrapper: that is what gathers sharded weights."""
        return self.model(batch["tokens"], documents=batch.get("documents"), **more)

    def logits(self, batch: Batch) -> Tensor:
        """(B, T, V)"""
        return cast(Tensor, self.forward(batch))

    def nll(self, batch: Batch) -> Tensor:
        """(B, T): loss in nats per token; 0 where a token does not count."""
        return cast(Tensor, self.forward(batch, targets=batch["targets"]))

    def nll_along(self, batch: Batch, routes: Sequence[Order]) -> list[Tensor]:
        """The loss (B, T) along several orders; what they have in common at the beginning is computed once."""
        with abreast(self.decoder, self.abreast):
            return cast("list[Tensor]", self.forward(batch, targets=batch["targets"], routes=routes))

    def watch(
        self,
        batch: Batch,
        see: Callable[[int, Reader, State], None],
        routes: Sequence[Order] | None = None,
        sublayers: bool = False,
        autocast: bool = False,
    ) -> None:
        """Run the network up to the exit, without a head, and call see(place, reader, state) on the way.

        Args:
            batch: the windows.
            see: `place` l means "before block l", and L "at the exit"; `decoder.path` tells the steps taken so far.
            routes: orders to walk.
            sublayers: stop before every sublayer; place k then means "before sublayer k", and 2 L "at the exit".
            autocast: let the engine's autocasting hold inside `see`, as it does in the forward.
        """
        decoder = self.decoder
        places: dict[Reader, int] = {decoder.exit: (2 if sublayers else 1) * len(self.layers)}
        for i, block in enumerate(decoder.blocks):
            if sublayers:
                places |= {block.join_attn: 2 * i, block.join_mlp: 2 * i + 1}
            else:
                places[block.join_attn] = i
        device = batch["tokens"].device.type

        def look(reader: Reader, state: State) -> None:
            with torch.autocast(device, enabled=autocast and torch.is_autocast_enabled(device)):
                see(places[reader], reader, state)

        with headless(decoder), tapped(decoder, look, sublayers), abreast(decoder, self.abreast):
            self.forward(batch, routes=routes)

    def states(self, batch: Batch) -> list[Tensor]:
        """The L + 1 probe states (B, T, any): z_l before block l, and z_L at the exit."""
        found: list[Tensor] = []
        self.watch(batch, lambda place, reader, state: found.append(reader.probe(state)))
        return found

    @staticmethod
    def counted(batch: Batch) -> Tensor:
        """(B, T) bool: the tokens that count, those with a target."""
        return batch["targets"] >= 0


class Share(NamedTuple):
    """One rank's part of the windows, for a diagnostic that asks about all of them together."""

    batches: list[Batch]  # equally many on every rank; a filling-up batch has no target
    tokens: int  # that count, on all ranks together
    ranks: int
