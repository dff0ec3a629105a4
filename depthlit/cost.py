"""What a wiring costs at a shape, without data and without weights: parameters, FLOPs, key-value cache, saved bytes.

    python tools/cost.py --shape 400m-L24 --residual HC --tokens 4096 --json

Formulas: DepthBench, App. D (arXiv:2609.32534). Every strategy counts its own wiring (`Reader.flops`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from depthlit.connection import Counting, ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec

PEAK_TFLOPS = {
    "A100": 312.0,
    "A10G": 70.0,
    "A10": 125.0,
    "B200": 2250.0,
    "GB200": 2500.0,
    "GH200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "L4": 121.0,
    "L40S": 362.0,
    "L40": 181.0,
    "MI250X": 383.0,
    "MI300X": 1307.0,
    "RTX 3090": 71.0,
    "RTX 4090": 165.0,
    "RTX 5090": 209.0,
    "T4": 65.0,
    "V100": 125.0,
}
"""Dense (not sparse) matrix throughput in bf16, or fp16 where there is no bf16, from the vendors' data sheets."""


def peak_flops(device_name: str) -> float | None:
    """Peak dense bf16 FLOPs per second of an accelerator by the name torch gives it; None when it is not known."""
    known = [name for name in PEAK_TFLOPS if name in device_name]
    return PEAK_TFLOPS[max(known, key=len)] * 1e12 if known else None


def on_meta(shape: ShapeSpec, strategy: ResidualStrategy) -> Decoder:
    """The decoder without memory behind its weights."""
    with torch.device("meta"):
        return Decoder(shape, strategy, seed=0)


def parameters(decoder: Decoder) -> dict[str, int]:
    """Parameters by part; `residual` is what the wiring has beyond the Pre-LN model of the same shape.

    Count before sharding: a sharded module shows only its own part.
    """
    total, shape = sum(p.numel() for p in decoder.parameters()), decoder.shape
    return {
        "total": total,
        "backbone": shape.backbone(),
        "embedding_and_head": shape.embedding_and_head(),
        "residual": total - shape.parameters(),
    }


def routing_flops(decoder: Decoder, counting: Counting = "exact") -> float:
    """FLOPs per token of all connections and the exit."""
    joins = [join for block in decoder.blocks for join in (block.join_attn, block.join_mlp)]
    return sum(join.flops(counting) for join in joins) + decoder.exit.flops(counting)


def training_flops(decoder: Decoder, tokens: int) -> float:
    """FLOPs per token of a training step at sequence length `tokens`: three forwards (one, and two for backward)."""
    return 3 * (decoder.shape.forward_flops(tokens) / tokens + routing_flops(decoder))


def kv_bytes(shape: ShapeSpec, tokens: int, bytes_per_value: int = 2) -> int:
    """Key-value cache of one sequence: 2 L D_kv T values. No strategy adds to it (MoDA's slots live within a token)."""
    return 2 * shape.n_layer * shape.d_kv * tokens * bytes_per_value


def saved_bytes(decoder: Decoder, tokens: Tensor) -> int:
    """Bytes that autograd keeps between forward and backward of decoder(tokens, targets), weights not counted.

    Every storage is counted once, however many operations refer to it.

    Args:
        tokens: (B, T).
    """
    weights = {p.untyped_storage()._cdata for p in decoder.parameters()}
    kept: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = decoder(tokens, tokens)
    del loss  # alive until here, so that no storage was freed and its address taken again
    return sum(kept.values())


def saved_bytes_without_memory(
    shape: ShapeSpec, strategy: ResidualStrategy, batch: int, tokens: int, dtype: torch.dtype
) -> int:
    """`saved_bytes` of a model that is never allocated, so that 1.6B parameters fit on a laptop."""
    decoder = on_meta(shape, strategy)
    with FakeTensorMode():
        for module in decoder.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(weight.shape, dtype=dtype))
        return saved_bytes(decoder, torch.zeros(batch, tokens, dtype=torch.long))


def cost(
    shape: ShapeSpec, strategy: ResidualStrategy, tokens: int, batch: int = 1, counting: Counting = "exact"
) -> dict[str, Any]:
    """Everything that can be told without running the model.

    Args:
        tokens: sequence length T of a prefill, and of a training step for the saved bytes.
        batch: sequences B, for the saved bytes.
        counting: of the routing: "paper" or "exact", see `Reader.flops`.

    Returns:
        parameters by part; flops of one prefill of T tokens with logits at the last or at all positions, routing
        included, and the routing alone; flops per token of a training step; bytes of the bf16 key-value cache of one
        sequence; bytes that autograd keeps at batch B in bf16.
    """
    decoder = on_meta(shape, strategy)
    routing = routing_flops(decoder, counting) * tokens
    return {
        "parameters": parameters(decoder),
        "flops": {
            "prefill_last": shape.forward_flops(tokens, "last") + routing,
            "prefill_all": shape.forward_flops(tokens, "all") + routing,
            "residual": routing,
            "training_per_token": training_flops(decoder, tokens),
        },
        "kv_bytes": kv_bytes(shape, tokens),
        "saved_bytes": saved_bytes_without_memory(shape, strategy, batch, tokens, torch.bfloat16),
        "tokens": tokens,
        "batch": batch,
        "counting": counting,
    }
