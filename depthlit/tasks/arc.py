"""ARC-Easy by the rules of lm-evaluation-harness 0.4.13: which choice has the highest likelihood.

    acc: argmax of the summed log-likelihood;  acc_norm: divided by the choice's length in characters

The prompt is "Question: {question}\\nAnswer:", a choice is scored with one space in front, lengths are counted without
it. Ties go to the first choice. Clark et al., Think you have Solved Question Answering?, arXiv:1803.05457.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

ARC_EASY = ("allenai/ai2_arc", "ARC-Easy", "test")
COLUMNS = ("question", "choices", "answerKey")


@dataclass(frozen=True)
class Question:
    """A question, its choices in their order, and the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    gold: int


def question(row: Mapping[str, Any]) -> Question:
    """Labels may be letters or digits, three to five of them.

    Raises:
        ValueError: the key is not among the labels.
    """
    labels, texts = list(row["choices"]["label"]), tuple(row["choices"]["text"])
    if row["answerKey"] not in labels:
        raise ValueError(f"ARC: the key {row['answerKey']!r} is not among the labels {labels}")
    return Question(f"Question: {row['question']}\nAnswer:", texts, labels.index(row["answerKey"]))


def right(questions: Sequence[Question], log_likelihood: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Whether each question is answered rightly, by sum and per character.

    Args:
        log_likelihood: (choices of all questions in turn,), in nats.

    Returns:
        acc and acc_norm per question, 0 or 1, (n_question,) each.
    """
    by_sum, by_character, start = [], [], 0
    for q in questions:
        own = np.asarray(log_likelihood[start : start + len(q.choices)], dtype=float)
        start += len(q.choices)
        lengths = np.array([max(1, len(choice)) for choice in q.choices], dtype=float)
        by_sum.append(int(np.argmax(own)) == q.gold)
        by_character.append(int(np.argmax(own / lengths)) == q.gold)
    return np.array(by_sum, dtype=float), np.array(by_character, dtype=float)


def shortest_choice(questions: Sequence[Question]) -> float:
    """Accuracy of always taking the first of the choices with the fewest characters."""
    return float(np.mean([min(range(len(q.choices)), key=lambda i: len(q.choices[i])) == q.gold for q in questions]))


def fewest_tokens(questions: Sequence[Question], tokens: Sequence[int]) -> float:
    """Expected accuracy of taking a choice with the fewest tokens, at random where several have: what an untrained
    model's `acc` comes near to, as each token costs it about ln V.

    Args:
        tokens: of the choices of all questions in turn, (n_choice,).
    """
    hits, start = [], 0
    for q in questions:
        own = list(tokens[start : start + len(q.choices)])
        start += len(q.choices)
        hits.append((own[q.gold] == min(own)) / own.count(min(own)))
    return float(np.mean(hits))
