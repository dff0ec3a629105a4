"""Several processes agreeing on things that are no tensors, and on whether to go on after an error."""

from __future__ import annotations

from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

PATIENCE = timedelta(seconds=20)
"""How long a rank that has failed waits for the others before it concludes that they hang in a collective."""

_turns = count()  # every rank takes the same turns, so the number names the turn on all of them


def world() -> tuple[int, int]:
    """(rank, number of ranks) of this process; (0, 1) where there is only one."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def gathered(value: Any) -> list[Any]:
    """What every rank gave, by rank, on all of them. A collective: every rank must call it."""
    _, size = world()
    if size == 1:
        return [value]
    values: list[Any] = [None] * size
    dist.all_gather_object(values, value)
    return values


def agree(error: BaseException | None, patience: timedelta = PATIENCE) -> list[str]:
    """Tell all ranks whether this one has failed; every rank must call it at the same point.

    The word goes round beside the collectives, through the store of the process group, since a rank that waits in a
    collective for one that has failed cannot be reached through another collective.

    Args:
        error: what went wrong on this rank, or None.
        patience: how long to wait for the others if this rank has failed.

    Returns:
        One line per failed rank, the same list on all ranks; empty if none has failed.

    Raises:
        RuntimeError: this rank has failed and another does not answer: it waits in a collective, so no rank can go on.
    """
    rank, size = world()
    line = "" if error is None else f"rank {rank}: {type(error).__name__}: {error}"
    if size == 1:
        return [line] if line else []
    store, turn = dist.distributed_c10d._get_default_store(), next(_turns)
    keys = [f"depthlit/agree/{turn}/{other}" for other in range(size)]
    store.set(keys[rank], line)
    try:
        store.wait(keys, patience if error is not None else timedelta(hours=24))
    except (RuntimeError, ValueError) as silence:  # DistStoreError is a RuntimeError
        raise RuntimeError(f"{line} (another rank waits in a collective: stopping all)") from (error or silence)
    lines = [store.get(key).decode() for key in keys]
    if turn:  # whoever is here has read the turn before
        store.delete_key(f"depthlit/agree/{turn - 1}/{rank}")
    return [other for other in lines if other]
