"""The six domain sets of DepthBench: which rows, which prompt, which reference is scored.

A row becomes a pair of texts; the model is asked for the likelihood of the second after the first, zero-shot. Prompts
and fields are those of the paper's evaluation (arXiv:2609.32534, Sec. 2.3); MBPP's is the stock prompt of
lm-evaluation-harness.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Task:
    """One evaluation set.

    Args:
        name: as in metric names, nll/<name>/<key>.
        category: whose figure is the mean over its tasks.
        dataset, config, split: on the Hugging Face hub.
        columns: what `pair` reads; a local file may name them otherwise.
        pair: row -> (prompt, reference).
        private: rows must not appear in logs.
    """

    name: str
    category: str
    dataset: str
    config: str | None
    split: str
    columns: tuple[str, ...]
    pair: Callable[[Row], tuple[str, str]]
    private: bool = False


def mbpp(row: Row) -> tuple[str, str]:
    tests = "\n".join(row["test_list"][:3])
    prompt = f"You are an expert Python programmer, and here is your task: {row['text']} "
    code = row["code"]
    return f"{prompt}Your code should pass these tests:\n\n{tests}\n[BEGIN]\n", code + "\n" * (not code.endswith("\n"))


def humaneval(row: Row) -> tuple[str, str]:
    return row["prompt"], row["canonical_solution"]


def sciq(row: Row) -> tuple[str, str]:
    return f"Question: {row['question']}\nAnswer:", f" {row['correct_answer']}\nExplanation: {row['support']}"


def gpqa(row: Row) -> tuple[str, str]:
    right = row["Correct Answer"].strip()
    choices = [right, *(row[f"Incorrect Answer {i}"].strip() for i in (1, 2, 3))]
    seed = hashlib.sha256(row["Record ID"].encode()).digest()[:8]
    random.Random(int.from_bytes(seed, "big")).shuffle(choices)
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCD", choices, strict=True))
    prompt = f"Question: {row['Question'].strip()}\nChoices:\n{listed}\nAnswer:"
    return prompt, f" {right}\nExplanation: {row['Explanation'].strip()}"


def gsm8k(row: Row) -> tuple[str, str]:
    return f"Question: {row['question']}\nAnswer:", f" {row['answer']}"


def math500(row: Row) -> tuple[str, str]:
    return f"Problem:\n{row['problem']}\n\nSolution:", f" {row['solution']}"


GPQA_COLUMNS = ("Question", "Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3)), "Explanation", "Record ID")

TASKS = {
    task.name: task
    for task in (
        Task("mbpp", "coding", "google-research-datasets/mbpp", "full", "test", ("text", "test_list", "code"), mbpp),
        Task(
            "humaneval", "coding", "openai/openai_humaneval", None, "test", ("prompt", "canonical_solution"), humaneval
        ),
        Task("sciq", "stem", "allenai/sciq", None, "test", ("question", "correct_answer", "support"), sciq),
        Task("gpqa", "stem", "Idavidrein/gpqa", "gpqa_diamond", "train", GPQA_COLUMNS, gpqa, private=True),
        Task("gsm8k", "math", "openai/gsm8k", "main", "test", ("question", "answer"), gsm8k),
        Task("math500", "math", "HuggingFaceH4/MATH-500", None, "test", ("problem", "solution"), math500),
    )
}
"""Every domain task, by name."""


def normalized(text: str) -> str:
    """Line ends as LF. 499 of MBPP's 500 solutions have CRLF."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def without_calculator_tags(text: str) -> str:
    """GSM8K's rationale without <<48/2=24>>, a quarter of its tokens and nearly free to predict."""
    return re.sub(r"<<.*?>>", "", text)
