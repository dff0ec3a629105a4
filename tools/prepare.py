"""Turn text into the shards that training streams.

    python tools/prepare.py --input book.txt --tokenizer chars --output data/book
    python tools/prepare.py --input HuggingFaceFW/fineweb-edu/sample/10BT --tokenizer EleutherAI/gpt-neox-20b \\
        --output data/fineweb-edu-10bt --num_workers 16

Then: depthlit fit ... --data.path data/book
"""

from __future__ import annotations

import os
import sys

from jsonargparse import ArgumentParser

from depthlit.data.prepare import Preparation, prepare

VAL_FILES = "with --split file, parts of the names of the files that are held out"
OVERWRITE = "replace a folder prepared with other settings or older files; its content stays until the new is whole"


def main(argv: list[str] | None = None) -> int:
    parser = ArgumentParser(prog="prepare.py", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--config", action="config", help="a YAML file with any of the options below")
    parser.add_argument("--input", nargs="+", type=str, required=True, help="files, folders, URLs, dataset ids")
    parser.add_argument("--output", type=str, required=True, help="folder to write; a half-written one is continued")
    parser.add_class_arguments(Preparation, skip={"input", "val_files"})
    parser.add_argument("--val_files", nargs="+", type=str, default=[], help=VAL_FILES)
    parser.add_argument("--num_workers", type=int, default=os.cpu_count() or 1, help="processes; 0 for none")
    parser.add_argument("--overwrite", action="store_true", help=OVERWRITE)
    options = parser.parse_args(argv).as_dict()
    options.pop("config")
    output, workers, overwrite = (options.pop(k) for k in ("output", "num_workers", "overwrite"))
    try:
        prepare(Preparation(**options), output, workers, overwrite)
    except ValueError as error:
        print(f"prepare.py: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: stopped; run the same command again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
