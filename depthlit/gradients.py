"""The gradient of the validation loss, taken on the side."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from depthlit.subject import Share, Subject


def block_gradient_norms(subject: Subject, share: Share) -> Tensor | None:
    """(L,): L2 norm of the gradient of the mean loss with respect to the weights of each block, the same on all ranks.

    The gradients that were there before are put back. None where the engine keeps gradients to itself (DeepSpeed).

    Args:
        subject: the network; called with gradients enabled.
        share: this rank's windows; the engine averages gradients over ranks.
    """
    decoder, kind = subject.decoder, type(subject.model).__name__
    if kind == "DeepSpeedEngine":
        return None
    for module in decoder.modules():  # parameters of FSDP2's root stay whole behind a forward without gradients
        if isinstance(module, FSDPModule):
            module.reshard()
    weights = list(decoder.parameters())
    before = [weight.grad for weight in weights]
    if getattr(subject.model, "gradient_as_bucket_view", False):  # then backward writes into the old gradients' memory
        before = [None if grad is None else grad.clone() for grad in before]
    try:
        for weight in weights:
            weight.grad = None
        with torch.enable_grad():
            for batch in share.batches:
                (subject.nll(batch).sum() * (share.ranks / share.tokens)).backward()
        norms = []
        for block in decoder.blocks:
            grads = [weight.grad for weight in block.parameters() if weight.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        found = torch.stack(norms).double()
        if kind == "FullyShardedDataParallel":  # plain tensors, a shard on each rank
            found = found.square()
            dist.all_reduce(found)
            found = found.sqrt()
        return found
    finally:
        for weight, grad in zip(weights, before, strict=True):
            weight.grad = grad
