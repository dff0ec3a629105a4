"""Teacher-forced scoring: the log-likelihood of a reference after a prompt, summed over the reference's tokens.

Conventions are those of lm-evaluation-harness 0.4.13 (see `encode_pair`), so that numbers can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Encode = Callable[[str], Sequence[int]]
Forward = Callable[[Tensor, Tensor], Sequence[Tensor]]
"""(tokens, targets), both (B, T) -> one (B, T) tensor of token losses per route."""


@dataclass(frozen=True)
class Scored:
    """A sequence of token ids, of which the last ones are scored.

    Args:
        ids: prompt and reference, at most the context plus one.
        n_scored: tokens at the end that count.
        truncated: tokens lost on the left.
        merged: the prompt's own tokens are not a prefix of the joint ones: a token straddles the join.
        n_bytes: UTF-8 bytes of the scored text, with the whitespace moved over from the prompt.
    """

    ids: tuple[int, ...]
    n_scored: int
    truncated: int = 0
    merged: bool = False
    n_bytes: int = 0


def with_space(prompt: str, reference: str) -> str:
    """The reference with a space in front, if neither side of the join has whitespace."""
    bare = prompt and reference and not prompt[-1].isspace() and not reference[0].isspace()
    return f" {reference}" if bare else reference


def encode_pair(
    encode: Encode, prompt: str, reference: str, max_seq_len: int, prefix: int | None = None, joint: bool = True
) -> Scored:
    """Tokens of prompt + reference and how many of them are the reference's.

    All whitespace at the prompt's end moves to the front of the reference; both are encoded jointly, and the tokens
    after the prompt's own count are the reference's. Only the last `max_seq_len + 1` tokens are kept.

    Args:
        encode: text -> ids, without special tokens.
        max_seq_len: longest input T; T + 1 ids make T predictions.
        prefix: id put in front (BOS); with None, an empty prompt borrows nothing and the reference's first token,
            which nothing precedes, is not scored.
        joint: False encodes prompt and reference apart, as they are (OLMo's in-loop evaluation).
    """
    bare = prompt.rstrip() if joint else prompt
    scored_text = prompt[len(bare) :] + reference
    alone = list(encode(bare)) if bare else []
    whole = list(encode(bare + scored_text)) if joint else [*alone, *encode(scored_text)]
    merged = whole[: len(alone)] != alone
    n_scored = max(0, len(whole) - len(alone))
    if prefix is not None:
        whole = [prefix, *whole]
    ids = whole[-(max_seq_len + 1) :]
    return Scored(
        tuple(ids),
        min(n_scored, max(0, len(ids) - 1)),
        truncated=len(whole) - len(ids),
        merged=merged,
        n_bytes=len(scored_text.encode()),
    )


def batches(items: Sequence[Scored], tokens_per_batch: int) -> list[list[int]]:
    """Indices of items in batches of near lengths: each holds at most this many tokens, padding included.

    Items without a scored token are left out: their sum is 0.
    """
    order = sorted((i for i, item in enumerate(items) if item.n_scored), key=lambda i: (-len(items[i].ids), i))
    groups: list[list[int]] = []
    for i in order:
        longest = len(items[groups[-1][0]].ids) if groups else 0
        if not groups or (len(groups[-1]) + 1) * longest > tokens_per_batch:
            groups.append([])
        groups[-1].append(i)
    return groups


def collate(items: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """tokens and targets, (B, T): padded on the right; targets are -1 wherever nothing is scored."""
    T = max(len(item.ids) for item in items) - 1
    tokens, targets = torch.zeros(len(items), T, dtype=torch.long), torch.full((len(items), T), -1)
    for row, item in enumerate(items):
        n = len(item.ids) - 1
        tokens[row, :n] = torch.tensor(item.ids[:-1])
        targets[row, n - item.n_scored : n] = torch.tensor(item.ids[1:])[n - item.n_scored :]
    return tokens, targets


def score(
    forward: Forward,
    items: Sequence[Scored],
    *,
    tokens_per_batch: int = 16_384,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    done: frozenset[int] | set[int] = frozenset(),
) -> Iterator[tuple[list[int], Tensor]]:
    """Negative log-likelihood of every item, batch by batch.

    Every rank calls `forward` equally often, whatever its share: a rank that has run out repeats its first batch and
    throws the answer away, so that collectives inside the forward always meet.

    Args:
        done: items not to score again (a resumed run).

    Yields:
        (indices of the items of this rank's batch, (n_route, n_item) sums in nats, fp64); no indices when there was
        nothing left to do.
    """
    groups = [group for group in ([i for i in g if i not in done] for g in batches(items, tokens_per_batch)) if group]
    for start in range(0, len(groups), world):
        mine = groups[start + rank] if start + rank < len(groups) else []
        tokens, targets = collate([items[i] for i in mine or groups[0]])
        losses = forward(tokens.to(device), targets.to(device))
        sums = torch.stack([loss.double().sum(-1) for loss in losses]).cpu()
        yield mine, sums if mine else sums[:, :0]
