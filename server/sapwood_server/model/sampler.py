"""The next token of each row of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from sapwood_server.model.draw import Filters, draw, draw_filtered
from sapwood_server.model.penalties import LogitEditor, is_edited
from sapwood_server.model.random_stream import uniforms
from sapwood_server.values.plan import Draw, DrawFailure, FailedDraw, Sampled, SampleSpec, TokenLogprob

_SMALLEST_TEMPERATURE = float(torch.finfo(torch.float32).tiny)


class Sampler:
    """Draws tokens. Settings act in the order that `SamplingParams` gives.

    A row's token depends on its logits, its settings and `(seed, choice, position)` alone, bit for bit: not on the
    other rows. Ids from `num_tokens` on are padding of the vocabulary and never drawn.
    """

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu", num_tokens: int | None = None) -> None:
        self._num_tokens = vocab_size if num_tokens is None else num_tokens
        if not 1 <= self._num_tokens <= vocab_size:
            raise ValueError(f"num_tokens is {num_tokens}; expected 1 to vocab_size, {vocab_size}")
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._editor = LogitEditor(self._num_tokens, self._device)

    @torch.inference_mode()
    def sample(self, logits: Tensor, specs: Sequence[SampleSpec]) -> list[Draw]:
        """One token per row of `logits`, fp32 [len(specs), vocab_size]; not changed.

        A FailedDraw for a row that has a NaN or is infinite at its largest, as the model gave it or as its settings
        made it. ValueError for another shape or dtype.
        """
        if tuple(logits.shape) != (len(specs), self._vocab_size) or logits.dtype != torch.float32:
            expected = f"fp32 {[len(specs), self._vocab_size]}"
            raise ValueError(f"logits are {logits.dtype} {list(logits.shape)}; expected {expected}")
        if not specs:
            return []
        choosable = logits[:, : self._num_tokens]
        best = _argmax(choosable)
        failures = dict.fromkeys(_unusable_rows(choosable, best), DrawFailure.NOT_FINITE)
        free_rows = [row for row, spec in enumerate(specs) if spec.forced is None and row not in failures]
        edited_rows = [row for row in free_rows if is_edited(specs[row])]
        if edited_rows:
            choosable = choosable.clone()
            for row in edited_rows:
                choosable[row] = self._editor.edit(choosable[row], specs[row])
            best = _argmax(choosable)
            failures = dict.fromkeys(_unusable_rows(choosable, best), DrawFailure.NOTHING_LEFT) | failures
        drawn_rows = [row for row in free_rows if specs[row].sampling.temperature > 0 and row not in failures]
        token_ids: list[int] = best.tolist()
        for row, token_id in zip(drawn_rows, self._draw(choosable, best, drawn_rows, specs), strict=True):
            token_ids[row] = token_id
        for row, spec in enumerate(specs):
            if spec.forced is not None:
                token_ids[row] = spec.forced
        sampled = self._with_logprobs(logits, token_ids, specs)
        return [FailedDraw(failures[row]) if row in failures else one for row, one in enumerate(sampled)]

    def drop(self, choice_keys: Iterable[int]) -> None:
        """Forgets what is kept for choices that ended."""
        self._editor.drop(choice_keys)

    def _draw(self, logits: Tensor, best: Tensor, rows: Sequence[int], specs: Sequence[SampleSpec]) -> list[int]:
        """Token ids for `rows`, all of temperature over 0."""
        if not rows:
            return []
        sampling = [specs[row].sampling for row in rows]
        uniform = torch.from_numpy(
            uniforms(
                [params.seed for params in sampling],
                [specs[row].choice for row in rows],
                [len(specs[row].output_ids) for row in rows],
            )
        ).to(self._device)
        temperature = self._column(
            [max(params.temperature, _SMALLEST_TEMPERATURE) for params in sampling], torch.float32
        )
        index = torch.tensor(rows, device=self._device)
        chosen = logits if len(rows) == len(logits) else logits[index]
        # Shifted first: a tiny temperature then sends all but the largest to minus infinity, and none to plus.
        peak = chosen.gather(1, best[index][:, None])
        probabilities = (chosen - peak).div_(temperature[:, None]).softmax(-1)
        filtered = [i for i, params in enumerate(sampling) if params.top_k or params.top_p < 1 or params.min_p > 0]
        drawn = draw(probabilities, uniform) if len(filtered) < len(rows) else torch.empty_like(index)
        if filtered:
            filters = Filters(
                self._column([params.top_k for params in sampling], torch.int64),
                self._column([params.top_p for params in sampling], torch.float64),
                self._column([params.min_p for params in sampling], torch.float64),
            )
            where = torch.tensor(filtered, device=self._device)
            drawn[where] = draw_filtered(probabilities[where], filters.rows(where), uniform[where])
        result: list[int] = drawn.tolist()
        return result

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)

    def _with_logprobs(self, logits: Tensor, token_ids: Sequence[int], specs: Sequence[SampleSpec]) -> list[Sampled]:
        """Of the model's own distribution over all tokens; padding has no part in it."""
        rows = [row for row, spec in enumerate(specs) if spec.sampling.top_logprobs is not None]
        if not rows:
            return [Sampled(token_id) for token_id in token_ids]
        logprobs = logits[torch.tensor(rows, device=self._device), : self._num_tokens].log_softmax(-1)
        by_row = {
            row: _token_logprob(logprobs[i], token_ids[row], specs[row].sampling.top_logprobs or 0)
            for i, row in enumerate(rows)
        }
        return [Sampled(token_id, by_row.get(row)) for row, token_id in enumerate(token_ids)]


def _argmax(logits: Tensor) -> Tensor:
    """The largest of each row, the smallest id on a tie; int64 [R]. (On a CPU numpy is 15 times faster than torch.)"""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def _unusable_rows(logits: Tensor, best: Tensor) -> list[int]:
    """Rows whose largest logit, which is at `best`, is not finite. (To torch as to numpy a NaN is larger than all.)"""
    rows: list[int] = (~logits.gather(1, best[:, None])[:, 0].isfinite()).nonzero()[:, 0].tolist()
    return rows


def _token_logprob(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    """`logprobs` [num_tokens]; the `num_top` most likely tokens, best first, the smaller id first among equals. An id
    of the padding, which can only be forced, has minus infinity."""
    num_tokens = len(logprobs)
    num_top = min(num_top, num_tokens)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        candidates = (logprobs >= logprobs.topk(num_top).values[-1]).nonzero()[:, 0]
        values, order = torch.sort(logprobs[candidates], descending=True, stable=True)
        top = tuple(zip(candidates[order].tolist()[:num_top], values.tolist()[:num_top], strict=True))
    return TokenLogprob(token_id, float(logprobs[token_id]) if token_id < num_tokens else -math.inf, top)
