"""What DeepSpeed's ZeRO leaves on disk, put together: weights in fp32 and AdamW's moments, by parameter.

Each rank keeps, for every group of the optimizer, one flat vector of its part of the weights and one for each moment.
Stages 1 and 2 cut the whole group into as many pieces as there are ranks, stage 3 each parameter.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")
STAGES_1_AND_2 = ("base_optimizer_state", "single_partition_of_fp32_groups")
STAGE_3 = ("optimizer_state_dict", "fp32_flat_groups")
DEEPSPEED_S = frozenset(
    (
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "global_steps", "global_samples",
        "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    )
)  # fmt: skip
"""What DeepSpeed adds to what Lightning and a module keep."""


@dataclass
class Whole:
    """A checkpoint of DeepSpeed put together.

    Attributes:
        weights: by name, as of the LightningModule.
        optimizer: as `torch.optim.AdamW.state_dict` gives it.
        rest: what Lightning keeps beside them.
    """

    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    rest: dict[str, Any]


def read(folder: Path) -> Whole:
    """Read a folder that DeepSpeed has saved, on any number of ranks.

    Args:
        folder: the one with `checkpoint` in it.

    Raises:
        ValueError: files of some ranks are missing, or DeepSpeed is not installed.
    """
    model, parts = _load(folder)
    by_parameter = parts[0]["zero_stage"].value == 3
    adam, flat = STAGE_3 if by_parameter else STAGES_1_AND_2
    states = [part[adam] for part in parts]
    pieces: dict[str, list[list[Tensor]]] = {"weight": [part[flat] for part in parts]}  # kind -> rank -> group
    for kind in MOMENTS:
        pieces[kind] = [[state["state"][i][kind] for i in range(len(state["state"]))] for state in states]
    weights: dict[str, Tensor] = {}
    moments: dict[int, dict[str, Tensor]] = {}
    groups = []
    for shapes, settings in zip(model["param_shapes"], states[0]["param_groups"], strict=True):
        groups.append({**settings, "params": list(range(len(moments), len(moments) + len(shapes)))})
        for _ in shapes:
            moments[len(moments)] = {"step": states[0]["state"][0]["step"].clone()}
    names = [name for shapes in model["param_shapes"] for name in shapes]
    for kind, ranks in pieces.items():
        cut = _by_parameter(model, ranks) if by_parameter else _by_group(model, ranks, parts[0])
        for i, (name, tensor) in enumerate(zip(names, cut, strict=True)):
            if kind == "weight":
                weights[name] = tensor
            else:
                moments[i][kind] = tensor
    for alias, name in model["shared_params"].items():
        weights[alias] = weights[name]
    rest = {key: model[key] for key in model if key not in DEEPSPEED_S}
    return Whole(weights, {"state": moments, "param_groups": groups}, rest)


def _load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The first rank's account of the model, and the optimizer's of every rank in order."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # or it says at length that it found no other
    try:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError as error:
        raise ValueError(f"reading {folder} needs the package deepspeed: pip install deepspeed") from error
    parts: dict[int, dict[str, Any]] = {}
    with torch.serialization.safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address]):
        models = sorted((folder / "checkpoint").glob("*mp_rank_00_model_states.pt"))
        if not models:
            raise ValueError(f"{folder} has no *_model_states.pt")
        model = torch.load(models[0], map_location="cpu", weights_only=True)
        for file in (folder / "checkpoint").glob("*_optim_states.pt"):
            rank = int(file.name.partition("pp_rank_")[2].partition("_")[0])
            parts[rank] = torch.load(file, map_location="cpu", weights_only=True)["optimizer_state_dict"]
    if sorted(parts) != list(range(model["dp_world_size"])):
        raise ValueError(f"{folder} was saved by {model['dp_world_size']} ranks, of which {len(parts)} are there")
    return model, [parts[rank] for rank in sorted(parts)]


def _by_group(model: dict[str, Any], ranks: list[list[Tensor]], first: dict[str, Any]) -> Iterator[Tensor]:
    padding = first.get("param_alignment_paddings")
    for i, shapes in enumerate(model["param_shapes"]):
        whole, offset = torch.cat([groups[i] for groups in ranks]), 0
        for j, shape in enumerate(shapes.values()):
            yield whole[offset : offset + shape.numel()].view(shape).clone()
            offset += shape.numel() + (padding[i][j] if padding else 0)


def _by_parameter(model: dict[str, Any], ranks: list[list[Tensor]]) -> Iterator[Tensor]:
    whole, offset = [torch.cat(groups) for groups in ranks], 0
    for shapes in model["param_shapes"]:
        for shape in shapes.values():
            own = -(-shape.numel() // len(whole))  # of each rank; the last one's is filled up
            yield torch.cat([part[offset : offset + own] for part in whole])[: shape.numel()].view(shape)
            offset += own
