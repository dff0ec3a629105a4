"""HC and mHC against two independent packages, where they are installed: pip install depthlit[oracles]."""

from types import SimpleNamespace

import pytest
import torch
from stream_steps import B, M, T, rand
from torch import Tensor, nn

from depthlit.connection import Site
from depthlit.mixers.sinkhorn import sinkhorn
from depthlit.residuals import HC, MHC
from depthlit.shape import ShapeSpec

pytestmark = pytest.mark.slow
D = 16
SHAPE = ShapeSpec(n_layer=3, d_model=D, n_head=2, vocab_size=7)


class Identity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize("sublayer", range(M + 1))
def test_hc_equals_hyper_connections(sublayer: int, tanh: bool) -> None:
    """One step and its gradients, fp64. There the carry is (from, to), and gains are stored as gain - 1."""
    package = pytest.importorskip("hyper_connections", reason="pip install hyper-connections")
    branch = nn.Sequential(nn.Linear(D, D), nn.Tanh()).double()
    theirs = package.HyperConnections(M, dim=D, branch=branch, layer_index=sublayer, tanh=tanh).double()
    ours = HC(tanh=tanh, eps=1e-24).connect(Site(sublayer, SHAPE)).double()
    ours.norm = Identity()  # the package leaves the branch's norm to the branch

    def agree() -> None:
        H, g = rand(B, T, M, D), rand(B, T, M, D, grad=False, seed=1)
        mine = ours(H, branch)
        streams = H.permute(0, 2, 1, 3).reshape(B * M, T, D)  # (b s) n d
        other = theirs(streams).reshape(B, M, T, D).permute(0, 2, 1, 3)
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)
        wanted = [H, *branch.parameters()]
        for a, b in zip(*(torch.autograd.grad(y, wanted, g, retain_graph=True) for y in (mine, other)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
        (static,) = torch.autograd.grad(other, theirs.static_alpha, g, retain_graph=True)
        read, carry = torch.autograd.grad(mine, [ours.read, ours.carry], g)
        torch.testing.assert_close(static, torch.cat((read.unsqueeze(-1), carry.T), -1), rtol=1e-10, atol=1e-11)

    agree()  # both at their initial values
    with torch.no_grad():
        for p in ours.parameters():
            p.add_(0.5 * torch.randn_like(p))
        theirs.static_alpha.copy_(torch.cat((ours.read.unsqueeze(-1), ours.carry.T), -1))
        theirs.static_beta.copy_(ours.write)
        W = ours.project.weight
        theirs.dynamic_alpha_fn.copy_(torch.cat((W[:1], W[2:])).T)
        theirs.dynamic_beta_fn.copy_(W[1])
        theirs.dynamic_alpha_scale.copy_(ours.scale_alpha[0])
        theirs.dynamic_beta_scale.copy_(ours.scale_beta[0])
    agree()


def test_mhc_equals_deepseek_v4() -> None:
    """Coefficients and one step in fp32. There the carry is (in, out), so that its rows are our columns."""
    package = pytest.importorskip(
        "transformers.models.deepseek_v4.modeling_deepseek_v4", reason="pip install 'transformers>=5.20'"
    )
    settings = SimpleNamespace(hc_mult=M, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6, hidden_size=D)
    theirs = package.DeepseekV4HyperConnection(settings)
    ours = MHC(eps=1e-6).connect(Site(0, SHAPE))
    with torch.no_grad():
        ours.project.weight.normal_(std=0.1)
        ours.bias.normal_()
        ours.gain.copy_(torch.tensor([0.5, 0.6, 0.7]))

        def turned(rows: Tensor) -> Tensor:
            return torch.cat((rows[: 2 * M], rows[2 * M :].unflatten(0, (M, M)).transpose(0, 1).flatten(0, 1)))

        theirs.fn.copy_(turned(ours.project.weight))
        theirs.base.copy_(turned(ours.bias))
        theirs.scale.copy_(ours.gain)
        H, f = rand(B, T, M, D, grad=False).float(), rand(B, T, D, grad=False).float()
        post, comb, x = theirs(H)
        read, carry, write = ours.flow(H)  # type: ignore[misc]
        assert (comb - comb.mT).abs().max() > 0.1
        torch.testing.assert_close(carry, comb.mT, rtol=0, atol=2e-5)
        torch.testing.assert_close(write, post, rtol=0, atol=1e-6)
        torch.testing.assert_close((read.unsqueeze(-1) * H).sum(-2), x, rtol=0, atol=2e-5)
        step = post.unsqueeze(-1) * f.unsqueeze(-2) + comb.mT @ H
        torch.testing.assert_close(ours(H, lambda _: f), step, rtol=0, atol=5e-5)

        z = rand(B, M, M, grad=False).float()  # the order "liger" on the matrix as it stands there
        theirs.fn.zero_()
        for logits in z:
            theirs.base[2 * M :] = logits.flatten()
            comb = theirs(H)[1][0, 0]
            torch.testing.assert_close(sinkhorn(logits, 20, "liger"), comb, rtol=0, atol=1e-6)
