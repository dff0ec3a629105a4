"""depthlit: find out whether a deeper network computes more."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from depthlit.decoder import Decoder
    from depthlit.shape import ShapeSpec

__version__ = "0.1.0"
__all__ = ["Decoder", "ShapeSpec", "__version__"]


def __getattr__(name: str) -> Any:
    """Import torch only when it is asked for: `depthlit --help` must answer at once."""
    home = {"Decoder": "depthlit.decoder", "ShapeSpec": "depthlit.shape"}
    if name not in home:
        raise AttributeError(f"module 'depthlit' has no attribute {name!r}")
    return getattr(import_module(home[name]), name)
