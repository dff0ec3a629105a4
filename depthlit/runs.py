"""A run folder: what a run leaves behind so that it can be repeated, continued and believed.

config.yaml                 the whole configuration; `depthlit fit --config config.yaml` repeats the run
config_resume_STEP.yaml     the configuration with which the run was continued at this step
config.SUBCOMMAND.yaml      that of the last `validate`, `test` or `predict` in this folder
env.json                    versions, command line, seeds, data, device; named like the configs for later runs
metrics.csv, events.out.*   the figures
checkpoints/                last.ckpt and its elders
analysis/                   what diagnostics found
earlier_N/                  figures of a run that ended before its first checkpoint
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from depthlit import config_files
from depthlit.data.manifest import mismatch
from depthlit.files import remove, write_text

SETTINGS = {"shape": {"n_layer": int}, "residual": {"class_path": str}}
CHECKPOINT = {"global_step": int, "pytorch-lightning_version": str, "hyper_parameters": SETTINGS}
"""What every checkpoint says of itself."""

LIBRARIES = ("torch", "lightning", "litdata", "torchmetrics", "jsonargparse", "numpy", "deepspeed")


def last_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run folder, a file or (sharded) a folder; None if it holds none.

    That is last.ckpt; where this link is lost, the one with the highest step.
    """
    path = folder / "checkpoints" / "last.ckpt"
    others = sorted(path.parent.glob("step_*.ckpt")) if path.parent.is_dir() else []
    return path if path.exists() else others[-1] if others else None


def check_whole(path: Path) -> None:
    """Compare every part of a checkpoint file with the checksum it was written with.

    Raises:
        ValueError: a part differs.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as parts:
            spoilt = parts.testzip()
        if spoilt:
            raise ValueError(f"{path} is damaged (checksum of {spoilt}); go on from an older one with --ckpt_path")


def check_folder(folder: Path) -> None:
    """Make a run folder where there is none.

    Raises:
        ValueError: something else stands in its place or in that of a part of it, or it cannot be written.
    """
    remedy = "name another --trainer.default_root_dir"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("checkpoints", "analysis"):
            if (folder / name).exists() and not (folder / name).is_dir():
                raise ValueError(f"{folder / name} is not a folder, which a run needs there; {remedy}")
        for name in ("metrics.csv", "config.yaml", "env.json"):
            if (folder / name).is_dir():
                raise ValueError(f"{folder / name} is a folder, where a run keeps a file; {remedy}")
    except OSError as error:
        raise ValueError(f"{folder} cannot be a run folder ({error.strerror}); {remedy}") from None
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise ValueError(f"{folder} cannot be written; {remedy}")


def put_aside(folder: Path) -> Path | None:
    """Move what a run left that has no checkpoint to go on from into earlier_1, earlier_2, ...

    Returns:
        That folder; None if there were no figures.
    """
    if not (folder / "metrics.csv").exists():
        return None
    aside = next(path for i in count(1) if not (path := folder / f"earlier_{i}").exists())
    aside.mkdir()
    for pattern in ("metrics.csv", "config*.yaml", "env*.json", "events.out.tfevents.*", "analysis"):
        for path in folder.glob(pattern):
            path.rename(aside / path.name)
    return aside


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A lock on a run folder; gone with the process, however that ends.

    Raises:
        ValueError: another process trains in this folder, or it cannot be a run folder.
    """
    check_folder(folder)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process is training in {folder}; wait for it, or name another --trainer.default_root_dir"
        ) from None
    try:
        for stale in (*folder.glob(".*.partial"), *folder.glob("checkpoints/.*.partial")):
            remove(stale)  # of a run that was killed
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()


def folder_of(checkpoint: Path) -> Path:
    """The run folder in which a checkpoint lies."""
    return checkpoint.absolute().parent.parent


def config_of(folder: Path) -> Path | None:
    """The newest configuration with which a run was trained."""
    found = {int(match[1]): file for file in folder.glob("config_resume_*.yaml")
             if (match := re.fullmatch(r"config_resume_(\d+)", file.stem))}  # fmt: skip
    first = folder / "config.yaml"
    return found[max(found)] if found else first if first.is_file() else None


def architecture(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of a model's settings those that decide its weights: {"shape": {...}, "residual": {"class_path": ..., ...}}."""
    residual = settings["residual"]
    name = residual["class_path"].removeprefix("depthlit.residuals.").rpartition(".")[2]
    return _plain({"shape": settings["shape"], "residual": {"strategy": name, **residual.get("init_args", {})}})


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What a checkpoint says about itself, without its tensors: `global_step` and `hyper_parameters`, where known.

    Args:
        path: a file, or the folder that a sharded engine writes.

    Raises:
        ValueError: the file is not a checkpoint, or holds more than tensors and plain values.
    """
    file = path / "meta.pt" if path.is_dir() else path
    if not file.is_file():
        return {}
    try:
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read as a checkpoint: it is damaged, or holds more than tensors and plain values; name "
            "another with --ckpt_path, such as an older one beside it"
        ) from error
    if problem := mismatch(content, CHECKPOINT):
        raise ValueError(f"{path} is not a checkpoint of depthlit ({problem}); name another --ckpt_path")
    return {key: content[key] for key in ("global_step", "hyper_parameters") if key in content}


def check_architecture(settings: Mapping[str, Any], checkpoint: Path) -> int | None:
    """Compare a model with the one a checkpoint was saved from; return the checkpoint's step, if it tells.

    Args:
        settings: of the model at hand, `LanguageModel.settings()`.
        checkpoint: a file or a sharded folder.

    Raises:
        ValueError: they differ; the message names each key with both values.
    """
    content = read_checkpoint(checkpoint)
    saved = content.get("hyper_parameters") or _settings_in(folder_of(checkpoint) / "env.json")
    if saved:
        rows = differences(architecture(saved), architecture(settings))
        if any(key == "residual.strategy" for key, _, _ in rows):  # whose settings have nothing to do with each other
            rows = [row for row in rows if row[0] == "residual.strategy" or not row[0].startswith("residual.")]
        if rows:
            listed = "; ".join(f"model.{key} is {new} here, {old} there" for key, old, new in rows)
            raise ValueError(
                f"{checkpoint} is a checkpoint of another architecture: {listed}. Set it back, or name another "
                "--trainer.default_root_dir"
            )
    return content.get("global_step")


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(dotted key, old value, new value) of every value that differs; a value that one side lacks counts as None."""
    before, after = dict(_flat(old)), dict(_flat(new))
    keys = dict.fromkeys((*before, *after))
    return [(key, before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)]


def changes(folder: Path, config: Mapping[str, Any]) -> str:
    """A table of the values in which a configuration differs from the one a run was last trained with; "" if none."""
    file = config_of(folder)
    if file is None:
        return ""
    try:
        saved = config_files.load(file)
    except ValueError as error:
        return f"nothing to compare the configuration with: {error}"
    compared = ("model.", "data.", "trainer.", "seed_everything")
    rows = [row for row in differences(saved, config) if row[0].startswith(compared)]
    if not rows:
        return ""
    width = max(len(key) for key, _, _ in rows)
    lines = [f"  {key:<{width}}  {_named(old)} -> {_named(new)}" for key, old, new in rows]
    return "\n".join(
        [f"Values that differ from {os.path.relpath(file)}; those of the command line and the configs hold:", *lines]
    )


def _named(value: Any) -> Any:
    """A list of classes by the names of these alone; anything else as it is."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) and "class_path" in item for item in value):
        return ", ".join(str(item["class_path"]).rpartition(".")[2] for item in value)
    return value


def environment(**facts: Any) -> dict[str, Any]:
    """Where and with what this run was made, as plain values for env.json.

    Args:
        facts: what only the run knows: seeds, data, architecture, parameters.
    """
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "working_directory": os.getcwd(),
        "depthlit": {"version": _version("depthlit"), **_git(Path(__file__).parent)},
        "git": _git(Path.cwd()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "device": _device(),
        **{name: _plain(value) for name, value in facts.items()},
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a mapping as indented JSON, whole or not at all."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def _settings_in(path: Path) -> dict[str, Any]:
    """The model's settings in an env.json, of which those checkpoints know nothing that DeepSpeed writes."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {} if mismatch(found, {"model": SETTINGS}) else found["model"]


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree


def _plain(value: Any) -> Any:
    """The value made of dicts, lists, numbers, strings and None only, so that JSON and safe loading take it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(folder: Path) -> dict[str, Any]:
    """Commit of the repository a folder belongs to and whether it has changes; {} outside a repository."""

    def ask(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    return {} if not commit else {"commit": commit, "dirty": bool(ask("status", "--porcelain", "-uno"))}


def _device() -> dict[str, Any]:
    if torch.cuda.is_available():
        return {"name": torch.cuda.get_device_name(), "count": torch.cuda.device_count(), "cuda": torch.version.cuda}
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.is_file() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"name": name or platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
