"""Logit bias, allowed tokens and bad words, applied to the logits of a step.

They are uploaded when the sequences of a step change, so other steps cost a few kernel launches and
no work on the host. Only bad words of several tokens are checked on the host in each step.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from disagg.engine.device.workspace import ROWS_AT_ONCE
from disagg.engine.sched.speculation import Continued
from disagg.kernels.uploads import copied, upload
from disagg.messages import SamplingParams

# The logit of a banned token. It is not -inf, so that one of the banned tokens is chosen if a
# grammar allows no others; an answer that violates its grammar would be worse. Logits are only
# lowered to this value: a logit that a mask has set to -inf stays -inf.
BANNED = -1e30
_Words: TypeAlias = dict[int, list[tuple[int, ...]]]


class LogitEdits:
    """Changes of the logits of some rows. Made by `from_params`.

    Args:
        params: the sampling parameters of each row.
        vocab_size: number of columns of the logits.
    """

    def __init__(
        self, params: SequenceOf[SamplingParams], vocab_size: int, device: torch.device
    ) -> None:
        self._vocab_size = vocab_size
        biased = [
            (row, *_biases(each.logit_bias, each.bad_words_token_ids))
            for row, each in enumerate(params)
            if each.logit_bias or each.bad_words_token_ids
        ]
        limited = [row for row, each in enumerate(params) if each.allowed_token_ids]
        longer = [_longer(each.bad_words_token_ids) for each in params]
        self._watched = [(row, words) for row, words in enumerate(longer) if words]
        indices = [_ids(()), *(ids + row * vocab_size for row, ids, _ in biased)]
        self._biased = copied(torch.cat(indices), device)
        self._added = copied(torch.cat([torch.zeros(0), *(added for *_, added in biased)]), device)
        self._limited = upload(limited, torch.int64, device)
        indices = [_ids(params[row].allowed_token_ids) + row * vocab_size for row in limited]
        self._allowed = copied(torch.cat([_ids(()), *indices]), device)

    @classmethod
    def from_params(
        cls, params: SequenceOf[SamplingParams], vocab_size: int, device: torch.device
    ) -> LogitEdits | None:
        """The edits for these rows; None if no row has any."""
        has_edits = any(
            each.logit_bias or each.allowed_token_ids or each.bad_words_token_ids for each in params
        )
        return cls(params, vocab_size, device) if has_edits else None

    def apply_(self, logits: Tensor, sequences: SequenceOf[Continued]) -> None:
        """Change the logits, contiguous float32 [num_rows, vocab_size], in place."""
        flat = logits.view(-1)
        if self._limited.shape[0]:
            kept = flat[self._allowed]
            for rows in torch.split(self._limited, ROWS_AT_ONCE):
                logits.index_copy_(0, rows, logits.index_select(0, rows).clamp_(max=BANNED))
            flat[self._allowed] = kept
        if self._biased.shape[0]:
            flat.index_add_(0, self._biased, self._added)
        banned = [
            row * self._vocab_size + token
            for row, words in self._watched
            for token in _next_tokens(words, sequences[row])
        ]
        if banned:
            indices = upload(banned, torch.int64, logits.device)
            flat.index_copy_(0, indices, flat[indices].clamp_(max=BANNED))


def _next_tokens(words: _Words, sequence: Continued) -> list[int]:
    """The last token of each word of which all others end the answer so far."""
    tokens = sequence.tokens
    num_output = len(tokens) - sequence.num_prompt_tokens
    return [
        word[-1]
        for word in words.get(tokens[-1], ())
        if len(word) <= num_output + 1 and tuple(tokens[1 - len(word) :]) == word[:-1]
    ]


def _ids(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@lru_cache(maxsize=1024)
def _longer(bad_words: tuple[tuple[int, ...], ...]) -> _Words:
    """Words of two tokens or more, by the last but one: few of them are looked at in a step."""
    words: _Words = {}
    for word in bad_words:
        if len(word) > 1:
            words.setdefault(word[-2], []).append(word)
    return words


@lru_cache(maxsize=1024)
def _biases(
    logit_bias: tuple[tuple[int, float], ...], bad_words: tuple[tuple[int, ...], ...]
) -> tuple[Tensor, Tensor]:
    """Distinct token ids, int64 [n], and the numbers added to their logits, float32 [n]."""
    added: dict[int, Any] = dict(logit_bias)
    added |= {word[0]: BANNED for word in bad_words if len(word) == 1}
    return _ids(tuple(added)), torch.tensor([*added.values()], dtype=torch.float32)
