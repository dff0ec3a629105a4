"""A decoder that knows nothing about residuals: embed, walk the blocks in `order`, read out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from depthlit.connection import Connection, Reader, ResidualStrategy, Site, State
from depthlit.layers import Attention, Context, SwiGLU
from depthlit.loss import head_nll
from depthlit.routes import walk, whole
from depthlit.shape import ShapeSpec

Step = int | tuple[str, int]
"""A block to run, or a rule and the block that it skips: ("silent", 3), or (name, 3) of the strategy's `skip_rules`."""
Order = tuple[Step, ...]
INIT_STD = 0.02


class Block(nn.Module):
    """Attention, then feed-forward. The unit of sharding, recomputing, compiling, skipping and swapping.

    Attributes:
        recompute: keep only the state that comes in, and run again for backward.
    """

    def __init__(self, shape: ShapeSpec, strategy: ResidualStrategy, block: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(shape), SwiGLU(shape)
        self.join_attn = strategy.connect(Site(2 * block, shape))
        self.join_mlp = strategy.connect(Site(2 * block + 1, shape))
        self.recompute = False

    def steps(self, context: Context) -> Iterator[tuple[Connection, Callable[[Tensor], Tensor]]]:
        """The two connections, each with the branch it is handed."""
        yield self.join_attn, self.attn.at(context)
        yield self.join_mlp, self.mlp

    def forward(self, state: State, context: Context) -> State:
        if self.recompute and torch.is_grad_enabled():
            return checkpoint(self.run, state, context, use_reentrant=False)
        return self.run(state, context)

    def run(self, state: State, context: Context) -> State:
        for connection, branch in self.steps(context):
            state = connection(state, branch)
        return state

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """For a while both branches return zero, so that the block takes part in the routing but adds nothing."""
        with ExitStack() as hooks:
            for branch in (self.attn, self.mlp):
                handle = branch.out.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))
                hooks.callback(handle.remove)
            yield


class Decoder(nn.Module):
    """Decoder-only language model of one shape, wired by one strategy.

    Args:
        shape: how deep, how wide.
        strategy: how sublayers join the residual stream.
        seed: of the initial weights. Every weight has a generator of its own, seeded by this and its name, so that
            weights of one name are equal under every strategy. None takes the seed from torch's global generator.
        join: whether weights will be at hand outside of their own block's forward, so that `ResidualStrategy.join` may
            ask for them; not where an engine shards them.

    Attributes:
        order: the blocks that `forward` walks; see `depthlit.interventions` for changing it for a while.
        path: while routes are walked, the steps that the current state has taken; `paths` those of all the states that
            go through a block as one batch, of which there are at most `abreast`.
        headless: stop behind the exit, without logits; see `depthlit.interventions.headless`.
    """

    def __init__(
        self, shape: ShapeSpec, strategy: ResidualStrategy, seed: int | None = None, join: bool = True
    ) -> None:
        super().__init__()
        self.shape, self.strategy = shape, strategy
        self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
        self.entry = strategy.entry(shape)
        self.blocks = cast("Sequence[Block]", nn.ModuleList(Block(shape, strategy, i) for i in range(shape.n_layer)))
        self.exit = strategy.exit(shape)
        self.norm = strategy.final_norm(shape)
        self.head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
        if shape.tie_embeddings:
            self.head.weight = self.embed.weight
        self.join = join
        self.order: Order = tuple(range(shape.n_layer))
        self.abreast = 1
        self.at(())
        self.headless = False
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None) -> None:
        """Truncated normal of std 0.02, cut at 3 std, for every matrix; then each connection has the last word."""
        seed = torch.initial_seed() if seed is None else seed
        names = {id(p): name for name, p in self.named_parameters()}

        def draw(weight: Tensor, std: float) -> None:
            if weight.is_meta:
                return
            own = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{names[id(weight)]}".encode()))
            value = torch.empty(weight.shape, dtype=torch.float64)  # its last bit is the processor's, not that of fp32
            nn.init.trunc_normal_(value, std=std, a=-3 * std, b=3 * std, generator=own)
            weight.copy_(value)

        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                draw(module.weight, INIT_STD)
        for block in self.blocks:
            block.join_attn.init_branch(block.attn)
            block.join_mlp.init_branch(block.mlp)
        for module in self.modules():
            if isinstance(module, Reader):
                module.init_own(draw)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        documents: Tensor | None = None,
        routes: Sequence[Order] | None = None,
        last: bool = False,
    ) -> Tensor | list[Tensor]:
        """Logits of the next token, or the loss per token.

        Args:
            tokens: (B, T) integers in [0, V).
            targets: (B, T) integers. If given, returns the negative log-likelihood in nats per token (B, T), in fp32
                or wider; 0 where the target is negative.
            documents: (B, T) integers that are equal within a document and do not come again in the row; attention
                then stays within documents.
            routes: several orders to walk in one forward, each distinct prefix evaluated once, in the order in which
                they are first met; the result is then a list, one entry per route.
            last: compute logits at the last position only, as in a prefill.

        Returns:
            (B, T, V) logits ((B, 1, V) with `last`), or (B, T) losses.
        """
        context = Context.of(self.shape, tokens, self.embed.weight.dtype, documents)
        state = self.entry(self.embed(tokens))
        if routes is None:
            if self.in_turn:
                joins = [join for block in self.blocks for join in (block.join_attn, block.join_mlp)]
                state = self.strategy.join(state, joins, self.exit)
            for step in self.order:
                state = self.take(step, state, context)
            return self.read_out(state, targets, last)
        return walk(self, state, context, routes, targets)

    @property
    def in_turn(self) -> bool:
        """Whether every block is about to run once, in order, for a backward that does not run it again."""
        return (
            self.join
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()  # which fuses passes by itself
            and self.order == tuple(range(self.shape.n_layer))
            and not any(block.recompute for block in self.blocks)
        )

    def at(self, *paths: Order, apart: Callable[[State], list[State]] = whole) -> None:
        """Tell those who look where the walk of routes is, and how to take apart the state that they meet."""
        self.path, self.paths, self.apart = paths[0], paths, apart

    def take(self, step: Step, state: State, context: Context) -> State:
        """One step of an order: run a block, or skip it by a named rule."""
        if isinstance(step, int):
            return self.blocks[step](state, context)
        rule, block = step
        if rule == "silent":
            with self.blocks[block].silenced():
                return self.blocks[block](state, context)
        return self.strategy.skip_rules[rule](state)

    def read_out(self, state: State, targets: Tensor | None = None, last: bool = False) -> Tensor:
        """Logits (B, T, V) of a final state, or the loss per token (B, T); an empty tensor if `headless`."""
        x = self.exit(state, self.norm)
        if self.headless:
            return x.new_empty(0)
        if targets is not None:
            return head_nll(self.head, x, targets)
        return self.head(x[:, -1:] if last else x)
