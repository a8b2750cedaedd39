"""What steps compute of prompts beside the next token.

That is log-probabilities of prompt tokens, with each chunk of a prompt, and what requests have of
their prompt's last token instead of an answer (`messages.Pooling`).

A row of logits is as wide as the vocabulary, so a prompt's logits are computed a few rows at a
time, from the hidden states of its chunk. Their memory is freed before the step samples, and they
take less memory than sampling (`workspace.step_nbytes`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from disagg.engine.device.workspace import ROWS_AT_ONCE
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.engine.sched.step import StepPlan
from disagg.kernels.kv_pages import KVPages
from disagg.kernels.uploads import upload
from disagg.messages import Pooling, TokenLogprobs
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder


class ScoredRows(NamedTuple):
    """Rows of a step whose next tokens are prompt tokens: `num_rows` from `first_row` on."""

    sequence: Sequence
    first_row: int
    num_rows: int


def scored_rows(plan: StepPlan) -> list[ScoredRows]:
    """The rows of a plan that score prompt tokens. Call it before the plan is computed."""
    n = plan.num_decodes  # decodes have one row each, and their prompts are computed
    query_lens = plan.query_lens[n:]
    first_rows = accumulate(query_lens, initial=n)
    found = []
    for sequence, first_row, query_len in zip(
        plan.sequences[n:], first_rows, query_lens, strict=False
    ):
        num_left = sequence.num_prompt_tokens - 1 - sequence.num_computed
        num_rows = min(query_len, num_left)
        if sequence.prompt_logprobs is not None and num_rows > 0:
            found.append(ScoredRows(sequence, first_row, num_rows))
    return found


@torch.inference_mode()
def hidden_scored(
    decoder: Decoder, batch: Batch, kv_cache: KVPages, scored: SequenceOf[ScoredRows]
) -> Tensor:
    """As `Decoder.hidden`; adds the log-probabilities to `prompt_logprobs` of the sequences."""
    if not scored:
        return decoder.hidden(batch, kv_cache)
    hidden = _every_row(decoder, batch, kv_cache)
    for rows in scored:
        _score(rows, hidden, decoder.logits)
    return hidden.index_select(0, batch.logits_rows)


def scored_ranges(scored: SequenceOf[ScoredRows]) -> list[tuple[int, int]]:
    """Ranges [first, end) of rows whose logits `hidden_scored` computes together, in order."""
    return [
        (first, min(first + ROWS_AT_ONCE, rows.first_row + rows.num_rows))
        for rows in scored
        for first in range(rows.first_row, rows.first_row + rows.num_rows, ROWS_AT_ONCE)
    ]


@torch.inference_mode()
def forward_ranges(
    decoder: Decoder, batch: Batch, kv_cache: KVPages, ranges: SequenceOf[tuple[int, int]]
) -> None:
    """Compute, on another rank, its part of the first rank's `hidden_scored`, and of its logits."""
    if not ranges:
        decoder.logits(decoder.hidden(batch, kv_cache))
        return
    hidden = _every_row(decoder, batch, kv_cache)
    for first, end in ranges:
        decoder.logits(hidden[first:end])
    decoder.logits(hidden.index_select(0, batch.logits_rows))


def _every_row(decoder: Decoder, batch: Batch, kv_cache: KVPages) -> Tensor:
    rows = torch.arange(batch.positions.shape[0], device=decoder.device)
    return decoder.hidden(replace(batch, logits_rows=rows), kv_cache)


def _score(rows: ScoredRows, hidden: Tensor, logits: Callable[[Tensor], Tensor]) -> None:
    sequence, first_row, _ = rows
    scores, num_computed = sequence.prompt_logprobs, sequence.num_computed
    assert scores is not None
    del scores[num_computed:]  # computed again after the sequence had lost its blocks
    offset = num_computed + 1 - first_row  # row + offset is the position of the next token
    num_top = sequence.sampling.prompt_logprobs or 0
    for first, end in scored_ranges([rows]):
        log_probs = torch.log_softmax(logits(hidden[first:end]), dim=-1)
        scores += _scores(log_probs, sequence.tokens[first + offset : end + offset], num_top)


def _scores(log_probs: Tensor, targets: list[int], num_top: int) -> list[TokenLogprobs]:
    ids = upload(targets, torch.int64, log_probs.device).unsqueeze(1)
    chosen = log_probs.gather(1, ids)
    ranks = (log_probs > chosen).sum(dim=1) + 1
    tops: list[Any] = [()] * len(targets)
    if num_top:
        largest = log_probs.topk(min(num_top, log_probs.shape[1]), dim=-1)
        pairs = zip(largest.indices.tolist(), largest.values.tolist(), strict=True)
        tops = [tuple(zip(*pair, strict=True)) for pair in pairs]
    return list(map(TokenLogprobs, chosen.flatten().tolist(), tops, ranks.tolist()))


def pooled_rows(sequences: SequenceOf[Continued]) -> list[tuple[int, Sequence]]:
    """The rows of a step's logits that belong to requests without an answer."""
    return [
        (row, each)
        for row, each in enumerate(sequences)
        if isinstance(each, Sequence) and each.pooling is not None
    ]


def keep_pooled(pooled: SequenceOf[tuple[int, Sequence]], hidden: Tensor, logits: Tensor) -> None:
    """Write what each request asks for to `Sequence.pooled`.

    Args:
        hidden: [num_rows, hidden_size], after the last norm.
        logits: float32 [num_rows, vocab_size].
    """
    alike: dict[Pooling, list[tuple[int, Sequence]]] = {}  # the host waits once for each kind
    for row, sequence in pooled:
        assert sequence.pooling is not None
        alike.setdefault(sequence.pooling, []).append((row, sequence))
    for pooling, members in alike.items():
        rows = upload([row for row, _ in members], torch.int64, hidden.device)
        if pooling.token_ids:
            columns = upload(pooling.token_ids, torch.int64, logits.device)
            found = logits.index_select(0, rows).index_select(1, columns)
        else:
            found = functional.normalize(hidden.index_select(0, rows).float(), dim=-1)
        for (_, sequence), numbers in zip(members, found.cpu().numpy(), strict=True):
            sequence.pooled = numbers.astype("<f4", copy=False).tobytes()
