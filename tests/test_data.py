"""The laws of the data: every token once, the same on any number of ranks and workers, resumed exactly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer

from depthlit.data import TokenData, writing
from depthlit.data.order import ROUND_TRIP, Mixture, Order, permuted
from depthlit.data.prepare import Preparation, prepare
from depthlit.data.tokenizers import load_tokenizer


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts), encoding="utf-8")
    return path


def prepared(folder: Path, texts: list[str], **options: Any) -> Path:
    """A corpus of some documents, by bytes unless told otherwise."""
    folder.mkdir(parents=True, exist_ok=True)
    source = write_jsonl(folder / "source.jsonl", texts)
    settings = Preparation(**{"input": [str(source)], "tokenizer": "bytes", "val_fraction": 0.0, **options})
    prepare(settings, folder / "out", quiet=True)
    return folder / "out"


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus of numbered documents with a held-out part."""
    texts = [f"document {i}: " + "word " * (i % 13) for i in range(400)]
    return prepared(tmp_path_factory.mktemp("words"), texts, val_fraction=0.2)


def take(data: TokenData, batches: int) -> list[list[int]]:
    """The next training batches, as lists of ids."""
    stream = iter(data.train_dataloader())
    return [next(stream)["tokens"].flatten().tolist() for _ in range(batches)]


# Order


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
@settings(max_examples=50, deadline=None)
def test_a_permutation_visits_everything_once(size: int, key: int) -> None:
    assert sorted(permuted(np.arange(size), size, key).tolist()) == list(range(size))


def test_a_permutation_has_no_favourites() -> None:
    """Over many keys, every place receives every index equally often: chi-square with 48 x 48 cells."""
    size, keys = 49, 4000
    seen = np.zeros((size, size))
    for key in range(keys):
        seen[np.arange(size), permuted(np.arange(size), size, key)] += 1
    expected = keys / size
    chi2 = ((seen - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi2 - freedom) < 6 * np.sqrt(2 * freedom)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(sum), st.none() | st.integers(1, 5), st.integers(0, 9)
)
@settings(max_examples=50, deadline=None)
def test_every_epoch_is_a_permutation(per_chunk: list[int], window: int | None, seed: int) -> None:
    order = Order(per_chunk, seed, window)
    epochs = order(np.arange(3 * order.size)).reshape(3, -1)
    assert all(sorted(epoch.tolist()) == list(range(order.size)) for epoch in epochs)


def test_epochs_and_seeds_differ_and_a_window_holds_few_chunks() -> None:
    order, other = Order([100] * 10, seed=1), Order([100] * 10, seed=2)
    first, second = order(np.arange(1000)), order(np.arange(1000, 2000))
    assert (first != second).mean() > 0.9 and (first != other(np.arange(1000))).mean() > 0.9
    windowed = Order([100] * 10, seed=1, window=2)(np.arange(1000)) // 100
    assert all(len(set(windowed[i : i + 200])) == 2 for i in range(0, 1000, 200))


def test_a_mixture_keeps_its_shares_and_skips_nothing() -> None:
    mixture = Mixture([3.0, 1.0, 0.1], seed=5)
    corpus, number = mixture(np.arange(3 * ROUND_TRIP))
    for c, share in enumerate([3 / 4.1, 1 / 4.1, 0.1 / 4.1]):
        assert (number[corpus == c] >= 0).all()
        assert sorted(number[corpus == c].tolist()) == list(range((corpus == c).sum()))
        assert abs((corpus == c).mean() - share) < 1e-4
    again = np.concatenate([mixture(np.arange(i, i + 7))[0] for i in range(0, 700, 7)])
    assert (again == corpus[:700]).all()


# Every token once


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=30),
    block=st.integers(1, 130),
    chunk=st.integers(8, 200),
    world=st.integers(1, 4),
    batch=st.integers(1, 4),
    seed=st.integers(0, 5),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_ranks_share_every_token_and_blocks_spell_the_documents(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch,
    lengths: list[int], block: int, chunk: int, world: int, batch: int, seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    texts = ["".join(map(chr, rng.integers(97, 123, n))) for n in lengths] + ["x"]
    monkeypatch.setattr(writing, "CHUNK_BYTES", chunk)
    root = prepared(tmp_path_factory.mktemp("laws"), texts)
    kept = [t for t in texts if t]
    manifest = json.loads((root / "manifest.json").read_text())
    total = sum(map(len, kept)) + len(kept)
    assert (manifest["documents"], manifest["tokens"], manifest["eos_added"]) == (len(kept), total, len(kept))
    assert manifest["dropped_tokens"] == 0

    data = TokenData(str(root), block_size=block, batch_size=batch)
    shards = data._open("train")[0]
    whole = (total - 1) // block
    assert shards.whole == whole and total - 1 - whole * block < block

    # read in order: the blocks spell the documents, whatever the chunks
    stream = np.concatenate([shards[b][(b > 0) :] for b in range(len(shards))]) if len(shards) else np.array([256])
    if len(shards):
        tokenizer = load_tokenizer((root / "tokenizer.json").read_text(), manifest["eos_id"])
        ends = np.flatnonzero(stream == manifest["eos_id"])
        assert [tokenizer.decode(part) for part in np.split(stream, ends + 1)[:-1]] == kept

    # covering: every target once over all ranks, equally many batches
    ranks = []
    for rank in range(world):
        monkeypatch.setattr(TokenData, "_place", lambda self, r=rank: (r, world))
        try:
            ranks.append(list(data._covering("train")))
        except ValueError as error:
            assert total < 2 and "holds 0 blocks" in str(error)
            return
    assert len({len(r) for r in ranks}) == 1
    targets = torch.cat([b["targets"].flatten() for r in ranks for b in r])
    assert sorted(targets[targets >= 0].tolist()) == sorted(stream[1:].tolist())

    # training: one epoch over all ranks is every whole block once
    if whole < world * batch:
        with pytest.raises(ValueError, match=f"holds {whole} blocks of {block} tokens, {world * batch} needed"):
            data.train_dataloader()
        return
    step, seen = world * batch, []
    for rank in range(world):
        monkeypatch.setattr(TokenData, "_place", lambda self, r=rank: (r, world))
        data.position = 0
        loader = iter(data.train_dataloader())
        rows = [next(loader)["tokens"] for _ in range(-(-whole // step))]
        seen.append(torch.stack(rows))  # (steps, batch, T)
    epoch = torch.stack(seen, 1).flatten(0, 2)[:whole]  # global order
    expected = [stream[b * block : b * block + block].tolist() for b in range(whole)]
    assert sorted(epoch.tolist()) == sorted(expected)


# Resuming


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_resume_is_exact_across_epochs_and_repeatedly(words: Path, workers: int) -> None:
    def fresh() -> TokenData:
        return TokenData(str(words), block_size=64, batch_size=3, num_workers=workers)

    per_epoch = fresh()._open("train")[0].whole / 3
    assert per_epoch > 20
    steps = int(2.5 * per_epoch)
    unbroken = take(fresh(), steps)
    pieces: list[list[int]] = []
    state: dict[str, Any] = fresh().state_dict()
    for n in (5, int(per_epoch) - 5, 1, steps - 1 - int(per_epoch)):
        data = fresh()
        data.load_state_dict(json.loads(json.dumps(state)))
        pieces += take(data, n)
        state = data.state_dict()
    assert pieces == unbroken


def test_another_batch_size_or_world_size_loses_and_repeats_nothing(
    words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def blocks(batch: int, world: int, steps: int, state: dict[str, Any] | None) -> tuple[list[Any], dict[str, Any]]:
        ranks = []
        for rank in range(world):
            monkeypatch.setattr(TokenData, "_place", lambda self, r=rank: (r, world))
            data = TokenData(str(words), block_size=64, batch_size=batch)
            if state:
                data.load_state_dict(state)
            ranks.append(torch.tensor(take(data, steps)).view(steps, batch, -1))
        return torch.stack(ranks, 1).flatten(0, 2).tolist(), data.state_dict()

    whole, _ = blocks(6, 1, 20, None)
    first, state = blocks(3, 2, 8, None)
    second, state = blocks(2, 1, 6, state)
    third, _ = blocks(5, 3, 4, state)
    assert first + second + third == whole


def test_a_position_that_lost_its_meaning_is_refused(words: Path) -> None:
    state = TokenData(str(words), block_size=64).state_dict()
    for change in ({"block_size": 32}, {"seed": 7}, {"path": [str(words)] * 2}):
        with pytest.raises(ValueError, match="cannot be carried over"):
            TokenData(**{"path": str(words), "block_size": 64, **change}).load_state_dict(state)


class Listener(LightningModule):
    """Learns nothing and writes down what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        self.seen.append(batch["tokens"].flatten().tolist())
        return self.weight.sum()

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        pass

    def configure_optimizers(self) -> torch.optim.Optimizer:
        assert self.trainer.estimated_stepping_batches > 0  # must not disturb the data
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(words: Path, root: Path, steps: int, resume: str | None, workers: int = 0, **options: Any) -> list[list[int]]:
    listener = Listener()
    trainer = Trainer(
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=root,
        num_sanity_val_steps=1,
        check_val_every_n_epoch=None,
        val_check_interval=4,
        **options,
    )
    data = TokenData(str(words), block_size=64, batch_size=4, num_workers=workers)
    trainer.fit(listener, data, ckpt_path=resume, weights_only=True)
    trainer.save_checkpoint(root / f"{steps}.ckpt")
    return listener.seen


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 2)])
def test_lightning_resumes_it(words: Path, tmp_path: Path, workers: int, accumulate: int) -> None:
    options = {"accumulate_grad_batches": accumulate}
    unbroken = fit(words, tmp_path / "whole", 24, None, **options)
    parts = fit(words, tmp_path, 7, None, workers, **options)
    parts += fit(words, tmp_path, 12, str(tmp_path / "7.ckpt"), 0, **options)
    parts += fit(words, tmp_path, 24, str(tmp_path / "12.ckpt"), workers, **options)
    assert len(unbroken) == 24 * accumulate and parts == unbroken
