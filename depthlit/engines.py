"""Sharding, and engines by name beside Lightning's own (ddp, fsdp, deepspeed_stage_2, ...)."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch.distributed.constants import default_pg_timeout

from depthlit.checkpoint_files import Background
from depthlit.decoder import Decoder


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


StrategyRegistry.register("fsdp2", FSDP2, description="FSDP2 over all ranks")


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
