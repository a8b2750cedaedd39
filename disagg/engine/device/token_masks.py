"""Masks out the tokens that a sequence's grammar or reasoning budget does not allow.

The masks of a step are filled in parallel while a GPU computes the logits, and uploaded in one
copy. Must not know what a grammar is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence as SequenceOf

import torch
import torch.nn.functional as functional
from torch import Tensor

from disagg.engine.device.workspace import ROWS_AT_ONCE
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.errors import DisaggError, GrammarError
from disagg.kernels.uploads import copied


@functools.cache
def _biases_of_bytes(device: torch.device) -> Tensor:
    """float32 [byte, bit]: 0 where the bit is set, else -inf."""
    is_set = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1 > 0
    return torch.where(is_set, 0.0, -math.inf).to(device)


class TokenMasks:
    """The allowed next tokens in some rows of a step.

    Args:
        rows: indices of rows of the logits.
        masks: int32 [len(rows), num_words]; bit i of word j is set if token 32 * j + i is allowed.
    """

    def __init__(self, rows: list[int], masks: Tensor, device: torch.device) -> None:
        packed = copied(torch.cat([torch.tensor(rows, dtype=torch.int32), masks.flatten()]), device)
        self._rows = packed[: len(rows)].long()
        self._masks = packed[len(rows) :].view(masks.shape)

    def apply_(self, logits: Tensor) -> None:
        """Set the logits, float32 [num_rows, vocab_size], of forbidden tokens to -inf in place."""
        # A table look-up per byte of eight tokens; `masked_fill_` took twice as long on a CPU.
        table, vocab_size = _biases_of_bytes(logits.device), logits.shape[-1]
        for rows, masks in zip(
            torch.split(self._rows, ROWS_AT_ONCE),
            torch.split(self._masks, ROWS_AT_ONCE),
            strict=True,
        ):
            biases = table.index_select(0, masks.view(torch.uint8).flatten().int())
            biases = biases.view(len(rows), -1)[:, :vocab_size]
            # A model's vocabulary may be larger than its tokenizer's.
            num_missing = vocab_size - biases.shape[1]
            logits.index_add_(0, rows, functional.pad(biases, (0, num_missing), value=-math.inf))


def bound_rows(sequences: SequenceOf[Continued]) -> list[int]:
    """The rows of the sequences that have a grammar, or whose reasoning is checked."""
    return [
        row
        for row, each in enumerate(sequences)
        if each.sampling.grammar is not None or each.sampling.thinking is not None
    ]


def token_masks(
    sequences: SequenceOf[Continued],
    rows: list[int],
    grammars: Grammars | None,
    device: torch.device,
) -> tuple[TokenMasks | None, dict[int, DisaggError]]:
    """The tokens that grammars and reasoning budgets allow, and the rows in which grammars fail.

    Args:
        sequences: row i belongs to sequences[i], whose tokens all have been computed.
        rows: see `bound_rows`.
    """
    filled: dict[int, Tensor] = {}
    failed: dict[int, DisaggError] = {}
    for row in rows:
        try:
            mask = _mask(sequences[row], grammars)
        except DisaggError as error:
            failed[row] = error
            continue
        if mask is not None:
            filled[row] = mask
    if not filled:
        return None, failed
    # A forced token's mask is narrow, so it is widened only if it is stacked with wider ones.
    widest = max(mask.shape[0] for mask in filled.values())
    masks = [functional.pad(mask, (0, widest - mask.shape[0])) for mask in filled.values()]
    return TokenMasks(list(filled), torch.stack(masks), device), failed


def _mask(sequence: Continued, grammars: Grammars | None) -> Tensor | None:
    """The mask of a sequence, int32 [num_words] as in `TokenMasks`; None: all are allowed."""
    if not isinstance(sequence, Sequence):  # only drafted if no reasoning is under way
        return _grammar_mask(sequence.sequence, grammars, draft=sequence.drafted)
    if sequence.thinking is None:
        return None if sequence.sampling.grammar is None else _grammar_mask(sequence, grammars)
    thinking = sequence.thinking
    sampling = sequence.sampling
    allowed = thinking.allowed(sequence.tokens, has_grammar=sampling.grammar is not None)
    if allowed.only is not None:
        return _with_tokens(torch.zeros(allowed.only // 32 + 1, dtype=torch.int32), allowed.only)
    if allowed.grammar_at is None:
        return None if allowed.is_end else _all_but(sequence, sampling.stop_token_ids)
    mask = _grammar_mask(sequence, grammars, allowed.grammar_at)
    return None if mask is None else _with_tokens(mask, *allowed.also)


def _all_but(sequence: Sequence, token_ids: tuple[int, ...]) -> Tensor:
    """A mask of all tokens but these, as wide as the mask of the sequence's grammar."""
    state = sequence.grammar_state
    num_words = 0 if state is None else state.num_mask_nbytes // 4
    return ~_with_tokens(torch.zeros(num_words, dtype=torch.int32), *token_ids)


def _with_tokens(mask: Tensor, *token_ids: int) -> Tensor:
    """`mask`, with these tokens allowed too."""
    for token_id in token_ids:
        if token_id // 32 < mask.shape[0]:
            bit = token_id % 32
            mask[token_id // 32] |= (1 << bit) - (1 << 32 if bit == 31 else 0)
    return mask


def _grammar_mask(
    sequence: Sequence,
    grammars: Grammars | None,
    begins_at: int | None = None,
    draft: SequenceOf[int] = (),
) -> Tensor | None:
    """The mask after a sequence and the first tokens of its draft.

    None if the grammar forbids the draft. Then the row before has shown that it is wrong.
    """
    if sequence.sampling.grammar is None or grammars is None:
        raise GrammarError("This engine does not support structured output.")
    state = sequence.grammar_state
    if state is None:  # a step must not wait for the compiler
        raise GrammarError("The request was scheduled before its grammar was compiled.")
    if begins_at is not None:
        state.begin_at(begins_at)
    mask = torch.empty(state.num_mask_nbytes // 4, dtype=torch.int32)
    return mask if state.fill_mask(sequence.tokens, mask.data_ptr(), draft) else None
