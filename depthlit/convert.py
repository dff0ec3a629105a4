"""Checkpoints from one form into another: sharded to whole, public Llama-type models in, trained decoders out.

Files from others are read without running code from them: safetensors, JSON, and torch files with weights_only.
But torch reads the `.metadata` of a sharded checkpoint by pickle: consolidate folders of your own only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

import depthlit
from depthlit import residuals, zero
from depthlit.answer import replacing
from depthlit.connection import ResidualStrategy
from depthlit.data.manifest import Schema, mismatch
from depthlit.engines import by_number
from depthlit.errors import is_for_user
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

CHECKPOINT: Schema = {
    "state_dict": Mapping,
    LanguageModel.CHECKPOINT_HYPER_PARAMS_KEY: {"shape": (Mapping, str), "residual": (Mapping, str)},
}
"""What must be in a checkpoint of ours."""


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
    content = _load(path)
    if mismatch(content, CHECKPOINT):
        raise ValueError(f"{path} is not a checkpoint of depthlit: it does not name a shape and a residual strategy")
    return dict(content)


STRANGE = "it is damaged, or none of depthlit's; take another"


def _load(path: Path) -> Any:
    with _reading(path, "a checkpoint", STRANGE):
        return torch.load(path, map_location="cpu", weights_only=True)


@contextmanager
def _reading(path: Path, what: str, remedy: str) -> Iterator[None]:
    """Put whatever a library says of a damaged file into one line; what is meant for the user passes."""
    from torch.distributed.checkpoint.api import CheckpointException  # not an Exception

    try:
        yield
    except (Exception, CheckpointException) as error:
        if is_for_user(error):
            raise
        raise ValueError(f"{path} cannot be read as {what}: {remedy}") from error


def consolidate(folder: Path, output: Path) -> None:
    """Make one file of a sharded checkpoint: FSDP2's or FSDP's (distributed checkpoint format), or DeepSpeed's.

    Raises:
        ValueError: the folder is neither, or a file of it is missing or damaged.
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

    if not (folder / "meta.pt").is_file():
        raise ValueError(f"{folder} lacks meta.pt, so it was not saved whole; take another checkpoint")
    content, reader = _load(folder / "meta.pt"), FileSystemReader(folder)
    damaged = "it is damaged; take another checkpoint"
    with _reading(folder / ".metadata", "the table of a distributed checkpoint", damaged):
        sizes: dict[str, int] = {}
        for part in (reader.read_metadata().storage_data or {}).values():
            sizes[part.relative_path] = max(sizes.get(part.relative_path, 0), part.offset + part.length)
    for name, size in sizes.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size < size:
            raise ValueError(f"{file} is missing or shortened ({size} bytes were written); take another checkpoint")
    shards: dict[str, Any] = {}
    with _reading(folder, "a distributed checkpoint", damaged):
        _load_state_dict(shards, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    optimizers = [by_number(shards[key]) for key in sorted(shards) if key.startswith("optimizer_")]
    return {**content, "state_dict": shards.get("state_dict", shards.get("model")), "optimizer_states": optimizers}


def _from_deepspeed(folder: Path) -> dict[str, Any]:
    with _reading(folder, "a checkpoint of DeepSpeed", "a file of it is damaged; take another checkpoint"):
        whole = zero.read(folder)
    return {**whole.rest, "state_dict": whole.weights, "optimizer_states": [whole.optimizer]}


# Hugging Face


_NUMBER = (float, int, NoneType)
_ROPE = ({"rope_type?": str, "type?": str, "rope_theta?": _NUMBER, "partial_rotary_factor?": _NUMBER}, NoneType)
KIND: Schema = {"architectures?": ([str], NoneType), "model_type?": str}
CONFIG: Schema = {
    "hidden_size": int, "intermediate_size": int, "num_hidden_layers": int, "num_attention_heads": int,
    "vocab_size": int, "num_key_value_heads?": (int, NoneType), "head_dim?": (int, NoneType),
    "max_position_embeddings?": int, "rms_norm_eps?": (float, int), "tie_word_embeddings?": bool,
    "rope_theta?": _NUMBER, "rope_scaling?": _ROPE, "rope_parameters?": _ROPE,
}  # fmt: skip
"""What must be in a Hugging Face config of a Llama-type model, and what it says first of which kind of model it is."""


def shape_of(config: Any) -> ShapeSpec:
    """The shape of a Hugging Face Llama-type config.

    Args:
        config: the content of config.json.

    Raises:
        ValueError: something is missing or of a wrong type, or the model has something that our backbone has not: rope
            scaling, biases, a head size of its own, another activation, a sliding window.
    """
    _must_be(config, KIND)
    kind, classes = config.get("model_type"), config.get("architectures")
    if classes is not None and "LlamaForCausalLM" not in classes:
        raise ValueError(f"{', '.join(classes) or 'architectures []'} is not a Llama-type model (LlamaForCausalLM)")
    if kind != "llama" and (kind or classes is None):
        raise ValueError(f"model_type {kind!r} is not a Llama-type model ('llama')")
    _must_be(config, CONFIG)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(f"rope scaling ({rope.get('rope_type', rope.get('type'))}) is not supported")
    for key, must in (
        ("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu"), ("sliding_window", None),
        ("partial_rotary_factor", 1),
    ):  # fmt: skip
        found = config.get(key, rope.get(key))
        if found is not None and found != must:
            raise ValueError(f"{key} is {found!r}, this backbone has {must!r}")
    shape = ShapeSpec(
        n_layer=config["num_hidden_layers"],
        d_model=config["hidden_size"],
        n_head=config["num_attention_heads"],
        n_kv_head=config.get("num_key_value_heads"),
        d_ff=config["intermediate_size"],
        vocab_size=config["vocab_size"],
        tie_embeddings=config.get("tie_word_embeddings", False),
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0),
        norm_eps=config.get("rms_norm_eps", 1e-6),
        max_seq_len=config.get("max_position_embeddings", 2048),
    )
    head_dim = config.get("head_dim") or shape.head_dim
    if head_dim != shape.head_dim:
        raise ValueError(f"head_dim {head_dim} is not hidden_size / num_attention_heads = {shape.head_dim}")
    return shape


def _must_be(config: Any, schema: Schema) -> None:
    if problem := mismatch(config, schema):
        raise ValueError(f"{problem}; take the file that came with the weights")


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
    with _reading(folder / "config.json", "a config", "it is not JSON; fetch it anew"):
        config = json.loads((folder / "config.json").read_bytes())
    try:
        shape = shape_of(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    theirs: dict[str, Tensor] = {}
    for file in files:
        with _reading(file, "safetensors", "it is damaged or shortened; fetch it anew"):
            theirs |= load_file(file)
    strategy = llama_strategy()
    expected = _expected(shape, strategy)
    weights, keys = {}, llama_keys(shape, strategy)
    for ours, name in keys.items():
        if name not in theirs:
            raise ValueError(f"{folder} lacks {name}")
        if theirs[name].shape != expected[ours].shape:
            raise ValueError(f"{folder}: {name} is {tuple(theirs[name].shape)}, not {tuple(expected[ours].shape)}")
        weights[ours] = theirs[name]
    if unused := sorted(theirs.keys() - keys.values() - _implied(theirs, shape)):
        raise ValueError(f"{folder}: {unused[0]} has no place in the model of config.json ({len(unused)} such weights)")
    if shape.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    settings = LanguageModel(shape, strategy).settings()
    save_whole(output, settings, weights)
    return shape


def _expected(shape: ShapeSpec, strategy: ResidualStrategy) -> dict[str, Any]:
    """The decoder's weights by our names, without content."""
    with torch.device("meta"):
        return depthlit.Decoder(shape, strategy, seed=0).state_dict()


def _implied(theirs: Mapping[str, Tensor], shape: ShapeSpec) -> set[str]:
    """Names of what some files hold though it follows from the rest: rotary frequencies, a tied head."""
    names = {name for name in theirs if name.endswith(".rotary_emb.inv_freq")}
    head = theirs.get("lm_head.weight")
    if shape.tie_embeddings and head is not None and torch.equal(head, theirs["model.embed_tokens.weight"]):
        names.add("lm_head.weight")
    return names


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
    with _reading(checkpoint, "a checkpoint", STRANGE):
        shape, strategy = as_shape(settings["shape"]), as_strategy(settings["residual"])
    names = content["state_dict"].items()
    weights = {name.removeprefix("decoder."): weight for name, weight in names if name.startswith("decoder.")}
    if lacking := sorted(_expected(shape, strategy).keys() - weights.keys()):
        raise ValueError(f"{checkpoint} lacks {lacking[0]} ({len(lacking)} such weights); take another checkpoint")
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
