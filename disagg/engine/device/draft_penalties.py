"""Penalties in the rows of a draft, whose tokens the sampling tables do not count yet.

Row i of a draft is sampled as if the i draft tokens before it had been accepted, but the tables do
not count them. So the tables' penalties are applied first, and then corrected at these tokens only.
Waits for no device.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from disagg.engine.sched.speculation import Continued, DraftedSequence
from disagg.kernels.sampling_rows import (
    FREQUENCY,
    PRESENCE,
    REPETITION,
    SamplingTables,
)
from disagg.kernels.uploads import copied


class DraftPenalties:
    """The penalties of one step's drafts.

    Create it before the tables' penalties are applied, and call `apply_` afterwards.

    Args:
        logits: float32 [num_rows, vocab_size].
        rows: the rows of drafts with penalties.
    """

    def __init__(
        self, logits: Tensor, sequences: SequenceOf[Continued], rows: SequenceOf[int]
    ) -> None:
        slots, token_ids, times, places = array("q"), array("q"), array("q"), array("q")
        vocab_size = logits.shape[1]
        for row in rows:
            drafted = sequences[row]
            assert isinstance(drafted, DraftedSequence)
            counts = Counter(drafted.sequence.draft[: drafted.num_ahead])
            slots.extend([drafted.slot] * len(counts))
            token_ids.extend(counts)
            times.extend(counts.values())
            places.extend(row * vocab_size + token_id for token_id in counts)
        packed = torch.frombuffer(slots + token_ids + times + places, dtype=torch.int64)
        parts = copied(packed, logits.device).view(4, -1)
        self._slots, self._token_ids, self._times, self._places = parts.unbind()
        self._before = logits.view(-1).index_select(0, self._places)

    def apply_(self, logits: Tensor, tables: SamplingTables) -> None:
        """Correct logits to which the tables' penalties and `min_tokens` have been applied."""
        vocab_size, flat, before = logits.shape[1], logits.view(-1), self._before
        numbers = tables.numbers.index_select(0, self._slots).view(torch.float64)
        counted = tables.counts.view(-1).index_select(0, self._slots * vocab_size + self._token_ids)
        num_said = (counted - 1).clamp_(min=0) + self._times
        repetition = numbers[:, REPETITION].float()
        scores = torch.where(before > 0, before / repetition, before * repetition)
        penalties = numbers[:, PRESENCE] + numbers[:, FREQUENCY] * num_said
        # `min_tokens` has ruled out stop tokens.
        is_ruled_out = flat.index_select(0, self._places) == -math.inf
        scores = (scores - penalties.float()).masked_fill_(is_ruled_out, -math.inf)
        flat.index_copy_(0, self._places, scores)
