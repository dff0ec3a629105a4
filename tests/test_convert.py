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
        ({"num_hidden_layers": 3}, "lacks model.layers.2.self_attn.q_proj.weight"),
        ({"intermediate_size": 96}, "model.layers.0.mlp.gate_proj.weight is (80, 48), not (96, 48)"),
    ],
)
def test_what_does_not_fit_is_named(change, line, tmp_path):
    saved(tmp_path / "a.ckpt", SHAPE, PreLN())
    convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ValueError) as error:
        convert.import_llama(tmp_path / "hf", tmp_path / "b.ckpt")
    assert line in str(error.value)
    assert not (tmp_path / "b.ckpt").exists()


def test_no_counterpart_and_foreign_files(tmp_path):
    saved(tmp_path / "a.ckpt", SHAPE, HC())
    with pytest.raises(ValueError, match="HC has no counterpart"):
        convert.export(tmp_path / "a.ckpt", tmp_path / "hf", "huggingface")
    torch.save({"weights": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match="is not a checkpoint of depthlit"):
        convert.load_whole(tmp_path / "other.pt")
    (tmp_path / "noise.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(ValueError, match="cannot be read as a checkpoint"):
        convert.load_whole(tmp_path / "noise.ckpt")
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
