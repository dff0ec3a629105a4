"""What a design costs: the paper's formulas and figures, torch's own counter, bytes with and without a model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from depthlit import Decoder, ShapeSpec, cost, residuals
from depthlit.residuals import HC, MHC, BlockAttnRes, FullAttnRes, MoDA, PreLN

# (L, d): added TFLOPs at T = 4096: HC, mHC, Full, Block as printed, Block by its true number of sources
ADDED = {
    (16, 1216): (0.0153, 0.0383, 0.0112, 0.0036, 0.0035),
    (20, 1120): (0.0176, 0.0440, 0.0158, 0.0042, 0.0040),
    (24, 1024): (0.0193, 0.0483, 0.0205, 0.0045, 0.0044),
    (28, 960): (0.0211, 0.0528, 0.0260, 0.0050, 0.0048),
    (32, 896): (0.0225, 0.0564, 0.0315, 0.0053, 0.0052),
    (42, 800): (0.0264, 0.0661, 0.0479, 0.0061, None),
    (70, 640): (0.0352, 0.0881, 0.1050, 0.0081, None),
}
SMALL = ShapeSpec(4, 64, n_head=4, n_kv_head=2, vocab_size=61, max_seq_len=32)


def added(shape: ShapeSpec, strategy, counting) -> float:
    return round(cost.routing_flops(cost.on_meta(shape, strategy), counting) * 4096 / 1e12, 4)


@pytest.mark.parametrize("size", ADDED)
def test_added_flops_of_appendix_d(size):
    shape = ShapeSpec(*size)
    hc, mhc, full, block, true_block = ADDED[size]
    assert added(shape, HC(), "paper") == hc == added(shape, HC(), "exact")
    assert added(shape, MHC(), "paper") == mhc
    assert added(shape, FullAttnRes(), "paper") == full == added(shape, FullAttnRes(), "exact")
    assert added(shape, BlockAttnRes(), "paper") == block
    assert true_block is None or added(shape, BlockAttnRes(), "exact") == true_block
    assert added(shape, PreLN(), "exact") == 0


def test_key_value_cache():
    wide, deep = (cost.kv_bytes(ShapeSpec(*size), 4096) for size in ((16, 1216), (70, 640)))
    assert wide / 2**20 == 304 and deep / 2**20 == 700 and round(deep / wide, 2) == 2.30
    assert cost.kv_bytes(ShapeSpec.named("1600m-L28"), 1) == 2 * 28 * 1024 * 2


def matrix_flops(run) -> int:
    """Of matrix products alone; attention apart, since the counter has no causal half."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(n for op, n in counts.items() if "attention" not in str(op) and "bmm" not in str(op))


def test_the_linear_part_is_what_torch_counts():
    decoder, ids = cost.on_meta(SMALL, PreLN()), torch.zeros(1, 32, dtype=torch.long, device="meta")
    with sdpa_kernel(SDPBackend.MATH):
        counted = matrix_flops(lambda: decoder(ids))
    attention = 4 * 2 * 32 * 32 * 64
    assert counted == SMALL.forward_flops(32) - attention


def test_modas_own_projections_are_what_torch_counts():
    ids = torch.zeros(1, 32, dtype=torch.long)
    counts = [matrix_flops(lambda s=s: Decoder(SMALL, s, seed=0)(ids)) for s in (MoDA(), PreLN())]
    slots = sum(4 * n * 64 for n in range(0, 8, 2))  # a dot product and a sum per slot, over all heads
    assert cost.routing_flops(cost.on_meta(SMALL, MoDA())) * 32 == counts[0] - counts[1] + 32 * slots


@pytest.mark.parametrize("name", residuals.__all__)
def test_parts_add_up(name):
    decoder = cost.on_meta(SMALL, getattr(residuals, name)())
    parts = cost.parameters(decoder)
    assert parts["total"] == sum(p.numel() for p in decoder.parameters())
    assert parts["total"] == parts["backbone"] + parts["embedding_and_head"] + parts["residual"]
    assert parts["residual"] >= 0 and cost.routing_flops(decoder) >= 0


@pytest.mark.parametrize("name", residuals.__all__)
def test_saved_bytes_without_memory_are_those_of_a_real_model(name):
    strategy = getattr(residuals, name)()
    real = cost.saved_bytes(Decoder(SMALL, strategy, seed=0), torch.zeros(2, 32, dtype=torch.long))
    assert cost.saved_bytes_without_memory(SMALL, strategy, 2, 32, torch.float32) == real > 0


def test_peak_flops_by_the_name_that_torch_gives():
    assert cost.peak_flops("NVIDIA H200") == 989e12 and cost.peak_flops("NVIDIA H100 PCIe") == 756e12
    assert cost.peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and cost.peak_flops("NVIDIA L40S") == 362e12
    assert cost.peak_flops("NVIDIA A100-SXM4-40GB") == 312e12 and cost.peak_flops("NVIDIA A10G") == 70e12
    assert cost.peak_flops("NVIDIA GB200") == 2500e12 and cost.peak_flops("Voodoo 2") is None


def test_the_command_line():
    tool = [sys.executable, str(Path(__file__).parents[1] / "tools" / "cost.py")]
    done = subprocess.run(
        [*tool, "--shape", "400m-L24", "--residual", "HC", "--tokens", "4096", "--json"], capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert round(found["parameters"]["total"] / 1e6, 2) == 405.70
    assert found["flops"]["prefill_last"] == pytest.approx(3.3019e12 + found["flops"]["residual"], rel=1e-4)
    assert found["kv_bytes"] == 384 * 2**20
    done = subprocess.run([*tool, "--list"], capture_output=True, text=True)
    assert "400m-L24" in done.stdout and "1600m-L54" in done.stdout
    for words, line in ((["--residual", "HCC"], "no strategy is named 'HCC'"), (["--shape", "x"], "no shape is named")):
        done = subprocess.run([*tool, *words], capture_output=True, text=True)
        assert done.returncode == 2 and line in done.stderr
