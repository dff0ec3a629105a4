"""What a diagnostic found, as files that anybody can load again without the model.

    analysis/step_0000008/CausalScore.json    what was asked, how, of which model, and the figures
    analysis/step_0000008/CausalScore.npz     the arrays
    analysis/step_0000008/CausalScore.png     the figure, drawn from these two

The JSON file is written last: where it stands, the answer is whole.
"""

from __future__ import annotations

import io
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from depthlit.files import replacing


@dataclass
class Answer:
    """One diagnostic's findings about one model at one step.

    Args:
        name: of the files, and in TensorBoard under depth/.
        diagnostic: import path of the class that asked.
        definition: what was asked, with its equation and source.
        options: the arguments with which the class was made; made anew with them it can draw the figure again.
        model: strategy and shape.
        step: optimizer steps completed.
        windows: the text it was asked about: source, count, length, seed, tokens counted.
        numbers: the scalars.
        values: the arrays; what their axes mean is part of the definition.
        notes: remarks for the reader, such as why there is no answer for this strategy.
        cost: seconds and block evaluations that it took.
    """

    VERSION: ClassVar[int] = 1

    name: str
    diagnostic: str
    definition: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    step: int = 0
    windows: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    cost: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """Of a figure: strategy, depth and step."""
        layers = self.model.get("shape", {}).get("n_layer", "?")
        return f"{self.model.get('strategy', 'model')}, {layers} layers, step {self.step}"

    def save(self, folder: Path) -> Path:
        """Write NAME.npz, then NAME.json, into the folder; returns the latter's path."""
        path = folder / f"{self.name}.json"
        content = dict(vars(self))
        values = content.pop("values")
        content["arrays"] = {key: list(value.shape) for key, value in values.items()}
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **values)
        with replacing(path.with_suffix(".npz")) as file:
            file.write(buffer.getvalue())
        text = json.dumps({"version": self.VERSION, **_plain(content)}, indent=2, allow_nan=False)
        with replacing(path) as file:
            file.write(text.encode() + b"\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Answer:
        """Read NAME.json, or the NAME.npz or NAME.png beside it, with its arrays.

        Raises:
            ValueError: no answer there, or one of a later version of the format.
        """
        path = Path(path).with_suffix(".json")
        if not path.is_file():
            raise ValueError(f"no answer of a diagnostic at {path}")
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.pop("version") > cls.VERSION:
            raise ValueError(f"{path} was written by a later version of depthlit; this one knows {cls.VERSION}")
        content.pop("arrays")
        with np.load(path.with_suffix(".npz"), allow_pickle=False) as arrays:
            answer = cls(**content, values=dict(arrays))
        answer.numbers = {key: math.nan if value is None else value for key, value in answer.numbers.items()}
        return answer


def png(figure: Figure, dpi: int = 120) -> bytes:
    """The figure as the bytes of a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()


def pixels(image: bytes) -> np.ndarray:
    """(height, width, 3) bytes of a PNG file, as TensorBoard takes it."""
    return np.asarray(Image.open(io.BytesIO(image)).convert("RGB")).copy()


def _plain(value: Any) -> Any:
    """Made of what JSON knows; a number that is not finite becomes null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, np.integer):
        return int(value)
    return value if isinstance(value, str | int | bool | None) else str(value)
