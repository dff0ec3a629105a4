"""Sharding, and engines by name beside Lightning's own (ddp, fsdp, deepspeed_stage_2, ...)."""

from __future__ import annotations

import math
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer

from depthlit.checkpoint_files import Background
from depthlit.decoder import Decoder
from depthlit.optim import plain_name


class FSDP2(ModelParallelStrategy):
    """FSDP2: weights, gradients and moments in shards over all ranks, each rank on its own data. On CPUs too.

    Lightning's ModelParallelStrategy left to its defaults would split matrices over the devices of a node and let all
    of them train on the same data.

    Args:
        save_distributed_checkpoint: each rank writes its part into a folder, rather than the first rank everything
            into a file. Either kind can be gone on with on another number of ranks.
        process_group_backend: nccl or gloo; chosen by device when left out.
        timeout: of the process group.
    """

    def __init__(
        self,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
    ) -> None:
        super().__init__("auto", 1, save_distributed_checkpoint, process_group_backend, timeout)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_processes * self.num_nodes
        super().setup_environment()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        files = self.checkpoint_io
        if not (self._save_distributed_checkpoint and isinstance(files, Background)):
            return super().save_checkpoint(checkpoint, filepath, storage_options)
        moments = {f"optimizer_{i}": state for i, state in enumerate(checkpoint.pop("optimizer_states", []))}
        files.save_shards({"state_dict": checkpoint.pop("state_dict"), **moments}, checkpoint, Path(filepath))

    @property
    def _root(self) -> nn.Module:
        assert self.model is not None
        return self.model

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """In shards by name; whole as a single process has it. Lightning numbers parameters as the model lists them,
        which is another order than that of the optimizer's groups."""
        whole = not self._save_distributed_checkpoint
        options = StateDictOptions(full_state_dict=whole, cpu_offload=True)
        state = get_optimizer_state_dict(self._root, getattr(optimizer, "_optimizer", optimizer), options=options)
        return by_number(state) if whole and self.is_global_zero else state

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        options, model = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True), self._root
        set_model_state_dict(model, content.pop("state_dict"), options=options)
        for optimizer, state in zip(self.optimizers, content.pop("optimizer_states", []), strict=False):
            set_optimizer_state_dict(model, optimizer, by_name(state, model, optimizer), options=options)
        return content


def by_number(state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer by numbers of parameters, as a single process has it, from that by their names."""
    groups: list[dict[str, Any]] = []
    names: list[str] = []
    for group in state["param_groups"]:
        groups.append({**group, "params": list(range(len(names), len(names) + len(group["params"])))})
        names += group["params"]
    return {"state": {i: state["state"][name] for i, name in enumerate(names)}, "param_groups": groups}


def by_name(state: dict[str, Any], model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The inverse of `by_number`, with the names of an optimizer at hand."""
    known = {parameter: plain_name(name) for name, parameter in model.named_parameters()}
    groups: list[dict[str, Any]] = []
    names: dict[int, str] = {}
    for group, here in zip(state["param_groups"], optimizer.param_groups, strict=True):
        own = dict(zip(group["params"], (known[p] for p in here["params"]), strict=True))
        groups.append({**group, "params": list(own.values())})
        names |= own
    return {"state": {names[i]: moments for i, moments in state["state"].items()}, "param_groups": groups}


StrategyRegistry.register("fsdp2", FSDP2, description="FSDP2 over all ranks")


def check_devices(accelerator: Any) -> None:
    """Refuse GPUs that are not there.

    Raises:
        ValueError: says what to do.
    """
    if accelerator in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(
            f"trainer.accelerator is {accelerator}, and torch finds no GPU here (torch.cuda.is_available() is false): "
            "look at the driver and the build of torch, or take --trainer.accelerator cpu"
        )


def check_ranks(trainer: pl.Trainer, accelerator: Any) -> None:
    """Refuse more processes than devices; say so where one CPU takes the place of GPUs that were hoped for.

    Raises:
        ValueError: says what to do.
    """
    launched = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if launched > trainer.num_devices:
        raise ValueError(
            f"{launched} processes were launched on this machine, and trainer.devices comes to {trainer.num_devices} "
            f"({type(trainer.accelerator).__name__}): launch as many, or give --trainer.devices {launched} "
            "(and --trainer.accelerator cpu, to run on CPUs)"
        )
    hoped_for = accelerator == "auto" and "bf16" in str(trainer.precision)
    if hoped_for and isinstance(trainer.accelerator, CPUAccelerator) and trainer.is_global_zero:
        print("torch finds no GPU here: this will run on the CPU, in bf16", file=sys.stderr)


def shards_weights(engine: Any) -> bool:
    """Whether an engine holds a block's weights only while that block runs."""
    return isinstance(engine, FSDPStrategy | ModelParallelStrategy) or (
        isinstance(engine, DeepSpeedStrategy) and bool(engine.zero_stage_3)
    )


def shard(decoder: Decoder, engine: ModelParallelStrategy) -> None:
    """FSDP2: every block, then the rest, over the ranks that see different data. The stream keeps its dtype.

    Raises:
        ValueError: the engine would let ranks train on the same data, or split matrices.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = engine.device_mesh
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            f"trainer.strategy.tensor_parallel_size is {mesh['tensor_parallel'].size()} (Lightning's default is all "
            f"devices), which depthlit does not do: set it to 1, and data_parallel_size to {mesh.size()}"
        )
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    for block in decoder.blocks:
        fully_shard(block, mesh=mesh["data_parallel"], mp_policy=policy)
    fully_shard(decoder, mesh=mesh["data_parallel"], mp_policy=policy)


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters of an optimizer that have a gradient."""
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def gradient_norm(engine: Any, optimizer: Optimizer) -> torch.Tensor | None:
    """() L2 norm of the whole gradient, of all shards; None under DeepSpeed, which keeps gradients to itself."""
    if isinstance(engine, DeepSpeedStrategy):
        return None
    if isinstance(engine, FSDPStrategy):
        return engine.model.clip_grad_norm_(math.inf)  # type: ignore[union-attr, operator]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters_of(optimizer) if p.grad is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def keep_fp32(engine: Any, precision: str) -> None:
    """Let DeepSpeed leave weights in fp32 under bf16-mixed, as every other engine does; `autocast` then does the rest.

    By itself it trains in bf16, with a copy in fp32 for the update, so that the residual stream would be in bf16 too.
    """
    if isinstance(engine, DeepSpeedStrategy) and precision == "bf16-mixed" and isinstance(engine.config, dict):
        engine.config.setdefault("bf16", {"enabled": False})


def autocast(engine: Any) -> AbstractContextManager[Any]:
    """What makes matrix products bf16 in a forward under DeepSpeed; with other engines Lightning does."""
    if isinstance(engine, DeepSpeedStrategy) and engine.precision_plugin.precision == "bf16-mixed":
        return torch.autocast(engine.root_device.type, torch.bfloat16)
    return nullcontext()


def background_group(engine: Any) -> Any:
    """The group in which the ranks of an engine write shards in the background; None where one rank writes one file.

    Raises:
        ValueError: the engine cannot write in the background.
    """
    if isinstance(engine, FSDP2) and engine._save_distributed_checkpoint:
        return dist.new_group(backend="gloo")
    if isinstance(engine, FSDPStrategy | DeepSpeedStrategy):
        raise ValueError(f"trainer.save_in_background is not possible with {type(engine).__name__}; take fsdp2 or ddp")
    return None


def check_writes(engine: Any) -> None:
    """Whether the checkpoints of an engine can be gone on with by others.

    Raises:
        ValueError: it would write one file in which AdamW's moments are numbered otherwise than in the optimizer.
    """
    whole = getattr(engine, "_state_dict_type", "") == "full" or not getattr(engine, "_save_distributed_checkpoint", 1)
    if whole and not isinstance(engine, FSDP2):
        raise ValueError(
            f"{type(engine).__name__} mixes up AdamW's moments in one file: let it save in shards (state_dict_type "
            "sharded, save_distributed_checkpoint true), or take fsdp2"
        )


def check_readable(engine: Any, checkpoint: Path, ranks: int) -> None:
    """Whether an engine can go on from a checkpoint; one in a file is read by all but DeepSpeed.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    deepspeed = isinstance(engine, DeepSpeedStrategy)
    parts = len(list(checkpoint.glob("checkpoint/*_optim_states.pt")))
    whole = f"make one file of it: tools/convert.py consolidate {checkpoint}"
    if deepspeed and not parts:
        raise ValueError(f"{checkpoint} is not DeepSpeed's, which goes on from its own only; take fsdp2 or ddp")
    if deepspeed and parts != ranks:
        raise ValueError(
            f"{checkpoint} was saved by {parts} ranks and DeepSpeed can go on with as many only, not {ranks}; for "
            f"another number {whole}, and take fsdp2 or ddp"
        )
    if checkpoint.is_file() and isinstance(engine, FSDPStrategy | ModelParallelStrategy) and type(engine) is not FSDP2:
        raise ValueError(f"{type(engine).__name__} would mix up AdamW's moments of {checkpoint}; take fsdp2")
    third = (checkpoint / "checkpoint" / "zero_pp_rank_0_mp_rank_00_model_states.pt").is_file()
    if deepspeed and engine.zero_stage_3 is not third:
        raise ValueError(f"{checkpoint} was{'' if third else ' not'} saved under ZeRO stage 3; take the stage it has")
    if parts and not deepspeed:
        raise ValueError(f"{checkpoint} is DeepSpeed's, which {type(engine).__name__} cannot read; {whole}")
    if checkpoint.is_dir() and not isinstance(engine, ModelParallelStrategy | FSDPStrategy | DeepSpeedStrategy):
        raise ValueError(f"{checkpoint} is in shards, which {type(engine).__name__} cannot read; {whole}")
