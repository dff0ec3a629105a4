"""From text to batches: preparation into LitData shards, and the DataModule that streams them."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthlit.data.module import TokenData

__all__ = ["TokenData"]


def __getattr__(name: str) -> Any:
    """Preparation starts worker processes that have no use for torch and Lightning."""
    if name != "TokenData":
        raise AttributeError(f"module 'depthlit.data' has no attribute {name!r}")
    from depthlit.data.module import TokenData

    return TokenData
