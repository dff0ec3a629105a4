"""The loss per token: against the formula, in pieces and whole, masked, in narrow types."""

import pytest
import torch
from torch import nn

from depthlit import Decoder, ShapeSpec, loss
from depthlit.loss import head_nll, token_nll
from depthlit.residuals import PreLN


def test_it_is_the_formula_and_masked_tokens_count_nothing():
    logits = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([[0, 6, -1, 3, 3], [-100, 2, 1, -1, 5]])
    nll = token_nll(logits, targets)
    for b in range(2):
        for t in range(5):
            want = 0.0
            if targets[b, t] >= 0:
                want = (logits[b, t].exp().sum().log() - logits[b, t, targets[b, t]]).item()
            assert nll[b, t].item() == pytest.approx(want, rel=1e-12)
    nll.sum().backward()
    assert (logits.grad[targets < 0] == 0).all() and logits.grad[0, 0].abs().sum() > 0


@pytest.mark.parametrize("at_once", [1, 70, 70 * 3, 10**9])
def test_pieces_give_the_same_losses_and_gradients(at_once):
    torch.manual_seed(0)
    head = nn.Linear(8, 70, bias=False, dtype=torch.float64)
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, 70, (2, 5))
    weight = torch.randn(2, 5, dtype=torch.float64)
    whole = torch.autograd.grad((token_nll(head(x), targets) * weight).sum(), (x, head.weight))
    nll = head_nll(head, x, targets, at_once)
    torch.testing.assert_close(nll, token_nll(head(x), targets), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(
        torch.autograd.grad((nll * weight).sum(), (x, head.weight)), whole, rtol=1e-12, atol=1e-13
    )


def test_bf16_logits_are_reduced_in_fp32():
    """A softmax over 2,048 bf16 logits summed in bf16 would be off by percents."""
    torch.manual_seed(0)
    logits = (torch.randn(1, 64, 2048) * 2).bfloat16()
    targets = torch.randint(0, 2048, (1, 64))
    nll = token_nll(logits, targets)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll.double(), token_nll(logits.double(), targets), rtol=1e-5, atol=1e-5)


def test_the_decoder_uses_the_pieces(monkeypatch):
    decoder = Decoder(ShapeSpec(2, 32, n_head=4, vocab_size=61), PreLN(), seed=0).double()
    tokens = torch.randint(0, 61, (2, 9))
    whole = decoder(tokens, tokens)
    monkeypatch.setattr(loss, "LOGITS_AT_ONCE", 61 * 4)
    torch.testing.assert_close(decoder(tokens, tokens), whole, rtol=1e-13, atol=1e-13)
