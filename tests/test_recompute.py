"""Recomputed blocks give the same gradients bit by bit and keep less; compiling makes as many graphs at any depth."""

import pytest
import torch
from models import TINY, known, label, randomized
from torch._dynamo.testing import CompileCounter

from depthlit import Decoder, ShapeSpec, cost
from depthlit.residuals import BlockAttnRes, FullAttnRes, PreLN


def tokens(shape: ShapeSpec, length: int = 11) -> torch.Tensor:
    return torch.randint(0, shape.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def gradients(decoder: Decoder) -> dict[str, torch.Tensor]:
    ids = tokens(decoder.shape)
    decoder.zero_grad(set_to_none=True)
    decoder(ids[:, :-1], ids[:, 1:]).sum().backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("strategy", known(), ids=label)
def test_gradients_are_the_same_bit_by_bit(strategy):
    """Of readers that ask alone, as they do where anything is recomputed."""
    decoder = randomized(Decoder(TINY, strategy, seed=0, join=False), 3)  # fp32
    plain = gradients(decoder)
    for block in decoder.blocks:
        block.recompute = True
    again = gradients(decoder)
    assert [name for name in plain if not torch.equal(plain[name], again[name])] == []


def test_it_keeps_less():
    shape = ShapeSpec(8, 64, n_head=4, vocab_size=61)
    decoder, ids = Decoder(shape, PreLN(), seed=0), tokens(shape, 64)
    plain = cost.saved_bytes(decoder, ids)
    for block in decoder.blocks:
        block.recompute = True
    assert cost.saved_bytes(decoder, ids) < 0.3 * plain


def test_no_recomputation_without_gradients():
    decoder = Decoder(TINY, PreLN(), seed=0)
    runs = []
    for block in decoder.blocks:
        block.recompute = True
        block.join_attn.register_forward_hook(lambda *call: runs.append(1))
    with torch.no_grad():
        decoder(tokens(TINY))
    assert len(runs) == TINY.n_layer


def graphs(strategy, n_layer: int, what: str) -> int:
    torch._dynamo.reset()
    counter = CompileCounter()
    decoder = Decoder(ShapeSpec(n_layer, 32, n_head=4, vocab_size=61), strategy, seed=0)
    if what == "branches":
        for block in decoder.blocks:
            block.attn.compile(backend=counter)
            block.mlp.compile(backend=counter)
    else:
        decoder.compile(backend=counter, fullgraph=True)
    ids = tokens(decoder.shape)
    decoder(ids, ids).sum().backward()
    return counter.frame_count


@pytest.mark.parametrize("strategy", [FullAttnRes(), BlockAttnRes(block_size=2)], ids=label)
@pytest.mark.parametrize("what, wanted", [("branches", 2), ("decoder", 1)])
def test_a_growing_list_of_sources_makes_no_further_graphs(strategy, what, wanted):
    assert [graphs(strategy, n_layer, what) for n_layer in (3, 6)] == [wanted, wanted]
