"""What the designs that attend over depth share: a state of sources, and the readers that mix them.

Sublayers are told off in groups (`groups.py`). While a group is open its outputs are summed; when the next one begins,
the sum stays for good, beside the embedding and the sums before it. A group may also keep details of how its sum C
came about: sum_i r_i u_i with signs r_i = +-1. Each is held as the sum A over r_i = +1, so that the detail is 2 A - C
and needs no memory while all signs are +1. No other file looks inside the state, which is `held.py`.
"""

# no postponed annotations, as in depthlit/connection.py
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from depthlit.connection import Connection, Counting, Draw, Entry, Exit, Flow, Reader, Site
from depthlit.layers import RMSNorm, at_least_fp32
from depthlit.mixers.depth import Source, mix, weights
from depthlit.mixers.loudness import Match, again, loudness
from depthlit.residuals.bank import Bank
from depthlit.residuals.groups import Basis, Groups
from depthlit.residuals.held import Detail, Group, Sources, parts_of
from depthlit.shape import ShapeSpec


@dataclass(frozen=True)
class Mixing:
    """Settings that readers and writers share; the strategies say what they mean."""

    key_eps: float
    key_gain: bool
    query_std: float
    bases: tuple[Basis, ...] = ()
    detail_bias: float = 0.0
    learn_bias: bool = True
    max_match: float = 1.0
    match_eps: float = 0.0
    mask_duplicates: bool = False
    on_stream: bool = False
    """The mixture comes on top of the plain stream: every source counts once anyway."""
    gate: Literal["none", "zero", "sigmoid"] = "none"
    null_source: bool = False


class SourcesEntry(Entry):
    """Where the embedding becomes the first source."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.mixing = mixing

    def forward(self, x: Tensor) -> Sources:
        return Sources((Group(x, loudness(((x, 1.0),), self.mixing.key_eps).scale),))

    def write(self, x: Tensor) -> Tensor:
        """(S,): all into the slot of the embedding, nothing into the running ones."""
        return x.new_tensor([1.0, 0.0, *(0.0 for _ in self.mixing.bases)])


class Reading(NamedTuple):
    """What a reader takes of a state."""

    sources: list[Source]
    slots: list[int]  # where each is in `flow`
    kinds: list[int | None]  # which of the reader's biases each has; None for the embedding and totals
    bias: Tensor | None  # (J,)


class SourcesReader(Reader):
    """One query over the sources of a state, or none: then it reads the embedding, or the plain stream.

    Slots of its flow: the embedding; then for each group its total and its details, those of the running group last
    and present even while nothing runs. The factor that makes a detail as loud as its total is part of the read.
    """

    roles: ClassVar[dict[str, str]] = {"query": "query", "gain": "norm"}
    query: nn.Parameter | None  # (D,)
    gain: nn.Parameter | None  # (D,)
    bias: nn.Parameter | None  # one per detail that is read
    gate: nn.Parameter | None  # (1,)

    def __init__(self, d_model: int, mixing: Mixing, bases: Sequence[Basis], border: bool, query: bool = True) -> None:
        super().__init__()
        self.d_model, self.mixing, self.border = d_model, mixing, border
        self.constant = 1.0 if mixing.on_stream else 0.0  # what every source counts anyway
        self.shown = tuple(mixing.bases.index(basis) for basis in bases)
        sizes = {
            "query": d_model if query else 0,
            "gain": d_model if query and mixing.key_gain else 0,
            "bias": len(bases) if query and mixing.learn_bias else 0,
            "gate": 1 if query and mixing.gate != "none" else 0,
        }
        for name, size in sizes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size)) if size else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        gate = -2.0 if self.mixing.gate == "sigmoid" else 0.0
        for name, value in {"query": 0.0, "gain": 1.0, "bias": self.mixing.detail_bias, "gate": gate}.items():
            if (parameter := getattr(self, name)) is not None:
                nn.init.constant_(parameter, value)

    def init_own(self, draw: Draw) -> None:
        if self.query is not None and self.mixing.query_std > 0:
            draw(self.query, self.mixing.query_std)

    @property
    def key(self) -> Tensor:
        """(D,): the query times the gain of the keys' norm, in fp32 or wider."""
        assert self.query is not None
        query = at_least_fp32(self.query)
        return query if self.gain is None else query * self.gain

    def opening(self, scale: Tensor) -> Tensor | None:
        """(B, T): the gate, one number; None if there is none."""
        if self.gate is None:
            return None
        gate = at_least_fp32(self.gate)
        return (gate.sigmoid() if self.mixing.gate == "sigmoid" else gate).expand_as(scale)

    def hides(self, detail: int) -> bool:
        """Whether this reader leaves out a detail of the running group."""
        return False

    def reading(self, state: Sources, start: int = 0) -> Reading:
        """Of the groups from `start` on."""
        sources: list[Source] = []
        slots: list[int] = []
        kinds: list[int | None] = []
        for g, group in enumerate(state.groups[start:], start):
            slot = 1 + (g - 1) * (1 + len(self.mixing.bases)) if g else 0
            sources.append(Source(((group.total, 1.0),), group.scale, self.opening(group.scale)))
            slots.append(slot)
            kinds.append(None)
            for kind, b in enumerate(self.shown if group.details else ()):
                if g < len(state.done) or not self.hides(b):
                    detail = group.details[b]
                    sources.append(Source(parts_of(group.total, detail.plus), detail.scale, detail.match))
                    slots.append(slot + 1 + b)
                    kinds.append(kind)
        return Reading(sources, slots, kinds, self.biases(kinds))

    def biases(self, kinds: list[int | None]) -> Tensor | None:
        if all(kind is None for kind in kinds):
            return None
        if self.bias is None:
            return self.key.new_tensor([0.0 if kind is None else self.mixing.detail_bias for kind in kinds])
        own = at_least_fp32(self.bias).unbind()
        zero = own[0].new_zeros(())
        return torch.stack([zero if kind is None else own[kind] for kind in kinds])

    def read(self, state: Sources) -> Tensor:
        """(B, T, D): what the branch gets to see, before its norm."""
        if self.border and state.only is not None:
            return state.only
        if self.query is None:
            return state.stream if self.mixing.on_stream else state.done[0].total
        if state.bank is None:
            sources, _, _, bias = self.reading(state)
            return mix(sources, self.key, bias, self.constant, self.mixing.null_source)
        place = state.bank.place[self]
        start, ahead = state.mixed(place)
        sources, _, _, bias = self.reading(state, start)
        known = {key: dots for group in state.done[start:] for key, dots in group.known(place).items()}
        return mix(sources, state.bank.each[place], bias, self.constant, self.mixing.null_source, known, ahead)

    def shares(self, state: Sources) -> tuple[Tensor, Reading]:
        """p (B, T, J): what each source takes of the softmax."""
        reading = self.reading(state)
        return weights(reading.sources, self.key, reading.bias, self.mixing.null_source), reading

    def row(self, state: Sources) -> Tensor:
        """(B, T, S), or (S,) where nothing is chosen: the coefficient of each slot in `read`."""
        S, like = self.running(state) + 1 + len(self.mixing.bases), state.done[0].scale
        totals = [1 + (g - 1) * (1 + len(self.mixing.bases)) if g else 0 for g in range(len(state.groups))]
        if self.border and state.only is not None:
            return like.new_zeros(S).index_fill(0, like.new_tensor(totals[-1:], dtype=torch.long), 1)
        if self.query is None:
            taken = totals if self.mixing.on_stream else totals[:1]
            return like.new_zeros(S).index_fill(0, like.new_tensor(taken, dtype=torch.long), 1)
        p, reading = self.shares(state)
        columns = [torch.zeros_like(like)] * S
        for slot, share, source in zip(reading.slots, p.unbind(-1), reading.sources, strict=True):
            columns[slot] = (share if source.match is None else share * source.match) + self.constant
        return torch.stack(columns, -1)

    def lens(self, state: Sources) -> Tensor:
        return state.stream if self.mixing.on_stream else self.read(state)

    def running(self, state: Sources) -> int:
        """The slot of the running group's total, whether or not one runs."""
        return 1 + (len(state.done) - 1) * (1 + len(self.mixing.bases))

    def running_slot(self, state: Sources) -> int | None:
        """None on a plain stream, which is itself the sum that runs."""
        return None if state.run is None or self.mixing.on_stream else self.running(state)

    @torch.no_grad()
    def telemetry(self, state: Sources) -> dict[str, Tensor]:
        """`entropy` of the softmax in nats; what the embedding, the running total and all details take of it; biases of
        the details; the gate."""
        if self.query is None:
            return {}
        p, (_, slots, kinds, _) = self.shares(state)
        found = {"entropy": torch.special.entr(p).sum(-1).mean(), "embedding_share": p[..., 0].mean()}
        if state.run is not None:
            found["running_share"] = p[..., slots.index(self.running(state))].mean()
        if self.shown:
            found["detail_share"] = p[..., [j for j, kind in enumerate(kinds) if kind is not None]].sum(-1).mean()
        if self.bias is not None:
            own = zip(self.shown, self.bias.unbind(), strict=True)
            found.update({f"bias_{self.mixing.bases[b]}": value.clone() for b, value in own})
        gate = self.opening(p[..., 0])
        return found if gate is None else {**found, "gate": gate.mean()}


class SourcesConnection(SourcesReader, Connection):
    """Read, norm, branch; then the output joins the group that is open, or begins the next one.

    The first sublayer has nothing to choose from, so it has no query.
    """

    def __init__(self, site: Site, groups: Groups, mixing: Mixing, norm_eps: float, probe_total: bool = False) -> None:
        k, g, bases = site.sublayer, groups.index(site.sublayer), mixing.bases
        border = k == groups.starts[g]
        alike = [len(set(row)) < 2 for row in groups.so_far(k, g, bases)]
        hidden = [mixing.mask_duplicates and same and not border for same in alike]
        shown = [basis for basis, hide in zip(bases, hidden, strict=True) if k and (g > 0 or not hide)]
        super().__init__(site.shape.d_model, mixing, shown, border, query=k > 0)
        self.hidden, self.probe_total, self.signs = hidden, probe_total, groups.signs(k, bases)
        self.norm = RMSNorm(site.shape.d_model, norm_eps if k else site.shape.norm_eps)
        self.count = {"exact": groups.tensors(k, bases), "paper": groups.printed(k)} if k else {}

    def forward(self, state: Sources, branch: Callable[[Tensor], Tensor]) -> Sources:
        return self.write(state, branch(self.norm(self.read(state))))

    def write(self, state: Sources, y: Tensor) -> Sources:
        begins, mixing = self.begins(state), self.mixing
        old = None if begins else state.run
        total = y if old is None else old.total + y
        loud = loudness(((total, 1.0),), mixing.key_eps)
        match = Match(loud.square, mixing.max_match, mixing.match_eps)
        details: list[Detail] = []
        made: dict[int, Tensor] = {}
        for b, sign in enumerate(self.signs):
            plus = None if old is None else old.details[b].plus
            if sign and (old is None or plus is old.total):
                plus = total
            elif sign:
                if id(plus) not in made:
                    made[id(plus)] = y if plus is None else plus + y
                plus = made[id(plus)]
            parts = parts_of(total, plus)
            scale, _, factor = (
                again(loud, mixing.key_eps, match) if len(parts) == 1 else loudness(parts, mixing.key_eps, match)
            )
            details.append(Detail(plus, scale, cast(Tensor, factor)))
        run, done = Group(total, loud.scale, tuple(details)), state.done
        if begins and state.run is not None:
            done = (*done, state.run if state.bank is None else state.bank.scored(state.run, self))
        after = Sources(done, run, bank=state.bank, ahead=state.ahead)
        return after if state.bank is None else state.bank.ahead(after, self)

    def begins(self, state: Sources) -> bool:
        return self.border and state.run is not None

    def hides(self, detail: int) -> bool:
        return self.hidden[detail]

    def probe(self, state: Sources) -> Tensor:
        """The lens; or, if so set, the running total except at the border of a group."""
        return state.run.total if self.probe_total and not self.border and state.run is not None else self.lens(state)

    def flow(self, state: Sources) -> Flow:
        """Carry (S', S) and write (S',) hold zeros and signs only; S' > S where a group begins."""
        read = self.row(state)
        S, new = read.shape[-1], 1 + len(self.mixing.bases)
        after = S + new if self.begins(state) else S
        written = [0.0] * (after - new) + [1.0, *(1.0 if sign else -1.0 for sign in self.signs)]
        return Flow(read, torch.eye(after, S, dtype=read.dtype, device=read.device), read.new_tensor(written))

    def flops(self, counting: Counting = "exact") -> float:
        """Per tensor read a dot product and a weighted sum, 4 D. DepthBench counts one source too many at borders."""
        return 4 * self.d_model * self.count.get("exact" if self.mixing.bases else counting, 0)


class SourcesExit(SourcesReader, Exit):
    """A query of its own, over the embedding and the totals."""

    def __init__(self, d_model: int, groups: Groups, mixing: Mixing) -> None:
        super().__init__(d_model, mixing, (), border=True)
        self.count = {"exact": 1 + len(groups.lengths), "paper": groups.printed(sum(groups.lengths))}

    def flow(self, state: Sources) -> Flow:
        return Flow(self.row(state))

    def flops(self, counting: Counting = "exact") -> float:
        return 4 * self.d_model * self.count["exact" if self.mixing.bases else counting]


class StreamExit(Exit):
    """The plain stream: the sum of all that was written."""

    def lens(self, state: Sources) -> Tensor:
        return state.stream

    def flow(self, state: Sources) -> Flow:
        running = [] if state.run is not None else [0.0]
        return Flow(state.done[0].scale.new_tensor([1.0] * len(state.groups) + running))


# ------------------------------------------------------------------------------------------------ strategies


class OverSources:
    """The part of a strategy that follows from its settings. A strategy names it before `ResidualStrategy`."""

    norm_eps: float | None = None
    """Of the norms behind a mixture; None: as in all other norms."""
    probe: Literal["mixture", "block"] | None = None

    def mixing(self) -> Mixing:
        raise NotImplementedError(f"{type(self).__name__} must define mixing()")

    def groups(self, shape: ShapeSpec) -> Groups:
        """Which sublayers are summed together."""
        raise NotImplementedError(f"{type(self).__name__} must define groups(shape)")

    def entry(self, shape: ShapeSpec) -> Entry:
        return SourcesEntry(self.mixing())

    def connect(self, site: Site) -> Connection:
        return SourcesConnection(
            site, self.groups(site.shape), self.mixing(), self.mixture_eps(site.shape), self.probe == "block"
        )

    def exit(self, shape: ShapeSpec) -> Exit:
        return SourcesExit(shape.d_model, self.groups(shape), self.mixing())

    def final_norm(self, shape: ShapeSpec) -> nn.Module:
        return RMSNorm(shape.d_model, self.mixture_eps(shape))

    def join(self, state: Sources, connections: Sequence[Connection], exit: Exit) -> Sources:
        bank = Bank([r for r in (*connections, exit) if isinstance(r, SourcesReader) and r.query is not None])
        return Sources((bank.scored(state.done[0]),), bank=bank)

    def mixture_eps(self, shape: ShapeSpec) -> float:
        return shape.norm_eps if self.norm_eps is None else self.norm_eps

    def describe(self, shape: ShapeSpec) -> str:
        return self.groups(shape).described(self.mixing().bases)
