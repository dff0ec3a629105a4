"""Domain NLL, ARC-Easy and the cost meter: against plain loops, resumed, with sets missing, in a training run."""

import copy
import json
import math

import numpy as np
import pytest
import torch

from callbacks import ArcEasy, CostMeter, DomainNLL
from depthlit import Decoder, ShapeSpec
from depthlit.asking import unfinished
from depthlit.data.tokenizers import Bytes
from depthlit.diagnostic import Answer
from depthlit.interventions import rerouted, without
from depthlit.residuals import HC, PreLN
from depthlit.subject import Subject
from depthlit.tasks import arc
from depthlit.tasks.scoring import batches

SHAPE = ShapeSpec(3, 32, n_head=4, vocab_size=257, max_seq_len=96)
DUMMY = torch.zeros(1, 3, dtype=torch.long)

HUMANEVAL = [
    {"prompt": "def f(x):\n", "canonical_solution": "    return x\n"},
    {"prompt": "def g():\n", "canonical_solution": ""},
    {"prompt": "p" * 300 + "\n", "canonical_solution": "  pass  # é 🙂\r\n"},
]
GSM8K = [{"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}, {"question": "2?", "answer": "x" * 300}]
MBPP = [{"prompt": "Add.", "test": ["a", "b", "c"], "code": "x = 1\r\ny = 2"}]
ARC = [
    {"question": "Which?", "choices": {"text": ["aa", "b", "cc cc"], "label": ["1", "2", "3"]}, "answerKey": "3"},
    {"question": "Who?", "choices": {"text": ["a", "a", "b", "c"], "label": list("ABCD")}, "answerKey": "B"},
    {"question": "?", "choices": {"text": ["so", "no", "yes", "my", "do"], "label": list("ABCDE")}, "answerKey": "A"},
]  # fmt: skip


@pytest.fixture
def files(tmp_path):
    for name, rows in {"humaneval": HUMANEVAL, "gsm8k": GSM8K, "mbpp": MBPP, "arc": ARC}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {name: str(tmp_path / f"{name}.jsonl") for name in ("humaneval", "gsm8k", "mbpp", "arc")}


@pytest.fixture(scope="module")
def decoder():
    decoder = Decoder(SHAPE, HC(), seed=0).double()
    generator = torch.Generator().manual_seed(1)
    for p in decoder.parameters():
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return decoder


def nll(decoder, prompt: str, reference: str) -> tuple[float, int]:
    """The plain loop: one document, full logits, one token at a time."""
    bare = prompt.rstrip()
    ids = list((prompt + reference).encode())
    first = len(bare.encode())
    ids, first = ids[-97:], max(1, first - max(0, len(ids) - 97))
    log_p = decoder(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    return -sum(log_p[t - 1, ids[t]].item() for t in range(first, len(ids))), len(ids) - first


@pytest.mark.parametrize("tokens_per_batch", [1, 200, 10_000])
def test_domain_nll_is_the_plain_loop(decoder, files, tokens_per_batch):
    asked = DomainNLL(
        tasks=["humaneval", "gsm8k", "mbpp"], paths={k: files[k] for k in ("humaneval", "gsm8k", "mbpp")},
        columns={"mbpp": {"text": "prompt", "test_list": "test"}}, tokens_per_batch=tokens_per_batch,
    )  # fmt: skip
    asked.prepare(Bytes(), SHAPE.max_seq_len)
    numbers = asked.ask(decoder, DUMMY).numbers
    humaneval = [nll(decoder, row["prompt"], row["canonical_solution"]) for row in HUMANEVAL]
    assert numbers["humaneval/tokens"] == sum(n for _, n in humaneval)
    assert numbers["humaneval/token_mean"] == pytest.approx(
        sum(x for x, _ in humaneval) / sum(n for _, n in humaneval), rel=1e-9
    )
    assert numbers["humaneval/doc_mean"] == pytest.approx(np.mean([x / n for x, n in humaneval]), rel=1e-9)
    n_bytes = sum(len(("\n" + row["canonical_solution"]).encode()) for row in HUMANEVAL)
    assert numbers["humaneval/bits_per_byte"] == pytest.approx(
        sum(x for x, _ in humaneval) / math.log(2) / n_bytes, rel=1e-9
    )
    assert numbers["humaneval/truncated"] == 1 and numbers["humaneval/documents"] == 3
    assert numbers["humaneval/empty"] == 0, "the prompt's newline is scored even where the answer is empty"
    gsm8k = [nll(decoder, f"Question: {row['question']}\nAnswer:", f" {row['answer']}") for row in GSM8K]
    total, n = sum(x for x, _ in gsm8k), sum(n for _, n in gsm8k)
    assert numbers["gsm8k/token_mean"] == pytest.approx(total / n, rel=1e-9) and numbers["gsm8k/truncated"] == 1
    assert numbers["coding"] == pytest.approx((numbers["humaneval/token_mean"] + numbers["mbpp/token_mean"]) / 2)
    assert "math" not in numbers, "a category with a set missing has no figure"


def test_options_change_what_is_scored(decoder, files):
    def tokens(**options):
        asked = DomainNLL(
            tasks=["gsm8k", "mbpp"], paths={k: files[k] for k in ("gsm8k", "mbpp")},
            columns={"mbpp": {"text": "prompt", "test_list": "test"}}, **options,
        )  # fmt: skip
        asked.prepare(Bytes(), 400)
        return [item.n_scored for item in asked.items]

    plain = tokens()
    assert tokens(strip_calculator_tags=True)[0] == plain[0] - len("<<1+1=2>>")
    assert tokens(normalize_newlines=True)[2] == plain[2] - 1
    assert tokens(mode="separate")[2] == plain[2] - 1, "the prompt's newline stays with the prompt"
    assert len(tokens(limit=1)) == 2


def test_a_missing_set_is_one_line_and_the_others_go_on(decoder, files, tmp_path):
    asked = DomainNLL(
        tasks=["humaneval", "gsm8k"], paths={"humaneval": files["humaneval"], "gsm8k": str(tmp_path / "no.jsonl")}
    )
    asked.prepare(Bytes(), SHAPE.max_seq_len)
    answer = asked.ask(decoder, DUMMY)
    assert answer.notes == [f"gsm8k is left out: {tmp_path / 'no.jsonl'} does not exist"]
    assert "humaneval/token_mean" in answer.numbers and "gsm8k/token_mean" not in answer.numbers
    with pytest.raises(ValueError, match="no task is named 'gsm9k'; known: mbpp, humaneval"):
        DomainNLL(tasks=["gsm9k"])


def test_a_foreign_tokenizer_is_refused_at_the_start(files):
    asked = DomainNLL(tasks=["humaneval"], paths={"humaneval": files["humaneval"]})
    asked.prepare(Bytes(), 96)
    with pytest.raises(ValueError, match=r"token id \d+ does not exist in a vocabulary of 61"):
        asked.check(Decoder(ShapeSpec(1, 32, n_head=4, vocab_size=61), PreLN(), seed=0))


def test_arc_is_the_plain_loop_with_and_without_layers(decoder, files):
    asked = ArcEasy(path=files["arc"], tokens_per_batch=120)
    asked.prepare(Bytes(), SHAPE.max_seq_len)
    answer = asked.ask(decoder, DUMMY)
    questions = [arc.question(row) for row in ARC]

    def accuracies() -> tuple[np.ndarray, np.ndarray]:
        scores = [-nll(decoder, q.prompt, f" {choice}")[0] for q in questions for choice in q.choices]
        return arc.right(questions, np.array(scores))

    acc, acc_norm = accuracies()
    assert answer.numbers["acc"] == acc.mean() and answer.numbers["acc_norm"] == acc_norm.mean()
    for s in range(3):
        with rerouted(decoder, without(decoder.order, s)):
            assert answer.values["drop"][s] == pytest.approx(acc_norm.mean() - accuracies()[1].mean())
    assert answer.numbers["shortest"] == pytest.approx(arc.shortest_choice(questions))
    lengths = [len(f" {choice}".encode()) for q in questions for choice in q.choices]
    assert answer.numbers["fewest_tokens"] == pytest.approx(arc.fewest_tokens(questions, lengths))
    assert answer.cost["block_evaluations"] == 6 * len(batches(asked.items, 120)), (
        "012, then 12, 2 after 0, 01 is there"
    )


def test_a_killed_evaluation_goes_on_where_it_was(decoder, files, tmp_path):
    asked = ArcEasy(path=files["arc"], tokens_per_batch=60)
    asked.prepare(Bytes(), SHAPE.max_seq_len)
    whole = asked.ask(decoder, DUMMY)
    subject = Subject(decoder, decoder, folder=tmp_path)
    calls = 0

    class Killed(BaseException):
        pass

    def dies(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls > 4:  # one for the title
            raise Killed
        return decoder(*args, **kwargs)

    subject.model = dies
    with pytest.raises(Killed), torch.no_grad():
        asked.together(subject, None)
    path = unfinished(tmp_path, asked.name)
    with path.open("a") as file:
        file.write("[[4], [[0.1")  # cut short by the kill
    left = path.read_text()
    counted = Subject(decoder, decoder, folder=tmp_path)
    with torch.no_grad(), counted.counting():
        nll_after = asked.together(counted, None)["nll"]
    np.testing.assert_allclose(nll_after, whole.values["nll"], rtol=1e-12)
    assert counted.evaluations == whole.cost["block_evaluations"] - 3 * 6 + 3
    fewer = ArcEasy(path=files["arc"], limit=2, tokens_per_batch=60)
    fewer.prepare(Bytes(), SHAPE.max_seq_len)
    silent = ArcEasy(path=files["arc"], skip="silent", tokens_per_batch=60)
    silent.prepare(Bytes(), SHAPE.max_seq_len)
    trained = copy.deepcopy(decoder)
    trained.head.weight.data *= 1.01
    for other, weights in ((fewer, decoder), (silent, decoder), (asked, trained)):
        path.write_text(left)
        with torch.no_grad():
            found = other.together(Subject(weights, weights, folder=tmp_path), None)["nll"]
        np.testing.assert_allclose(found, other.ask(weights, DUMMY).values["nll"], rtol=1e-12)


def test_cost_meter_tells_and_measures():
    decoder = Decoder(SHAPE, HC(), seed=0)
    numbers = CostMeter(tokens=32, repeats=2).ask(decoder, DUMMY).numbers
    assert numbers["parameters_total"] == sum(p.numel() for p in decoder.parameters())
    assert numbers["parameters_residual"] == numbers["parameters_total"] - SHAPE.parameters()
    assert numbers["kv_bytes"] == 2 * 3 * 32 * 32 * 2
    assert numbers["prefill_flops"] == SHAPE.forward_flops(32, "last") + numbers["routing_flops"]
    assert numbers["prefill_tokens_per_sec"] == pytest.approx(32 / numbers["prefill_seconds"])
    assert numbers["hours_per_1b_prefill_tokens"] == pytest.approx(1e9 / 3600 / numbers["prefill_tokens_per_sec"])


def test_in_a_training_run(files, tmp_path):
    """Files and metric names at a validation boundary, and figures redrawn from the files."""
    from depthlit import plots
    from depthlit.data import TokenData
    from depthlit.data.prepare import Preparation, prepare
    from depthlit.module import LanguageModel
    from depthlit.trainer import Trainer

    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Document {i} says {i * i}." for i in range(400)))
    prepare(Preparation([str(text)], "bytes", separator="\n\n", val_fraction=0.2), tmp_path / "corpus", quiet=True)
    data = TokenData(path=str(tmp_path / "corpus"), block_size=32, batch_size=4)
    asked = [
        DomainNLL(tasks=["humaneval"], paths={"humaneval": files["humaneval"]}),
        ArcEasy(path=files["arc"]),
        CostMeter(tokens=32, repeats=1),
    ]
    trainer = Trainer(
        accelerator="cpu", max_steps=4, validate_every=2, default_root_dir=tmp_path / "run", callbacks=asked,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(LanguageModel(SHAPE, PreLN(), vocab_size=data.vocab_size), datamodule=data)
    for name in ("nll/humaneval/token_mean", "eval/arc_easy/acc_norm", "cost/prefill_seconds"):
        assert name in trainer.callback_metrics
    assert "cost/training_tokens_per_sec" in trainer.callback_metrics
    for step in (2, 4):
        folder = tmp_path / "run" / "analysis" / f"step_{step:07d}"
        assert {path.name for path in folder.iterdir()} == {
            *(f"{name}.{kind}" for name in ("DomainNLL", "ArcEasy") for kind in ("json", "npz", "png")),
            "CostMeter.json", "CostMeter.npz",
        }  # fmt: skip
    answer = Answer.load(folder / "ArcEasy.json")
    assert answer.windows["documents"] == {"arc_easy": 3} and answer.values["nll"].shape == (4, 12)
    for name in ("ArcEasy", "DomainNLL"):
        assert plots.redraw(folder / f"{name}.json", output=tmp_path / f"{name}.png").stat().st_size > 1000
