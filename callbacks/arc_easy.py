"""How many easy science questions does the network answer, and how many without each single layer?

    acc: the choice with the highest summed log-likelihood is the right one;  acc_norm: divided by its characters
    drop(s) = accuracy - accuracy without layer s

Zero-shot, by the rules of lm-evaluation-harness 0.4.13 (depthlit.tasks.arc); intervals are 95 % by bootstrap over the
questions. `fewest_tokens` is the accuracy of taking a choice with the fewest tokens, where an untrained network's acc
lies; `shortest` that of the fewest characters. The intact network and all L without a layer are walked in one forward
per batch, with what they share computed once.

DepthBench, Fig. 8, arXiv:2609.32534. `drop`, `low`, `high`: (L,), of the score that is named by `score`.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from callbacks.layer_pruning import prunings
from depthlit import plots
from depthlit.decoder import Decoder, Order
from depthlit.diagnostic import Answer, Subject
from depthlit.interventions import check_rule
from depthlit.statistics import bootstrap
from depthlit.tasks import arc
from depthlit.tasks.evaluation import Evaluation
from depthlit.tasks.scoring import Encode, encode_pair
from depthlit.tasks.sources import Missing, hub_rows, read_rows, renamed


class ArcEasy(Evaluation):
    """Accuracy on ARC-Easy, and its drop without each single layer.

    Args:
        path: a local .jsonl, .jsonl.gz or .parquet file, in place of the hub's test split (2376 questions).
        prune: leave out each layer in turn, too.
        skip: what leaving a layer out means: pass, silent, or a rule of the strategy.
        score: which accuracy the drop is of.
    """

    draws = "drop"

    def __init__(
        self,
        path: str | None = None,
        prune: bool = True,
        skip: str = "pass",
        score: Literal["acc", "acc_norm"] = "acc_norm",
        **evaluation: Any,
    ) -> None:
        super().__init__(**evaluation)
        self.path, self.prune, self.skip, self.score = path, prune, skip, score
        self.questions: list[arc.Question] = []

    def load(self, encode: Encode, max_seq_len: int) -> None:
        try:
            rows = hub_rows(*arc.ARC_EASY) if self.path is None else read_rows(self.path)
            rows = renamed(rows, arc.COLUMNS, {}, self.path or arc.ARC_EASY[0])[: self.limit]
            self.questions = [arc.question(row) for row in rows]
            self.items = [
                encode_pair(encode, q.prompt, f" {choice}", max_seq_len, self.bos)
                for q in self.questions
                for choice in q.choices
            ]
            self.sets = {"arc_easy": len(self.questions)}
        except Missing as reason:
            self.notes.append(f"ARC-Easy is left out: {reason}")
        except ValueError as error:
            self.notes.append(f"ARC-Easy is left out: {error}")

    def check(self, decoder: Decoder) -> None:
        super().check(decoder)
        check_rule(decoder, "skip", self.skip)

    def routes(self, order: Order) -> list[Order]:
        return prunings(order, self.skip) if self.prune else [order]

    def metric(self, key: str) -> str:
        return f"eval/arc_easy/{key}"

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        found: dict[str, Any] = {f"note_{i}": note for i, note in enumerate(self.notes)}
        if not self.questions:
            return found
        right = [arc.right(self.questions, -nll) for nll in values["nll"]]
        acc, acc_norm = (np.stack(kind, -1) for kind in zip(*right, strict=True))  # (question, route)
        ones = np.ones(len(self.questions))
        for name, scores in (("acc", acc), ("acc_norm", acc_norm)):
            low, high = bootstrap(scores[:, :1], ones, self.seed)
            found |= {name: scores[:, 0].mean(), f"{name}_low": low[0], f"{name}_high": high[0]}
        found |= {
            "shortest": arc.shortest_choice(self.questions),
            "fewest_tokens": arc.fewest_tokens(self.questions, [item.n_scored for item in self.items]),
            "questions": len(self.questions),
        }
        if self.prune:
            chosen = acc if self.score == "acc" else acc_norm
            drops = chosen[:, :1] - chosen[:, 1:]
            low, high = bootstrap(drops, ones, self.seed)
            found |= {"drop": drops.mean(0), "low": low, "high": high, "largest_drop": drops.mean(0).max()}
        return found

    def draw(self, answer: Answer) -> Figure | None:
        if "drop" not in answer.values:
            return None
        figure, axes = plots.blank(f"ARC-Easy without a layer: {answer.title}", width=8.0)
        v, n = answer.values, answer.numbers
        title = f"{self.score} {n[self.score]:.3f} intact ({self.skip}); 95 % over {n['questions']:.0f} questions"
        plots.bars(
            axes, v["drop"], title, "left-out layer s", f"drop of {self.score}", (v["low"], v["high"]), self.scale
        )
        return figure
