"""Rules of the house that hold for the source itself."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from models import CLASSES

ROOT = Path(__file__).parent.parent


def names_in_code(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every identifier and every string without blanks: what code can depend on, prose apart."""
    for node in ast.walk(ast.parse(source)):
        for field in ("id", "attr", "name", "asname", "module", "arg", "value"):
            text = getattr(node, field, None)
            if isinstance(text, str) and not re.search(r"\s", text):
                yield getattr(node, "lineno", 0), text


def test_only_residuals_name_a_strategy() -> None:
    files = [
        *(f for f in (ROOT / "depthlit").rglob("*.py") if "residuals" not in f.parts),
        *(ROOT / "callbacks").rglob("*.py"),
        *(ROOT / "tools").rglob("*.py"),
    ]
    assert len(files) > 5
    names = re.compile(rf"\b({'|'.join(cls.__name__ for cls in CLASSES)})\b")
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text}"
        for file in files
        for line, text in names_in_code(file.read_text(encoding="utf-8"))
        if names.search(text)
    ]
    assert not found, "\n".join(found)
    planted = 'from depthlit.residuals import PreLN as P\nx = P\ny = "PreLN"\nz = MyPreLN\n"a PreLN"\nr.PreLN()'
    assert [line for line, text in names_in_code(planted) if names.search(text)] == [1, 3, 6]
