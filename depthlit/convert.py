"""Checkpoints from one form into another: sharded to whole, public Llama-type models in, trained decoders out.

Files from others are read without running code from them: safetensors, JSON, and torch files with weights_only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import depthlit
from depthlit import residuals, zero
from depthlit.answer import replacing
from depthlit.connection import ResidualStrategy
from depthlit.engines import by_number
from depthlit.module import LanguageModel, as_plain, as_shape, as_strategy
from depthlit.shape import ShapeSpec

LLAMA = {
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn.o_proj",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp.down_proj",
}
"""Our branches, and what Llama-type checkpoints of Hugging Face call them within a layer."""


def llama_strategy() -> ResidualStrategy:
    """The strategy that wires a Llama."""
    for name in residuals.__all__:
        strategy = getattr(residuals, name)
        if "llama" in strategy.foreign:
            return strategy()
    raise ValueError("no residual strategy says how a Llama's norms are called")


def llama_keys(shape: ShapeSpec, strategy: ResidualStrategy) -> dict[str, str]:
    """Our names of all weights, and Hugging Face's.

    Raises:
        ValueError: there are no public models of this strategy.
    """
    if "llama" not in strategy.foreign:
        raise ValueError(
            f"{strategy} has no counterpart among Hugging Face's Llama-type models; export it as safetensors instead"
        )
    keys = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
    if not shape.tie_embeddings:
        keys["head.weight"] = "lm_head.weight"
    for ours, theirs in {**LLAMA, **strategy.foreign["llama"]}.items():
        keys |= {f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for i in range(shape.n_layer)}
    return keys


# Whole checkpoints


def save_whole(path: Path, settings: Mapping[str, Any], weights: Mapping[str, Tensor], step: int = 0) -> None:
    """A checkpoint in one file that `depthlit validate --ckpt_path` loads, without an optimizer.

    Args:
        settings: as `LanguageModel.settings` gives them.
        weights: of the decoder, by our names.
        step: optimizer steps completed.
    """
    from lightning import __version__ as lightning

    content = {
        "state_dict": {f"decoder.{name}": weight for name, weight in weights.items()},
        LanguageModel.CHECKPOINT_HYPER_PARAMS_KEY: dict(settings),
        "global_step": step,
        "epoch": 0,
        "pytorch-lightning_version": lightning,
        "loops": {},
    }
    with replacing(path) as file:
        torch.save(content, file)


def load_whole(path: Path) -> dict[str, Any]:
    """A checkpoint in one file: `state_dict`, `hyper_parameters`, `global_step`.

    Raises:
        ValueError: it is a folder, or not a checkpoint of depthlit.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a sharded checkpoint; make it whole first: tools/convert.py consolidate {path}")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise ValueError(f"{path} cannot be read as a checkpoint ({type(error).__name__}: {reason})") from None
    if not isinstance(content, dict) or LanguageModel.CHECKPOINT_HYPER_PARAMS_KEY not in content:
        raise ValueError(f"{path} is not a checkpoint of depthlit: it does not name a shape and a residual strategy")
    return content


def consolidate(folder: Path, output: Path) -> None:
    """Make one file of a sharded checkpoint: FSDP2's or FSDP's (distributed checkpoint format), or DeepSpeed's.

    Raises:
        ValueError: the folder is neither.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder, so there is nothing to consolidate")
    if (folder / ".metadata").is_file():
        content = _from_distributed(folder)
    elif (folder / "checkpoint").is_dir():
        content = _from_deepspeed(folder)
    else:
        raise ValueError(f"{folder} is neither a distributed checkpoint of torch nor one of DeepSpeed")
    with replacing(output) as file:
        torch.save(content, file)


def _from_distributed(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    shards: dict[str, Any] = {}
    _load_state_dict(
        shards, storage_reader=FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    content = torch.load(folder / "meta.pt", map_location="cpu", weights_only=True)
    optimizers = [by_number(shards[key]) for key in sorted(shards) if key.startswith("optimizer_")]
    return {**content, "state_dict": shards.get("state_dict", shards.get("model")), "optimizer_states": optimizers}


def _from_deepspeed(folder: Path) -> dict[str, Any]:
    whole = zero.read(folder)
    return {**whole.rest, "state_dict": whole.weights, "optimizer_states": [whole.optimizer]}


# Hugging Face


def shape_of(config: Mapping[str, Any]) -> ShapeSpec:
    """The shape of a Hugging Face Llama-type config.

    Raises:
        ValueError: the model has something that our backbone has not: rope scaling, biases, a head size of its own,
            another activation.
    """
    if "LlamaForCausalLM" not in (config.get("architectures") or ["LlamaForCausalLM"]):
        raise ValueError(f"{config['architectures'][0]} is not a Llama-type model (LlamaForCausalLM)")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope scaling ({rope.get('rope_type', rope.get('type'))}) is not supported")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    for key, must in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if config.get(key, must) != must:
            raise ValueError(f"{key} is {config[key]!r}, this backbone has {must!r}")
    if (config.get("head_dim") or width // heads) != width // heads:
        raise ValueError(f"head_dim {config['head_dim']} is not hidden_size / num_attention_heads = {width // heads}")
    return ShapeSpec(
        n_layer=config["num_hidden_layers"],
        d_model=width,
        n_head=heads,
        n_kv_head=config.get("num_key_value_heads"),
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_seq_len=config.get("max_position_embeddings", 2048),
    )


def config_of(shape: ShapeSpec) -> dict[str, Any]:
    """The Hugging Face config of a shape; the inverse of `shape_of`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_ff,
        "num_hidden_layers": shape.n_layer,
        "num_attention_heads": shape.n_head,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_embeddings,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_seq_len,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }


def import_llama(folder: Path, output: Path) -> ShapeSpec:
    """A folder with config.json and safetensors, as Hugging Face keeps Llama-type models, as one checkpoint of ours.

    Raises:
        ValueError: a file is missing, the model does not fit the backbone, or weights are missing or of another size.
    """
    from safetensors.torch import load_file

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json, so it is not a Hugging Face model")
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} has no .safetensors; other formats may run code and are not read")
    try:
        shape = shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    theirs = {key: weight for file in files for key, weight in load_file(file).items()}
    strategy = llama_strategy()
    with torch.device("meta"):
        expected = depthlit.Decoder(shape, strategy, seed=0).state_dict()
    weights = {}
    for ours, name in llama_keys(shape, strategy).items():
        if name not in theirs:
            raise ValueError(f"{folder} lacks {name}")
        if theirs[name].shape != expected[ours].shape:
            raise ValueError(f"{folder}: {name} is {tuple(theirs[name].shape)}, not {tuple(expected[ours].shape)}")
        weights[ours] = theirs[name]
    if shape.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    settings = LanguageModel(shape, strategy).settings()
    save_whole(output, settings, weights)
    return shape


def export(checkpoint: Path, folder: Path, form: str = "safetensors") -> None:
    """Write a checkpoint as model.safetensors and config.json.

    Args:
        checkpoint: in one file.
        folder: where to; made if needed.
        form: "huggingface" for a model that `transformers` loads as LlamaForCausalLM; "safetensors" for every strategy,
            with our names of weights and {shape, residual} as config.

    Raises:
        ValueError: the checkpoint is not ours, or has no counterpart at Hugging Face.
    """
    from safetensors.torch import save

    content = load_whole(checkpoint)
    settings = content[LanguageModel.CHECKPOINT_HYPER_PARAMS_KEY]
    shape, strategy = as_shape(settings["shape"]), as_strategy(settings["residual"])
    names = content["state_dict"].items()
    weights = {name.removeprefix("decoder."): weight for name, weight in names if name.startswith("decoder.")}
    config: dict[str, Any]
    if form == "huggingface":
        keys = llama_keys(shape, strategy)
        weights = {theirs: weights[ours] for ours, theirs in keys.items()}
        config = {**config_of(shape), "torch_dtype": str(weights["model.norm.weight"].dtype).removeprefix("torch.")}
    else:
        if shape.tie_embeddings:
            weights.pop("head.weight")
        config = {"shape": settings["shape"], "residual": as_plain(strategy), "step": content.get("global_step", 0)}
    with replacing(folder / "model.safetensors") as file:
        file.write(save({key: weight.contiguous() for key, weight in weights.items()}, metadata={"format": "pt"}))
    with replacing(folder / "config.json") as file:
        file.write(json.dumps(config, indent=2).encode() + b"\n")
