"""Checkpoints in and out: every strategy as safetensors, Pre-LN as a Hugging Face Llama and back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from depthlit import Decoder, ShapeSpec, convert, residuals
from depthlit.module import LanguageModel, as_shape, as_strategy
from depthlit.residuals import HC, PreLN

SHAPE = ShapeSpec(2, 48, n_head=4, n_kv_head=2, d_ff=80, vocab_size=61, rope_theta=5e4, norm_eps=1e-5, max_seq_len=32)
safetensors = pytest.importorskip(
    "safetensors.torch", reason="safetensors is not installed: pip install 'depthlit[hub]'"
)


def saved(path: Path, shape: ShapeSpec, strategy) -> LanguageModel:
    module = LanguageModel(shape, strategy, init_seed=3)
    module.configure_model()
    convert.save_whole(path, module.settings(), module.decoder.state_dict(), step=7)
    return module


@pytest.mark.parametrize("name", residuals.__all__)
def test_every_strategy_comes_back_from_safetensors(name, tmp_path):
    module = saved(tmp_path / "a.ckpt", SHAPE, getattr(residuals, name)())
    convert.export(tmp_path / "a.ckpt", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["step"] == 7
    decoder = Decoder(as_shape(config["shape"]), as_strategy(config["residual"]), seed=9)
    decoder.load_state_dict(safetensors.load_file(tmp_path / "out" / "model.safetensors"))
    tokens = torch.randint(0, 61, (1, 9))
    assert torch.equal(decoder(tokens), module.decoder(tokens))


def test_the_saved_file_loads_as_a_checkpoint(tmp_path):
    module = saved(tmp_path / "a.ckpt", SHAPE, HC())
    again = LanguageModel.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.residual == module.residual and again.shape == module.shape
    tokens = torch.randint(0, 61, (1, 9))
    assert torch.equal(again(tokens), module(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_to_hugging_face_and_back(tied, tmp_path):
    shape = as_shape({**vars(SHAPE), "tie_embeddings": tied})
    module = saved(tmp_path / "a.ckpt", shape, PreLN())
    convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    keys = set(safetensors.load_file(tmp_path / "hf" / "model.safetensors"))
    assert ("lm_head.weight" in keys) is not tied and "model.layers.1.post_attention_layernorm.weight" in keys
    assert convert.import_llama(tmp_path / "hf", tmp_path / "b.ckpt") == shape
    again = LanguageModel.load_from_checkpoint(tmp_path / "b.ckpt", weights_only=True)
    tokens = torch.randint(0, 61, (1, 9))
    assert torch.equal(again(tokens), module(tokens))
    assert (again.decoder.head.weight is again.decoder.embed.weight) is tied


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_gives_the_same_logits(tied, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=61, tie_word_embeddings=tied, rope_theta=5e4, rms_norm_eps=1e-5, max_position_embeddings=64,
            initializer_range=0.1,
        )
    ).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    convert.import_llama(tmp_path / "theirs", tmp_path / "a.ckpt")
    ours = LanguageModel.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    tokens = torch.randint(0, 61, (2, 33))
    with torch.no_grad():
        wanted = theirs(tokens).logits
        torch.testing.assert_close(ours(tokens), wanted, rtol=1e-5, atol=1e-5)
        convert.export(tmp_path / "a.ckpt", tmp_path / "ours", "huggingface")
        back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours", torch_dtype=torch.float32).eval()
        torch.testing.assert_close(back(tokens).logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change, line",
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope scaling (llama3) is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling (yarn) is not supported"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"head_dim": 16}, "head_dim 16 is not"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not a Llama-type model"),
        ({"architectures": []}, "architectures [] is not a Llama-type model"),
        ({"architectures": None, "model_type": "mistral", "sliding_window": 4096}, "model_type 'mistral' is not"),
        ({"model_type": "mistral"}, "model_type 'mistral' is not a Llama-type model"),
        ({"sliding_window": 4096}, "sliding_window is 4096, this backbone has None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, this backbone has 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"num_attention_heads": "4"}, 'config.json: num_attention_heads is "4"; take the file'),
        ({"num_attention_heads": 0}, "config.json: shape: n_head is 0, it must be positive"),
        ({"rope_scaling": 3}, "config.json: rope_scaling is 3; take"),
        ({"rope_scaling": {"rope_theta": "x"}}, 'rope_scaling.rope_theta is "x"'),
        ({"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight has no place in the model of config.json (9"),
        ({"tie_word_embeddings": True}, "lm_head.weight has no place in the model of config.json (1 such weights)"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.self_attn.q_proj.weight"),
        ({"intermediate_size": 96}, "model.layers.0.mlp.gate_proj.weight is (80, 48), not (96, 48)"),
    ],
)
def test_what_does_not_fit_is_named(change, line, llama, tmp_path):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | change))
    refused(lambda: convert.import_llama(llama, tmp_path / "b.ckpt"), line)
    assert not (tmp_path / "b.ckpt").exists()


@pytest.mark.parametrize(
    "content, line",
    [
        (b"[]", "config.json: its content is []; take the file that came with"),
        (b"{", "config.json cannot be read as a config: it is not JSON; fetch it anew"),
        (b"\xff", "config.json cannot be read as a config"),
        (b"{}", "config.json: model_type None is not a Llama-type model"),
        (b'{"model_type": "llama"}', "config.json: hidden_size is missing; take the file"),
    ],
)
def test_a_damaged_config_is_named(content, line, llama, tmp_path):
    (llama / "config.json").write_bytes(content)
    refused(lambda: convert.import_llama(llama, tmp_path / "b.ckpt"), line)


def test_shortened_safetensors_are_named(llama, tmp_path):
    file = llama / "model.safetensors"
    for size in (file.stat().st_size - 9, 20, 0):
        file.write_bytes(file.read_bytes()[:size])
        line = "model.safetensors cannot be read as safetensors: it is damaged or shortened; fetch it anew"
        refused(lambda: convert.import_llama(llama, tmp_path / "b.ckpt"), line)


def test_what_follows_from_the_rest_is_not_missed(tmp_path):
    """A tied head written out, and rotary frequencies, as older files have them."""
    shape = as_shape({**vars(SHAPE), "tie_embeddings": True})
    saved(tmp_path / "a.ckpt", shape, PreLN())
    convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    file = tmp_path / "hf" / "model.safetensors"
    weights = safetensors.load_file(file)
    head = weights["model.embed_tokens.weight"].clone()
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    safetensors.save_file({**weights, **frequencies, "lm_head.weight": head}, file)
    assert convert.import_llama(tmp_path / "hf", tmp_path / "b.ckpt") == shape


@pytest.fixture
def llama(tmp_path):
    """A folder as Hugging Face keeps a Llama."""
    saved(tmp_path / "a.ckpt", SHAPE, PreLN())
    convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    return tmp_path / "hf"


def refused(work, line):
    """It is refused with this, in one line."""
    with pytest.raises(ValueError) as error:
        work()
    assert line in str(error.value) and "\n" not in str(error.value)


# Sharded checkpoints


@pytest.fixture
def sharded(tmp_path):
    """A small distributed checkpoint, as one process of FSDP2 leaves it."""
    from torch.distributed.checkpoint import save

    state = {"state_dict": {"decoder.embed.weight": torch.arange(600.0).view(60, 10)}}
    save(state, checkpoint_id=tmp_path / "sharded", no_dist=True)
    torch.save({"global_step": 3}, tmp_path / "sharded" / "meta.pt")
    return tmp_path / "sharded"


def test_shards_become_one_file(sharded, tmp_path):
    convert.consolidate(sharded, tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    assert whole["global_step"] == 3 and whole["state_dict"]["decoder.embed.weight"].shape == (60, 10)


@pytest.mark.parametrize(
    "name, size, line",
    [
        ("__0_0.distcp", 900, "__0_0.distcp is missing or shortened ("),
        ("__0_0.distcp", None, "__0_0.distcp is missing or shortened ("),
        (".metadata", 30, ".metadata cannot be read as the table of a distributed checkpoint: it is damaged; take"),
        ("meta.pt", None, "sharded lacks meta.pt, so it was not saved whole; take another checkpoint"),
        ("meta.pt", 90, "meta.pt cannot be read as a checkpoint: it is damaged"),
    ],
)
def test_damaged_shards_are_named(name, size, line, sharded, tmp_path):
    content = (sharded / name).read_bytes()
    (sharded / name).unlink()
    if size is not None:
        (sharded / name).write_bytes(content[:size])
    refused(lambda: convert.consolidate(sharded, tmp_path / "whole.ckpt"), line)
    assert not (tmp_path / "whole.ckpt").exists()


def test_noise_of_the_right_size_is_refused(sharded, tmp_path):
    for name, line in (("__0_0.distcp", "sharded cannot be read as a distributed"), (".metadata", "as the table of")):
        (sharded / name).write_bytes(b"noise" * 900)
        refused(lambda line=line: convert.consolidate(sharded, tmp_path / "whole.ckpt"), line)


def test_no_counterpart_and_foreign_files(tmp_path):
    saved(tmp_path / "a.ckpt", SHAPE, HC())
    with pytest.raises(ValueError, match="HC has no counterpart"):
        convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of depthlit"):
        convert.load_whole(tmp_path / "other.pt")
    settings = LanguageModel(SHAPE, PreLN()).settings()
    for change, line in (
        ({}, "x.ckpt lacks blocks.0.attn.k.weight (20 such weights); take another checkpoint"),
        ({"shape": {"n_layer": 2}}, "x.ckpt cannot be read as a checkpoint: it is damaged, or none of depthlit's"),
        ({"shape": 3}, "x.ckpt is not a checkpoint of depthlit"),
    ):
        convert.save_whole(tmp_path / "x.ckpt", {**settings, **change}, {"embed.weight": torch.ones(61, 48)})
        for form in ("safetensors", "huggingface"):
            refused(lambda form=form: convert.export(tmp_path / "x.ckpt", tmp_path / "hf", form), line)
    assert not (tmp_path / "hf").exists()
    (tmp_path / "noise.ckpt").write_bytes(b"not a checkpoint")
    refused(
        lambda: convert.export(tmp_path / "noise.ckpt", tmp_path / "hf"),
        f"{tmp_path}/noise.ckpt cannot be read as a checkpoint: it is damaged, or none of depthlit's; take another",
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a distributed checkpoint"):
        convert.consolidate(tmp_path / "empty", tmp_path / "x.ckpt")


def test_the_command_line(tmp_path):
    saved(tmp_path / "a.ckpt", SHAPE, PreLN())
    tool = [sys.executable, str(Path(__file__).parents[1] / "tools" / "convert.py")]
    done = subprocess.run(
        [*tool, "export", tmp_path / "a.ckpt", "--output", tmp_path / "hf", "--to", "huggingface"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and "wrote" in done.stdout
    done = subprocess.run([*tool, "import", tmp_path, "--output", tmp_path / "b.ckpt"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "no config.json" in done.stderr
