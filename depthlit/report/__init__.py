"""The report: figures, tables and one page, made of run folders alone.

`found.py` reads run folders and lists those that cannot be read; `cells.py` puts runs together that differ in their
seed alone; `noise.py` says how sure a mean is and when a difference is one; `known.py` has the names, colours and
published numbers of `known.yaml`. Each file in `figures/` is one figure or table of a paper: what it needs, which study
fills it, and how it is made (`entry.py`). `write.py` puts all of it into a folder: index.html, figures/, tables/.
"""
