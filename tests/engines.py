"""FSDP1 and DeepSpeed on CPU processes, for tests: both engines refuse a CPU for want of a device index only."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from depthlit.decoder import Block
from depthlit.engines import FSDP2


class CPUFSDP(FSDPStrategy):
    """FSDP1. Only with sharded checkpoints: on a CPU, torch's full ones hold one moment of Adam twice."""

    def __init__(self) -> None:
        super().__init__(auto_wrap_policy={Block}, state_dict_type="sharded")

    def _setup_model(self, model: nn.Module) -> nn.Module:
        from torch.distributed.fsdp import FullyShardedDataParallel

        settings = dict(self.kwargs)
        self.kwargs.pop("auto_wrap_policy", None)
        wrapped = FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config, sharding_strategy=self.sharding_strategy, **settings,
        )  # fmt: skip
        return super()._setup_model(wrapped)


class CPUDeepSpeed(DeepSpeedStrategy):
    """DeepSpeed over plain gloo, without compiling an operator."""

    def __init__(self, stage: int) -> None:
        os.environ["DS_ACCELERATOR"] = "cpu"
        super().__init__(stage=stage)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        import deepspeed.ops

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def _setup_model_and_optimizer(self, model: nn.Module, optimizer: Any, lr_scheduler: Any = None) -> Any:
        import argparse

        import deepspeed

        engine, ready, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self.local_rank), config=self.config, model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad], optimizer=optimizer,
            dist_init_required=False,
        )  # fmt: skip
        return engine, ready


ENGINES = {
    "ddp": lambda: "ddp",
    "fsdp": CPUFSDP,
    "fsdp2": lambda: "fsdp2",
    "fsdp2 in one file": lambda: FSDP2(save_distributed_checkpoint=False),
    "lightning's own": ModelParallelStrategy,
    "zero1": lambda: CPUDeepSpeed(1),
    "zero2": lambda: CPUDeepSpeed(2),
    "zero3": lambda: CPUDeepSpeed(3),
}
"""Engine by a name that a script can be given."""
