"""How likely does the network find reference answers in coding, STEM and mathematics?

    token_mean = sum of -log p(reference tokens | prompt) / number of reference tokens        per set, in nats

Zero-shot and teacher-forced on MBPP, HumanEval (coding), SciQ, GPQA-Diamond (stem), GSM8K, MATH-500 (math); a category
is the mean of its two sets. DepthBench, Fig. 4, arXiv:2609.32534. Whitespace at a prompt's end is scored with the
reference, both are encoded jointly, no BOS, and only the last T + 1 tokens are kept. Also logged: doc_mean (mean of the
documents' own means), bits_per_byte (of the reference's UTF-8, whatever the tokenizer), tokens, documents, and how many
documents were truncated, had a token across the join (merged), or had nothing to score (empty).

499 of MBPP's 500 solutions have CRLF line ends, a quarter of GSM8K's reference tokens are calculator tags <<...>>: both
are scored as stored, unless an option says otherwise. GPQA is gated; its text is never logged.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from depthlit import plots
from depthlit.diagnostic import Answer, Subject
from depthlit.statistics import bootstrap
from depthlit.tasks.domains import TASKS, normalized, without_calculator_tags
from depthlit.tasks.evaluation import Evaluation
from depthlit.tasks.scoring import Encode, Scored, encode_pair, with_space
from depthlit.tasks.sources import Missing, hub_rows, read_rows, renamed


class DomainNLL(Evaluation):
    """Negative log-likelihood of reference answers in coding, STEM and mathematics.

    Args:
        tasks: which of mbpp, humaneval, sciq, gpqa, gsm8k, math500.
        paths: local .jsonl, .jsonl.gz or .parquet files by task, in place of the Hugging Face hub.
        columns: what the columns of a local file are called, by task, where they differ:
            {mbpp: {text: prompt, test_list: test}}.
        mode: "depthbench" encodes prompt and reference jointly; "separate" encodes them apart, as OLMo does.
        normalize_newlines: turn CRLF into LF.
        strip_calculator_tags: leave out GSM8K's <<...>>.

    Raises:
        ValueError: a task is not one of the six.
    """

    draws = "token_mean"

    def __init__(
        self,
        tasks: list[str] = list(TASKS),  # noqa: B006 (copied below)
        paths: dict[str, str] | None = None,
        columns: dict[str, dict[str, str]] | None = None,
        mode: Literal["depthbench", "separate"] = "depthbench",
        normalize_newlines: bool = False,
        strip_calculator_tags: bool = False,
        **evaluation: Any,
    ) -> None:
        super().__init__(**evaluation)
        self.tasks, self.paths, self.columns = list(tasks), dict(paths or {}), dict(columns or {})
        self.mode, self.normalize_newlines, self.strip_calculator_tags = mode, normalize_newlines, strip_calculator_tags
        for name in (*self.tasks, *self.paths, *self.columns):
            if name not in TASKS:
                raise ValueError(f"DomainNLL: no task is named {name!r}; known: {', '.join(TASKS)}")

    def load(self, encode: Encode, max_seq_len: int) -> None:
        for name in self.tasks:
            try:
                pairs = self.pairs(name)[: self.limit]
                items = [self.encoded(encode, *pair, max_seq_len) for pair in pairs]
            except Missing as reason:
                self.notes.append(f"{name} is left out: {reason}")
                continue
            except ValueError as error:  # the tokenizer has no id for a character
                self.notes.append(f"{name} is left out: the tokenizer cannot encode it ({error})")
                continue
            self.items += items
            self.sets[name] = len(items)

    def pairs(self, name: str) -> list[tuple[str, str]]:
        """Prompts and references of a task.

        Raises:
            Missing: it cannot be had here.
        """
        task, path = TASKS[name], self.paths.get(name)
        rows = hub_rows(task.dataset, task.config, task.split) if path is None else read_rows(path)
        rows = renamed(rows, task.columns, self.columns.get(name, {}), path or task.dataset)
        found = [task.pair(row) for row in rows]
        if self.strip_calculator_tags and name == "gsm8k":
            found = [(prompt, without_calculator_tags(reference)) for prompt, reference in found]
        if self.normalize_newlines:
            found = [(normalized(prompt), normalized(reference)) for prompt, reference in found]
        return found

    def encoded(self, encode: Encode, prompt: str, reference: str, max_seq_len: int) -> Scored:
        joint = self.mode == "depthbench"
        return encode_pair(encode, prompt, with_space(prompt, reference), max_seq_len, self.bos, joint)

    def metric(self, key: str) -> str:
        return f"nll/{key}"

    def derive(self, values: dict[str, np.ndarray], subject: Subject) -> dict[str, Any]:
        found: dict[str, Any] = {f"note_{i}": note for i, note in enumerate(self.notes)}
        summary, start = [], 0
        for name, number in self.sets.items():
            items = self.items[start : start + number]
            nll, tokens = values["nll"][0, start : start + number], np.array([item.n_scored for item in items])
            start += number
            scored = tokens > 0
            low, high = bootstrap(nll[scored, None], tokens[scored], self.seed)
            mean = nll.sum() / tokens.sum() if scored.any() else np.nan
            found |= {
                f"{name}/token_mean": mean,
                f"{name}/doc_mean": (nll[scored] / tokens[scored]).mean() if scored.any() else np.nan,
                f"{name}/bits_per_byte": nll.sum() / np.log(2) / max(1, sum(item.n_bytes for item in items)),
                f"{name}/tokens": tokens.sum(),
                f"{name}/documents": number,
                f"{name}/truncated": sum(item.truncated > 0 for item in items),
                f"{name}/merged": sum(item.merged for item in items),
                f"{name}/empty": (~scored).sum(),
                f"{name}_nll": nll,
                f"{name}_tokens": tokens,
            }
            summary.append([mean, float(low[0]), float(high[0])])
        for category in dict.fromkeys(TASKS[name].category for name in self.sets):
            both = [name for name, task in TASKS.items() if task.category == category]
            if set(both) <= set(self.sets):
                found[category] = np.mean([found[f"{name}/token_mean"] for name in both])
        if summary:
            found |= dict(zip(("token_mean", "low", "high"), np.array(summary).T, strict=True))
        return found

    def draw(self, answer: Answer) -> Figure | None:
        if "token_mean" not in answer.values:
            return None
        figure, axes = plots.blank(f"Domain NLL: {answer.title}")
        v = answer.values
        plots.bars(axes, v["token_mean"], f"{self.mode}, 95 % over documents", "", "nats per reference token",
                   (v["low"], v["high"]), self.scale)  # fmt: skip
        names = list(answer.windows["documents"])
        axes.set_xticks(range(len(names)), names)
        return figure
