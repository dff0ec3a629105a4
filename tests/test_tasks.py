"""Evaluation sets: prompts, token boundaries, teacher-forced sums against a plain loop, ARC by lm-eval's rules."""

import gzip
import json
import math

import numpy as np
import pytest
import torch

from depthlit import Decoder, ShapeSpec
from depthlit.residuals import PreLN
from depthlit.tasks import arc
from depthlit.tasks.domains import TASKS, normalized, without_calculator_tags
from depthlit.tasks.scoring import Scored, batches, collate, encode_pair, score, with_space
from depthlit.tasks.sources import Missing, read_rows, renamed

SHAPE = ShapeSpec(2, 32, n_head=4, vocab_size=256, max_seq_len=64)


def by_byte(text: str) -> list[int]:
    return list(text.encode())


def by_pair(text: str) -> list[int]:
    """A tokenizer that merges: two equal characters become one token."""
    ids: list[int] = []
    for c in text.encode():
        if ids and ids[-1] == c and c < 128:
            ids[-1] = c + 128
        else:
            ids.append(c)
    return ids


@pytest.fixture(scope="module")
def decoder():
    return Decoder(SHAPE, PreLN(), seed=0).double()


def forward_of(decoder):
    return lambda tokens, targets: [decoder(tokens, targets)]


def plain(decoder, item: Scored) -> float:
    """One document at a time, from full logits."""
    if not item.n_scored:
        return 0.0
    ids = torch.tensor(item.ids)
    log_p = decoder(ids[None, :-1])[0].log_softmax(-1)
    positions = range(len(ids) - 1 - item.n_scored, len(ids) - 1)
    return -sum(log_p[t, ids[t + 1]].item() for t in positions)


TEXTS = [
    ("Q: one?\nA:", " two"),
    ("def f(x):\n", "    return x\n"),  # the prompt's newline is scored
    ("ends in spaces   ", "word"),
    ("", "no prompt at all"),
    ("no answer", ""),
    ("short", "x" * 200),  # longer than the context: truncated and counted
    ("y" * 200, " long prompt"),
    ("crlf\r\n", "a\r\nb"),
    ("emoji 🙂", "🙂🙂 done"),
]


@pytest.mark.parametrize("tokens_per_batch", [1, 100, 10_000])
@pytest.mark.parametrize("world", [1, 3])
def test_sums_equal_a_plain_loop_over_documents(decoder, tokens_per_batch, world):
    items = [encode_pair(by_byte, prompt, reference, 64) for prompt, reference in TEXTS]
    sums, calls = torch.zeros(len(items), dtype=torch.float64), []
    for rank in range(world):
        n = 0
        for mine, loss in score(forward_of(decoder), items, tokens_per_batch=tokens_per_batch, rank=rank, world=world):
            sums[mine] += loss[0]
            n += 1
        calls.append(n)
    assert len(set(calls)) == 1, "every rank must call the forward equally often"
    torch.testing.assert_close(sums.tolist(), [plain(decoder, item) for item in items], rtol=1e-9, atol=1e-9)


def test_a_resumed_scoring_skips_what_is_done(decoder):
    items = [encode_pair(by_byte, prompt, reference, 64) for prompt, reference in TEXTS]
    seen = [i for mine, _ in score(forward_of(decoder), items, tokens_per_batch=80, done={0, 3}) for i in mine]
    assert sorted(seen) == [i for i, item in enumerate(items) if item.n_scored and i not in (0, 3)]


def test_the_boundary_rule():
    item = encode_pair(by_byte, "a \n", "b", 64)
    assert item.ids == tuple(b"a \nb") and item.n_scored == 3 and item.n_bytes == 3
    assert encode_pair(by_byte, "", "abc", 64).n_scored == 2, "nothing precedes the first token"
    assert encode_pair(by_byte, "", "abc", 64, prefix=0).n_scored == 3
    assert encode_pair(by_byte, "ab", "", 64).n_scored == 0
    merged = encode_pair(by_pair, "ab", "bc", 64)
    assert merged.merged and merged.ids == (97, 98 + 128, 99) and merged.n_scored == 1
    assert not encode_pair(by_pair, "ab", "cc", 64).merged


def test_truncation_keeps_the_end_and_is_counted():
    item = encode_pair(by_byte, "p" * 10, "r" * 100, 64)
    assert len(item.ids) == 65 and item.n_scored == 64 and item.truncated == 45
    item = encode_pair(by_byte, "p" * 100, "rr", 64)
    assert len(item.ids) == 65 and item.n_scored == 2 and item.truncated == 37


def test_batches_hold_every_scored_item_once_and_keep_the_limit():
    lengths = torch.randint(2, 60, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    items = [Scored(tuple(range(n)), 1 if n % 5 else 0) for n in lengths]
    groups = batches(items, 120)
    assert sorted(i for group in groups for i in group) == [i for i, item in enumerate(items) if item.n_scored]
    assert all(len(g) * max(lengths[i] for i in g) <= 120 for g in groups if len(g) > 1)


def test_padding_is_not_scored():
    tokens, targets = collate([Scored((1, 2, 3, 4), 2), Scored((5, 6), 1)])
    assert tokens.tolist() == [[1, 2, 3], [5, 0, 0]] and targets.tolist() == [[-1, 3, 4], [6, -1, -1]]


def test_prompts_of_the_six_sets():
    row = {"text": "Add.", "test_list": ["t1", "t2", "t3", "t4"], "code": "x\r\n"}
    assert TASKS["mbpp"].pair(row) == (
        "You are an expert Python programmer, and here is your task: Add. Your code should pass these tests:\n\n"
        "t1\nt2\nt3\n[BEGIN]\n",
        "x\r\n",
    )
    assert TASKS["mbpp"].pair(row | {"code": "x"})[1] == "x\n"
    assert TASKS["humaneval"].pair({"prompt": "p\n", "canonical_solution": "s"}) == ("p\n", "s")
    row = {"question": "Why?", "correct_answer": "so", "support": "For."}
    assert TASKS["sciq"].pair(row) == ("Question: Why?\nAnswer:", " so\nExplanation: For.")
    assert TASKS["gsm8k"].pair({"question": "1+1?", "answer": "2"}) == ("Question: 1+1?\nAnswer:", " 2")
    assert TASKS["math500"].pair({"problem": "P", "solution": "S"}) == ("Problem:\nP\n\nSolution:", " S")
    wrong = {f"Incorrect Answer {i}": f"w{i}" for i in (1, 2, 3)}
    row = {"Question": "Q", "Correct Answer": "r", **wrong, "Explanation": "E", "Record ID": "rec1"}
    prompt, reference = TASKS["gpqa"].pair(row)
    assert reference == " r\nExplanation: E" and TASKS["gpqa"].pair(row)[0] == prompt
    lines = prompt.split("\n")
    assert sorted(line[3:] for line in lines[2:6]) == ["r", "w1", "w2", "w3"] and lines[-1] == "Answer:"
    orders = {TASKS["gpqa"].pair(row | {"Record ID": f"rec{i}"})[0] for i in range(20)}
    assert len(orders) > 5, "the order of choices depends on the record"


def test_options_on_text():
    assert normalized("a\r\nb\rc\n") == "a\nb\nc\n"
    assert without_calculator_tags("48/2 = <<48/2=24>>24 and <<1+1=2>>2") == "48/2 = 24 and 2"
    assert with_space("a", "b") == " b" and with_space("a\n", "b") == "b" and with_space("a", " b") == " b"
    assert with_space("", "b") == "b"


def test_local_files(tmp_path):
    rows = [{"question": "q", "answer": "a"}, {"question": "r", "answer": "b"}]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    assert read_rows(tmp_path / "a.jsonl") == read_rows(tmp_path / "a.jsonl.gz") == rows
    assert renamed(rows, ["text"], {"text": "question"}, "a") == [{"text": "q"}, {"text": "r"}]
    (tmp_path / "bad.jsonl").write_text(text + "{")
    with pytest.raises(Missing, match=r"bad.jsonl, line 3: not JSON"):
        read_rows(tmp_path / "bad.jsonl")
    with pytest.raises(Missing, match="does not exist"):
        read_rows(tmp_path / "none.jsonl")
    with pytest.raises(Missing, match=r"no column 'text' for 'text' \(it has question, answer\)"):
        renamed(rows, ["text"], {}, "a")


def test_arc_rules():
    row = {"question": "Which?", "choices": {"text": ["aa", "b", "cccc"], "label": ["1", "2", "3"]}, "answerKey": "3"}
    q = arc.question(row)
    assert q == arc.Question("Question: Which?\nAnswer:", ("aa", "b", "cccc"), 2)
    acc, acc_norm = arc.right([q, q], np.array([-4.0, -3.0, -5.0, -4.0, -3.0, -16.0]))
    assert acc.tolist() == [0, 0] and acc_norm.tolist() == [1, 0]
    tie = arc.Question("Q", ("same", "same"), 1)
    assert arc.right([tie], np.array([-1.0, -1.0]))[0].tolist() == [0], "the first of equals wins"
    assert arc.shortest_choice([q, tie]) == 0.0
    assert arc.fewest_tokens([q, tie], [3, 1, 1, 2, 2]) == (1 / 2 + 1 / 2) / 2
    assert arc.fewest_tokens([q, q], [2, 2, 2, 2, 2, 1]) == (1 / 3 + 1) / 2
    with pytest.raises(ValueError, match="'D' is not among"):
        arc.question(row | {"answerKey": "D"})


def test_an_untrained_model_sits_near_the_uniform_loss():
    """ln V + (1 - 1/V terms) d s^2 / 2: the variance of a logit is d s^2 with normed states; 0.97 is the cut at 3 s."""
    shape = ShapeSpec(2, 256, n_head=4, vocab_size=2048, max_seq_len=64)
    decoder = Decoder(shape, PreLN(), seed=0)
    ids = torch.randint(0, 2048, (16, 65), generator=torch.Generator().manual_seed(0))
    loss = decoder(ids[:, :-1], ids[:, 1:]).mean().item()
    assert loss == pytest.approx(math.log(2048) + 0.97 * 256 * 0.02**2 / 2, rel=0.01)
