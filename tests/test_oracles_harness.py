"""ARC-Easy numbers against lm-evaluation-harness itself, on questions made here and a random model."""

import json
import random

import pytest
import torch

pytestmark = pytest.mark.slow
lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'depthlit[harness]'")

from callbacks import ArcEasy  # noqa: E402
from depthlit import Decoder, ShapeSpec  # noqa: E402
from depthlit.data.tokenizers import Bytes  # noqa: E402
from depthlit.residuals import HC  # noqa: E402
from depthlit.tasks import arc  # noqa: E402

WORDS = ["sun", "moon", "water", "rock", "leaf", "cell", "heat", "light", "sound", "force", "mass", "ice", "é", "🙂"]


@pytest.fixture(scope="module")
def decoder():
    decoder = Decoder(ShapeSpec(2, 32, n_head=4, vocab_size=257, max_seq_len=64), HC(), seed=0)
    for p in decoder.parameters():
        p.data += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    return decoder


def test_sixty_questions(decoder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    pick = random.Random(0)
    rows = []
    for i in range(60):
        n = pick.choice([3, 4, 4, 5])
        labels = list("ABCDE"[:n]) if i % 2 else [str(k + 1) for k in range(n)]
        texts = [" ".join(pick.choices(WORDS, k=pick.randint(1, 4))) for _ in range(n)]
        question = f"Which {' '.join(pick.choices(WORDS, k=pick.randint(2, 14)))}?"
        rows.append({"id": str(i), "question": question, "choices": {"text": texts, "label": labels},
                     "answerKey": pick.choice(labels)})  # fmt: skip
    path = tmp_path / "arc.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ArcEasy(path=str(path), prune=False)
    asked.prepare(Bytes(), 64)
    ours = asked.ask(decoder, torch.zeros(1, 3, dtype=torch.long))

    from depthlit.tasks.harness import HarnessModel

    task = {
        "task": "arc_local", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
        "output_type": "multiple_choice", "test_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:", "doc_to_target": "{{choices.label.index(answerKey)}}",
        "doc_to_choice": "{{choices.text}}",
        "metric_list": [{"metric": m, "aggregation": "mean", "higher_is_better": True} for m in ("acc", "acc_norm")],
    }  # fmt: skip
    found = lm_eval.simple_evaluate(HarnessModel(decoder, Bytes()), tasks=[task], num_fewshot=0, bootstrap_iters=0)
    theirs = found["results"]["arc_local"]
    assert ours.numbers["acc"] == pytest.approx(theirs["acc,none"], abs=1e-12)
    assert ours.numbers["acc_norm"] == pytest.approx(theirs["acc_norm,none"], abs=1e-12)
    likelihoods = [float(r[0][0]) for s in found["samples"]["arc_local"] for r in s["resps"]]
    assert len(likelihoods) == sum(len(arc.question(row).choices) for row in rows)
    torch.testing.assert_close(-ours.values["nll"][0], torch.tensor(likelihoods).double().numpy(), rtol=1e-5, atol=1e-5)
