"""A contract that nothing can break says nothing: strategies with one planted fault each, and the law that notices."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature

import pytest
import test_contract as contract
import torch
from models import TINY, tokens_for
from torch import Tensor, nn

from depthlit.connection import Connection, Flow, ResidualStrategy, Site
from depthlit.layers import RMSNorm


class FaultyConnection(Connection):
    """Pre-LN with one planted fault."""

    def __init__(self, site: Site, fault: str) -> None:
        super().__init__()
        self.fault, self.norm = fault, RMSNorm(site.shape.d_model)
        self.last: Tensor | None = None
        if fault == "unused":
            self.spare = nn.Parameter(torch.ones(3))
        if fault == "0-d":
            self.gate = nn.Parameter(torch.tensor(1.0))
        if fault == "buffer":
            self.register_buffer("factor", torch.full((1,), 0.5))

    def forward(self, h: Tensor, branch: Callable[[Tensor], Tensor]) -> Tensor:
        y = branch(self.norm(h))
        if self.fault == "future":
            y = y + 0.1 * h.roll(-1, 1)
        if self.fault == "batch":
            y = y + h.mean(0)
        if self.fault == "neighbour":
            y = y + h.cumsum(1)
        if self.fault == "memory":
            y, self.last = y if self.last is None else y + 0.01 * self.last[:, : y.shape[1]], y.detach()
        if self.fault == "dtype":
            return h.float() + y
        if self.fault == "zero":
            return h + y / y.norm(dim=-1, keepdim=True)
        if self.fault == "in place":
            return h.data.add_(y) + 0 * y
        return h + y

    def flow(self, h: Tensor) -> Flow:
        one = h.new_ones(1)
        return Flow(one, one[:, None], 0.5 * one if self.fault == "flow" else one)


@dataclass(frozen=True)
class Faulty(ResidualStrategy):
    """A strategy that breaks one promise."""

    fault: str = ""

    def connect(self, site: Site) -> Connection:
        return FaultyConnection(site, self.fault)


FAULTS: dict[str, Callable[..., None]] = {
    "unused": contract.test_every_weight_takes_part_at_the_start,
    "0-d": contract.test_builds_on_meta_without_0d_parameters,
    "buffer": contract.test_what_was_built_on_meta_gets_the_same_weights,
    "future": contract.test_the_future_is_not_seen,
    "batch": contract.test_rows_of_a_batch_are_strangers,
    "neighbour": contract.test_documents_are_strangers,
    "memory": contract.test_interventions_leave_no_trace,
    "dtype": partial(contract.test_bf16_is_finite, mode="weights"),
    "zero": partial(contract.test_zeros_stay_finite, zeros="branches", random=True),
    "in place": contract.test_a_state_is_tensors_and_is_never_changed,
    "flow": contract.test_paths_rebuild_what_every_reader_reads,
}


@pytest.mark.parametrize("fault, law", FAULTS.items(), ids=FAULTS)
def test_a_broken_promise_is_noticed(fault: str, law: Callable[..., None]) -> None:
    needed = {"tokens": tokens_for(TINY)} if "tokens" in signature(law).parameters else {}
    law(Faulty(), **needed)
    with pytest.raises((AssertionError, RuntimeError)):
        law(Faulty(fault), **needed)
