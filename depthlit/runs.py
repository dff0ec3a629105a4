"""A run folder: what a run leaves behind so that it can be repeated, continued and believed.

config.yaml                 the whole configuration; `depthlit fit --config config.yaml` repeats the run
config_resume_STEP.yaml     the configuration with which the run was continued at this step
config.SUBCOMMAND.yaml      that of the last `validate`, `test` or `predict` in this folder
env.json                    versions, command line, seeds, data, device; named like the configs for later runs
metrics.csv, events.out.*   the figures
checkpoints/                last.ckpt and its elders
analysis/                   what diagnostics found
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout

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


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """A lock on a run folder; gone with the process, however that ends.

    Raises:
        ValueError: another process trains in this folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"another process is training in {folder}; wait for it, or name another --trainer.default_root_dir"
        ) from None
    try:
        yield
    finally:
        (folder / ".lock").unlink(missing_ok=True)
        lock.release()


def folder_of(checkpoint: Path) -> Path:
    """The run folder in which a checkpoint lies."""
    return checkpoint.absolute().parent.parent


def config_of(folder: Path) -> Path | None:
    """The newest configuration with which a run was trained."""
    resumed = sorted(folder.glob("config_resume_*.yaml"), key=lambda file: int(file.stem.rpartition("_")[2]))
    first = folder / "config.yaml"
    return resumed[-1] if resumed else first if first.is_file() else None


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
        raise ValueError(f"{path} cannot be read as a checkpoint: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or "global_step" not in content:
        raise ValueError(f"{path} is not a checkpoint of depthlit")
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
    saved = content.get("hyper_parameters") or _read_json(folder_of(checkpoint) / "env.json").get("model")
    if saved:
        rows = differences(architecture(saved), architecture(settings))
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
    saved = yaml.safe_load(file.read_text(encoding="utf-8"))
    compared = ("model.", "data.", "trainer.", "seed_everything")
    rows = [row for row in differences(saved, config) if row[0].startswith(compared)]
    if not rows:
        return ""
    width = max(len(key) for key, _, _ in rows)
    lines = [f"  {key:<{width}}  {_short(old)} -> {_short(new)}" for key, old, new in rows]
    return "\n".join(
        [f"Values that differ from {os.path.relpath(file)}; those of the command line and the configs hold:", *lines]
    )


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


def write_text(path: Path, text: str) -> None:
    """Write a file so that it is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """`write_text` of a mapping as indented JSON."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


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


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


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
