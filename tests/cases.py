"""Which equation each strategy must equal, setting by setting; also the settings that the contract is tested with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import reference as ref
from torch import Tensor

Reference = Callable[[ref.Net], Tensor]

CASES: list[tuple[str, dict[str, Any], Reference]] = [
    ("PreLN", {}, ref.pre_ln),
    ("PostLN", {}, ref.post_ln),
    ("SandwichLN", {}, partial(ref.sandwich_ln, embed_norm=False)),
    ("SandwichLN", {"embedding_norm": True}, partial(ref.sandwich_ln, embed_norm=True)),
    ("LNS", {}, partial(ref.lns, scale="block")),
    ("LNS", {"scale": "depth"}, partial(ref.lns, scale="depth")),
    ("LNS", {"scale": 0.3}, partial(ref.lns, scale=0.3)),
    ("DeepNorm", {}, partial(ref.deep_norm, norm=ref.layer_norm)),
    ("DeepNorm", {"norm": "layernorm_bias"}, partial(ref.deep_norm, norm=ref.layer_norm)),
    ("DeepNorm", {"norm": "rmsnorm"}, partial(ref.deep_norm, norm=ref.rms)),
    ("KEEL", {}, partial(ref.keel, alpha="n_sublayer", plain=2)),
    ("KEEL", {"preset": "depthbench"}, partial(ref.keel, alpha="n_sublayer", plain=1)),
    ("KEEL", {"alpha": "n_layer"}, partial(ref.keel, alpha="n_layer", plain=2)),
    ("KEEL", {"alpha": 3.5}, partial(ref.keel, alpha=3.5, plain=2)),
    ("ReZero", {}, partial(ref.re_zero, normed=True)),
    ("ReZero", {"norm": False}, partial(ref.re_zero, normed=False)),
    ("LayerScale", {}, ref.layer_scale),
    *(
        ("MoDA", {"norm": norm, "depth_rope": rope}, partial(ref.moda, post_norm=norm == "post", depth_rope=rope))
        for norm in ("pre", "post")
        for rope in ("both", "none", "q_only")
    ),
    ("MoDA", {"preset": "depthbench"}, partial(ref.moda, post_norm=False, depth_rope="q_only")),
    ("MoDA", {"memory": "attention"}, partial(ref.moda, post_norm=False, depth_rope="both", mlp_slots=False)),
    ("MoDA", {"memory": "none"}, ref.pre_ln),
    ("MoDA", {"memory": "none", "norm": "post"}, ref.post_ln),
    ("HC", {}, partial(ref.hyper_connections, streams=4)),
    ("HC", {"preset": "depthbench"}, partial(ref.hyper_connections, streams=4)),
    ("HC", {"streams": 2, "tanh": False}, partial(ref.hyper_connections, streams=2, tanh=False)),
    ("HC", {"streams": 3, "dynamic": False}, partial(ref.hyper_connections, streams=3, dynamic=False)),
    ("HC", {"streams": 1}, partial(ref.hyper_connections, streams=1)),
    (
        "HC",
        {"read_out": "mean", "eps": 1e-2},
        partial(ref.hyper_connections, streams=4, read_out="mean", eps=1e-2),
    ),
    ("HC", {"read_out": "norm_then_sum"}, partial(ref.hyper_connections, streams=4, read_out="norm_then_sum")),
    ("MHC", {}, ref.m_hyper_connections),
    ("MHC", {"preset": "depthbench"}, partial(ref.m_hyper_connections, order="liger", eps=1e-6)),
    *(
        ("MHC", settings, partial(ref.m_hyper_connections, **settings))
        for settings in (
            {"streams": 2, "reads": "free"},
            {"writes": "free"},
            {"mixing": "softmax"},
            {"mixing": "free"},
            {"mixing": "identity"},
            {"read_out": "sum"},
            {"read_out": "norm_then_sum"},
            {"streams": 3, "eps": 1e-2},
        )
    ),
    ("FullAttnRes", {}, ref.full_attn_res),
    ("FullAttnRes", {"preset": "depthbench"}, partial(ref.full_attn_res, key_eps=1e-5, norm_eps=1e-5)),
    ("FullAttnRes", {"key_gain": False, "key_eps": 1e-2}, partial(ref.full_attn_res, key_eps=1e-2)),
    ("BlockAttnRes", {}, ref.block_attn_res),
    (
        "BlockAttnRes",
        {"preset": "depthbench", "block_size": 2},
        partial(ref.block_attn_res, key_eps=1e-5, norm_eps=1e-5, block_size=2),
    ),
    *(
        (name, settings | more, partial(equation, **settings | same))
        for name, equation, more, same in (
            ("BlockAttnRes", ref.block_attn_res, {"key_gain": False}, {}),
            ("WAV", ref.wav, {"max_match": 1.3}, {"rho": 1.3}),
            ("HAARES", partial(ref.wav, details=("split",)), {"match_eps": 0.1}, {"match_eps": 0.1}),
        )
        for settings in ({"block_size": 3}, {"block_size": 8}, {"num_blocks": 3})
    ),
    (
        "BlockAttnRes",
        {"num_blocks": 3, "remainder": "balanced"},
        partial(ref.block_attn_res, num_blocks=3, balanced=True),
    ),
    ("WAV", {}, ref.wav),
    ("WAV", {"block_size": 4, "mask_duplicates": True}, partial(ref.wav, block_size=4, masked=True)),
    (
        "WAV",
        {"block_size": 4, "learn_bias": False, "detail_bias": -0.5},
        partial(ref.wav, block_size=4, constant_bias=-0.5),
    ),
    (
        "WAV",
        {"block_size": 4, "details": ("duplicate", "phase")},
        partial(ref.wav, block_size=4, details=("duplicate", "phase")),
    ),
    ("HAARES", {}, partial(ref.wav, details=("split",))),
    (
        "HAARES",
        {"block_size": 4, "mask_duplicates": True},
        partial(ref.wav, details=("split",), block_size=4, masked=True),
    ),
    ("DeltaAttnRes", {}, ref.delta_attn_res),
    ("DeltaAttnRes", {"gate": "zero", "key_gain": False}, partial(ref.delta_attn_res, gate="zero")),
    (
        "DeltaAttnRes",
        {"gate": "sigmoid", "null_source": True},
        partial(ref.delta_attn_res, gate="sigmoid", nothing=True),
    ),
    ("DeltaAttnRes", {"deltas": "block", "block_size": 3}, partial(ref.delta_attn_res, block_size=3)),
    ("MHC", {"sinkhorn_iterations": 3}, partial(ref.m_hyper_connections, iterations=3)),
    (
        "MHC",
        {"sinkhorn_iterations": 1, "sinkhorn_order": "liger"},
        partial(ref.m_hyper_connections, iterations=1, order="liger"),
    ),
    (
        "MHC",
        {"sinkhorn_iterations": 2, "sinkhorn_rounding": True},
        partial(ref.m_hyper_connections, iterations=2, rounding=True),
    ),
]
"""Name and settings of a strategy, and the equation it must equal."""
