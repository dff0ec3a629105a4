"""A trained decoder as a model of lm-evaluation-harness, for any of its tasks; needs the extra `depthlit[harness]`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from depthlit.data.tokenizers import Tokenizer
from depthlit.decoder import Decoder
from depthlit.layers import at_least_fp32
from depthlit.tasks.scoring import Scored, batches, collate


class HarnessModel(TemplateLM):
    """Log-likelihoods and greedy generation of a decoder.

    No BOS is put in front of a prompt; an empty prompt is the EOS. There is no key-value cache: generation computes the
    whole sequence for every token.

    Args:
        decoder: the network, on its device.
        tokenizer: of `depthlit.data`; must have an EOS.
        tokens_per_batch: tokens, padding included, that go through the network at once.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, tokens_per_batch: int = 16_384) -> None:
        super().__init__()
        self.decoder, self.words, self.tokens_per_batch = decoder.eval(), tokenizer, tokens_per_batch
        self._device = next(decoder.parameters()).device
        if tokenizer.eos_id is None:
            raise ValueError("the harness needs a tokenizer with an EOS")

    @property
    def eot_token_id(self) -> int:
        return self.words.eos_id or 0

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.words.encode([string])[0].tolist()

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        longest = self.decoder.shape.max_seq_len + 1
        items = []
        for _, context, continuation in requests:
            ids = (*context, *continuation)[-longest:]
            items.append(Scored(ids, min(len(continuation), len(ids) - 1)))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(items)
        for group in batches(items, self.tokens_per_batch):
            tokens, targets = (t.to(self._device) for t in collate([items[i] for i in group]))
            logits = self.decoder(tokens)
            assert isinstance(logits, Tensor)
            log_p = at_least_fp32(logits).log_softmax(-1)
            own = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1).double() * (targets >= 0)
            greedy = ((log_p.argmax(-1) == targets) | (targets < 0)).all(-1)
            for i, value, best in zip(group, own.sum(-1).tolist(), greedy.tolist(), strict=True):
                found[i] = (value, best)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            windows = map(
                make_disjoint_window,
                get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self.prefix_token_id, self.decoder.shape.max_seq_len, 1
                ),
            )
            pairs: list[tuple[Any, list[int], list[int]]] = [(None, a, b) for a, b in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(pairs)))
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        return [self._generated(*request.args) for request in requests]

    @torch.no_grad()
    def _generated(self, prompt: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        stops: Sequence[str] = [until] if isinstance(until, str) else until
        ids, longest, text = self.tok_encode(prompt) or [self.eot_token_id], self.decoder.shape.max_seq_len, ""
        written: list[int] = []
        for _ in range(int(settings.get("max_gen_toks", 256))):
            window = torch.tensor([(ids + written)[-longest:]], device=self._device)
            logits = self.decoder(window, last=True)
            assert isinstance(logits, Tensor)
            written.append(int(logits[0, -1].argmax()))
            if written[-1] == self.eot_token_id:
                break
            text = self.words.decode(torch.tensor(written).numpy())
            if any(stop in text for stop in stops):
                break
        for stop in stops:
            text = text.split(stop)[0]
        return text
