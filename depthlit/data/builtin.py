"""The corpus that every Python carries: pydoc's topics and the docstrings of the standard library.

About 2 MB of English. It differs a little between Python versions; the manifest stores the version and a hash of the
text.
"""

from __future__ import annotations

import ast
import sysconfig
import warnings
from functools import lru_cache
from pathlib import Path

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "encodings"}


@lru_cache(maxsize=1)
def pydoc_documents() -> list[tuple[str, str]]:
    """(name, text) of every document: one per topic of `help()`, one per module with all its docstrings in order."""
    from pydoc_data.topics import topics

    documents = [(f"topic {name}", topics[name].strip()) for name in sorted(topics)]
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if SKIPPED & set(inside.parts) or inside.name.startswith("_sysconfigdata"):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in other people's source
                tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        nodes = [n for n in ast.walk(tree) if isinstance(n, kinds)]
        nodes.sort(key=lambda n: getattr(n, "lineno", 0))
        text = "\n\n".join(doc for n in nodes if (doc := ast.get_docstring(n)))
        if text:
            documents.append((f"module {inside.as_posix()}", text))
    return documents


CORPORA = {"pydoc": pydoc_documents}
