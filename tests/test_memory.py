"""What autograd keeps for the backward pass, in bytes of distinct storages, against Pre-LN: a figure without noise."""

import pytest
import torch
from models import tokens_for

from depthlit import residuals
from depthlit.connection import ResidualStrategy
from depthlit.decoder import Decoder
from depthlit.shape import ShapeSpec

SHAPE = ShapeSpec(n_layer=24, d_model=256, n_head=4, vocab_size=64, max_seq_len=256)
LIMITS = {"FullAttnRes": 1.15, "BlockAttnRes": 1.12, "HC": 2.0, "MHC": 2.0}


def saved_bytes(strategy: ResidualStrategy) -> int:
    """Bytes of all storages that the graph of one loss holds on to, each once, the weights apart."""
    decoder = Decoder(SHAPE, strategy, seed=0)
    weights = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    held: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in weights:
            held[storage.data_ptr()] = storage.nbytes()
        return x  # kept alive, so that no address is met twice

    tokens = tokens_for(SHAPE, 1, 257)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = decoder(tokens[:, :-1], tokens[:, 1:]).mean()
    assert loss.requires_grad
    return sum(held.values())


@pytest.fixture(scope="module")
def pre_ln() -> int:
    return saved_bytes(residuals.PreLN())


@pytest.mark.parametrize("name, limit", LIMITS.items())
def test_saved_activations(name: str, limit: float, pre_ln: int) -> None:
    ratio = saved_bytes(getattr(residuals, name)()) / pre_ln
    print(f"{name}: {ratio:.3f} x Pre-LN ({pre_ln / 2**20:.1f} MiB)")
    assert ratio <= limit


def test_the_ruler_measures(pre_ln: int) -> None:
    """Lower bound by hand, in units of T D floats: per block 12 states and 8/3 hidden activations each 3 times."""
    unit = 256 * SHAPE.d_model * 4
    assert 24 * (8 + 3 * 8 / 3) * unit < pre_ln < 24 * (16 + 5 * 8 / 3) * unit
