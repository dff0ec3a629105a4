"""What the DataModule offers beyond the stream: masks, mixtures, windows, the built-in corpus."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from test_data import prepared, take, words  # noqa: F401  (a fixture)

from depthlit import Decoder, ShapeSpec
from depthlit.data import TokenData
from depthlit.data.batches import Batches
from depthlit.module import LanguageModel
from depthlit.residuals import PreLN


def masked(ids: list[int], **options: bool) -> dict[str, list[int]]:
    batch = Batches(None, 1, len(ids) - 1, 10, eos_id=9, **options).arrange(torch.tensor([ids]))  # type: ignore[arg-type]
    return {name: tensor[0].tolist() for name, tensor in batch.items()}


def test_masks_at_document_borders() -> None:
    """Block [a, EOS, b, c] and one more: the EOS belongs to the document that it ends."""
    assert masked([1, 9, 2, 3, 4]) == {"tokens": [1, 9, 2, 3], "targets": [9, 2, 3, 4]}
    assert masked([1, 9, 2, 3, 4], document_mask=True)["documents"] == [0, 0, 1, 1]
    assert masked([9, 9, 2, 9, 4], document_mask=True)["documents"] == [0, 1, 2, 2]
    assert masked([1, 9, 2, 3, 4], mask_document_starts=True)["targets"] == [9, -1, 3, 4]
    assert masked([1, 2, -1, -1]) == {"tokens": [1, 2, 0], "targets": [2, -1, -1]}


def test_logits_of_a_document_do_not_depend_on_its_neighbours(words: Path) -> None:  # noqa: F811
    data = TokenData(str(words), block_size=96, batch_size=4, document_mask=True)
    batch = next(iter(data.train_dataloader()))
    shape = ShapeSpec(2, 32, n_head=2, vocab_size=data.vocab_size)
    decoder = Decoder(shape, PreLN(), seed=0).double()
    logits = decoder(batch["tokens"], documents=batch["documents"])
    assert isinstance(logits, torch.Tensor)
    compared = 0
    for row, documents, ids in zip(logits, batch["documents"], batch["tokens"], strict=True):
        assert documents.max() >= 1
        for d in range(int(documents.max()) + 1):
            here = documents == d
            alone = decoder(ids[here].unsqueeze(0))
            torch.testing.assert_close(row[here], alone[0], rtol=1e-10, atol=1e-12)
            compared += 1
    assert compared >= 8
    without = decoder(batch["tokens"])
    assert (without - logits).abs().max() > 1e-3  # the mask does something


def test_masking_document_starts_hides_what_follows_an_eos(words: Path) -> None:  # noqa: F811
    data = TokenData(str(words), block_size=96, batch_size=4, mask_document_starts=True)
    batch = next(iter(data.train_dataloader()))
    ended = batch["tokens"] == data.eos_id
    assert ended.sum() > 4 and (batch["targets"][ended] == -1).all() and (batch["targets"][~ended] >= 0).all()


def test_masks_need_marked_documents(tmp_path: Path) -> None:
    root = prepared(tmp_path, ["a b c"] * 9, eos="none")
    with pytest.raises(ValueError, match="does not mark where documents end"):
        TokenData(str(root), document_mask=True)


# Mixtures


@pytest.mark.parametrize("workers", [0, 2])
def test_two_corpora_by_weight_resumed_exactly(tmp_path: Path, workers: int) -> None:
    """One writes with capitals, one without: shares are those wanted, and a resumed stream is the unbroken one."""
    one = prepared(tmp_path / "one", [f"DOCUMENT {i} " * 9 for i in range(300)])
    two = prepared(tmp_path / "two", [f"document {i} " * 9 for i in range(90)])

    def fresh() -> TokenData:
        return TokenData([str(one), str(two)], 32, 8, weights=[0.7, 0.3], num_workers=workers)

    unbroken = take(fresh(), 300)
    blocks = np.array(unbroken).reshape(-1, 32)
    upper = ((blocks >= 65) & (blocks <= 90)).any(1)
    lower = ((blocks >= 97) & (blocks <= 122)).any(1)
    assert (upper != lower).all()
    sampling_error = np.sqrt(0.7 * 0.3 / len(blocks))
    assert abs(upper.mean() - 0.7) < 3 * sampling_error
    small = fresh()._open("train")[1].whole
    assert lower.sum() > 1.3 * small  # the smaller one has begun its second epoch
    first = [tuple(b) for b in blocks[lower][:small]]
    assert sorted(first) == sorted(tuple(fresh()._open("train")[1][i][:32].tolist()) for i in range(small))

    parts: list[list[int]] = []
    state: dict[str, Any] | None = None
    for n in (100, 1, 199):
        data = fresh()
        if state is not None:
            data.load_state_dict(state)
        parts += take(data, n)
        state = data.state_dict()
    assert parts == unbroken
    with pytest.raises(ValueError, match=r"data\.weights .*cannot be carried over"):
        TokenData([str(one), str(two)], 32, 8, weights=[0.5, 0.5]).load_state_dict(state)


def test_the_held_out_parts_of_all_corpora_are_validated(tmp_path: Path) -> None:
    texts = [[f"{name} {i} " * 5 for i in range(60)] for name in "ab"]
    roots = [prepared(tmp_path / str(i), t, val_fraction=0.3) for i, t in enumerate(texts)]
    data = TokenData([str(r) for r in roots], 16, 5)
    tokens = sum(c.manifest["splits"]["val"]["tokens"] for c in data.corpora)
    assert sum(int((b["targets"] >= 0).sum()) for b in data.val_dataloader()) == tokens - 2


def test_a_checkpoint_is_validated_on_other_data(tmp_path: Path, words: Path) -> None:  # noqa: F811
    """Its place in the training data binds only the run that goes on training."""
    other = prepared(tmp_path / "other", [f"other text {i} " * 9 for i in range(60)], val_fraction=0.3)
    first = TokenData(str(words), block_size=32, batch_size=2)

    def trainer() -> Trainer:
        return Trainer(max_steps=2, limit_val_batches=2, num_sanity_val_steps=0, accelerator="cpu", logger=False,
                       default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False)  # fmt: skip

    model = LanguageModel(ShapeSpec(1, 16, n_head=2, vocab_size=first.vocab_size), PreLN())
    trained = trainer()
    trained.fit(model, first)
    trained.save_checkpoint(tmp_path / "a.ckpt")
    for data in (TokenData(str(other), 32, 2), TokenData(str(words), 64, 2)):
        for run in (trainer().validate, trainer().predict):
            assert run(model, data, ckpt_path=tmp_path / "a.ckpt")
        with pytest.raises(ValueError, match=r"data\.(fingerprint|block_size) .*cannot be carried over"):
            trainer().fit(model, data, ckpt_path=tmp_path / "a.ckpt")


# Windows


def test_windows_are_fixed_and_from_the_held_out_part(words: Path) -> None:  # noqa: F811
    data = TokenData(str(words), block_size=64, document_mask=True)
    batch = data.windows(6, 40, seed=3)
    assert batch["tokens"].shape == batch["targets"].shape == batch["documents"].shape == (6, 40)
    assert (batch["targets"][:, :-1] == batch["tokens"][:, 1:]).all()
    again = TokenData(str(words), block_size=16, batch_size=2, seed=9).windows(6, 40, seed=3)
    assert (again["tokens"] == batch["tokens"]).all()
    assert (data.windows(6, 40, seed=4)["tokens"] != batch["tokens"]).any()
    held_out = data.corpora[0].shards("val", 1 << 20)[0].astype(np.uint16).tobytes()
    assert all(row.numpy().astype(np.uint16).tobytes() in held_out for row in batch["tokens"])
    with pytest.raises(ValueError, match=r"val holds \d+ windows of 500 tokens, 99 needed"):
        data.windows(99, 500)


# The built-in corpus


@pytest.mark.slow
def test_the_built_in_corpus_is_prepared_once_by_whoever_comes_first(tmp_path: Path) -> None:
    code = "from depthlit.data import TokenData; d = TokenData(); print(d.fingerprint, d.vocab_size, d.unigram_entropy)"
    environment = {**os.environ, "DEPTHLIT_CACHE": str(tmp_path)}
    racers = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [racer.communicate(timeout=300)[0].splitlines() for racer in racers]
    assert len({output[-1] for output in outputs}) == 1
    assert sum("preparing" in line for output in outputs for line in output) == 1
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == [
        f"pydoc-python{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}-format1"
    ]
    os.environ["DEPTHLIT_CACHE"] = str(tmp_path)
    try:
        data = TokenData()
    finally:
        del os.environ["DEPTHLIT_CACHE"]
    data.setup("fit")
    manifest = data.corpora[0].manifest
    assert (
        1_000_000 < manifest["tokens"] < 5_000_000 and manifest["splits"]["val"]["tokens"] / manifest["tokens"] > 0.05
    )
    assert "Python 3" in data.describe() and 3 < float(data.unigram_entropy or 0) < 3.6


# Workers of any kind


def test_a_dataset_can_be_sent_to_a_fresh_process(words: Path) -> None:  # noqa: F811
    """Where processes are not forked, the dataset travels pickled."""
    batches = TokenData(str(words), block_size=64).train_dataloader().batches
    expected = batches[40]["tokens"]
    with mp.get_context("spawn").Pool(1) as pool:
        assert (pool.apply(pickle.loads(pickle.dumps(batches)).__getitem__, (40,))["tokens"] == expected).all()
