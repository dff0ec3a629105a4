"""The seam of the project: how a sublayer joins the residual stream.

- A *state* is what travels down between sublayers: a tensor, or a NamedTuple of tensors.
- A *branch* is a sublayer's own function, attention or feed-forward, without its norm: (B, T, D) -> (B, T, D).
- A *connection* turns one state into the next with the help of one branch; its `forward` is the paper's equation.
- A *strategy* is a frozen dataclass of settings that builds the connections and the two ends of the stream.
- An *order* is the tuple of block indices that the decoder walks.

Letters, everywhere: B batch, T tokens, D width, H heads, M streams, S sources (or slots), L blocks, V vocabulary.
"""

# no postponed annotations: the command line evaluates a strategy's types among the names of its own file
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

from torch import Tensor, nn

from depthlit.layers import RMSNorm
from depthlit.shape import ShapeSpec

State = Any
"""A tensor, or a (nested) NamedTuple or tuple of tensors, Nones and integers that tell how it is built; never changed
in place. What else is in it belongs to no batch and is handed on as it is, from the entry to the exit."""

Draw = Callable[[Tensor, float], None]
"""draw(weight, std) fills a weight from its own named generator: truncated normal, cut at 3 std."""


Counting = Literal["paper", "exact"]


class SwapRule(NamedTuple):
    """What does not move with its block when two blocks trade places, by name of an attribute of connections."""

    handed_on: tuple[str, ...] = ()  # of the first connection: goes with the block before; that of the exit, the last
    stays: tuple[str, ...] = ()  # of either connection: stays at its place in the order


@dataclass(frozen=True)
class Site:
    """Where a connection sits.

    Args:
        sublayer: index from 0 to 2 L - 1; even is attention, odd is feed-forward.
        shape: the shape of the whole network.
    """

    sublayer: int
    shape: ShapeSpec

    @property
    def block(self) -> int:
        """Index of the block, from 0 to L - 1. Papers that count layers from 1 mean `block + 1`."""
        return self.sublayer // 2

    @property
    def is_attention(self) -> bool:
        return self.sublayer % 2 == 0

    @property
    def is_last(self) -> bool:
        return self.sublayer + 1 == self.shape.n_sublayer


class Flow(NamedTuple):
    """A connection as linear algebra over the slots of its state: x = read . S,  S' = carry S + write y.

    Coefficients may depend on the token (leading dimensions B, T) or be the same for all (no leading dimensions).
    At an exit, which only reads, `carry` and `write` are None.
    """

    read: Tensor  # (..., S)
    carry: Tensor | None = None  # (..., S', S): from the last index to the one before it
    write: Tensor | None = None  # (..., S')


class Reader(nn.Module):
    """Something that looks at a state: a connection, or the exit.

    A subclass that owns parameters directly sets their constants in `reset_parameters` (called by the constructor)
    and draws the random ones in `init_own`. `roles` names the role of a parameter where the default, "routing", is
    wrong; parameters of `nn.Linear` are "matrix", of norms "norm".
    """

    roles: ClassVar[Mapping[str, str]] = {}

    def lens(self, state: State) -> Tensor:
        """(B, T, D): the state as an output head would read it at this point."""
        return state

    def normed(self, state: State, norm: nn.Module) -> Tensor:
        """(B, T, D): the state as the output head is handed it at this point, behind the final norm."""
        return norm(self.lens(state))

    def probe(self, state: State) -> Tensor:
        """(B, T, any): the state as one vector per token, for angles and norms."""
        return self.lens(state)

    def flow(self, state: State) -> Flow | None:
        """The routing coefficients of this state; None where the stream has no scalar paths (a norm or gain on it)."""
        return None

    def running_slot(self, state: State) -> int | None:
        """Index, in `flow(state).read`, of the slot in which the newest outputs are being summed, where older sums are
        kept apart from it; None where there is none."""
        return None

    def telemetry(self, state: State) -> dict[str, Tensor]:
        """Cheap scalar figures about the routing of this state, by name; all are means over tokens."""
        return {}

    def flops(self, counting: Counting = "exact") -> float:
        """FLOPs per token that this wiring adds to branch and norm, 2 per multiply-add, elementwise gates not counted.

        Args:
            counting: "paper" reproduces the formulas of DepthBench, App. D (arXiv:2609.32534); "exact" counts what
                this code computes.
        """
        return 0.0

    def init_own(self, draw: Draw) -> None:
        """Draw the random initial values of the reader's own weights. Constants belong in the constructor."""


class Connection(Reader):
    """One residual connection. `forward` is the equation; everything else has a default."""

    def forward(self, state: State, branch: Callable[[Tensor], Tensor]) -> State:
        raise NotImplementedError(f"{type(self).__name__} must define forward(state, branch)")

    def init_branch(self, branch: nn.Module) -> None:
        """Have the last word on the branch's fresh weights (DeepNorm, HC)."""


class Entry(nn.Module):
    """The upper end of the stream: embedding (B, T, D) -> state."""

    def forward(self, x: Tensor) -> State:
        return x

    def write(self, x: Tensor) -> Tensor:
        """(S,): the coefficients with which the embedding enters the slots of the first state."""
        return x.new_ones(1)


class Exit(Reader):
    """The lower end of the stream: state -> (B, T, D), normed. `forward` calls `lens`, never the other way round."""

    def forward(self, state: State, norm: nn.Module) -> Tensor:
        return self.normed(state, norm)

    def flow(self, state: State) -> Flow | None:
        return Flow(self.lens(state).new_ones(1))


class ResidualStrategy:
    """What enters the stream, how each sublayer joins it, what leaves it. Holds settings, never tensors.

    A subclass is a frozen dataclass. A field whose default is None takes its value from the table
    `presets[self.preset]`, if the subclass has a field `preset`.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    skip_rules: ClassVar[Mapping[str, Callable[[State], State]]] = {}
    """Named ways to pass a skipped block by: what becomes of the state. Two more hold for every strategy: "pass" leaves
    the state as it is, "silent" runs the block with its branches at zero."""

    foreign: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """By a family of public checkpoints, such as "llama": what that family calls each module inside our block."""

    swap_rules: ClassVar[Mapping[str, SwapRule]] = {}
    """Named ways to let two blocks trade places, beside "whole", by which everything moves with its block."""

    def __post_init__(self) -> None:
        if not self.presets:
            return
        name: str = getattr(self, "preset")  # noqa: B009 (declared by the subclass)
        if name not in self.presets:
            raise ValueError(f"{type(self).__name__} has no preset {name!r}; known: {', '.join(self.presets)}")
        for field in fields(self):  # type: ignore[arg-type]
            if getattr(self, field.name) is None and field.name in self.presets[name]:
                object.__setattr__(self, field.name, self.presets[name][field.name])

    def __str__(self) -> str:
        """The name, and the settings that differ from the defaults, those of the preset if it is another."""
        preset = getattr(self, "preset", None)
        plain = type(self)(**({} if preset is None else {"preset": preset}))
        names = [field.name for field in fields(self)]  # type: ignore[arg-type]
        changed = [f"{name}={getattr(self, name)!r}" for name in names if getattr(self, name) != getattr(plain, name)]
        if preset not in (None, next(iter(self.presets), None)):
            changed.insert(0, f"preset={preset!r}")
        return type(self).__name__ + (f"({', '.join(changed)})" if changed else "")

    def entry(self, shape: ShapeSpec) -> Entry:
        return Entry()

    def connect(self, site: Site) -> Connection:
        raise NotImplementedError(f"{type(self).__name__} must define connect(site)")

    def exit(self, shape: ShapeSpec) -> Exit:
        return Exit()

    def join(self, state: State, connections: Sequence[Connection], exit: Exit) -> State:
        """The first state, with what lets readers be asked together that will meet it one by one.

        Called only where that is sound: with gradients, all weights at hand outside of their own block's forward, and
        every block run once, in order, eagerly, and not again for backward. Nothing may depend on it but speed.
        """
        return state

    def final_norm(self, shape: ShapeSpec) -> nn.Module:
        """The norm between the exit and the head."""
        return RMSNorm(shape.d_model, shape.norm_eps)

    def learning_rate(self, shape: ShapeSpec) -> float:
        """Peak learning rate of DepthBench's recipe (arXiv:2609.32534, Sec. 2.3): 2e-3, at 1.6B 5e-4."""
        return 5e-4 if shape.parameters() > 1e9 else 2e-3

    def describe(self, shape: ShapeSpec) -> str:
        """Lines for the summary at start beyond the settings themselves, such as a resolved block schedule."""
        return ""
