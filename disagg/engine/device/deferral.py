"""Speculative cascades: tokens of a draft that are good enough for the model stand.

Without this, a token of a draft stands only if the model chooses it, too. With it, it also stands
where the model finds it nearly as likely as its likeliest token; elsewhere the draft model defers
to the model, which chooses as ever (a deferral rule that looks at the token: Narasimhan et al.,
2024). So the answers are no longer those of the model alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import chain

import torch
from torch import Tensor

from disagg.engine.sched.speculation import Continued, DraftedSequence
from disagg.kernels.uploads import upload

_CHOSEN = 1e30  # above all other logits, and finite when it is divided by a temperature


class Deferral:
    """When a token of a draft stands.

    Args:
        share: by which it may be less likely than the likeliest token, above 0 and below 1.
    """

    def __init__(self, share: float) -> None:
        self._least = math.log1p(-share)

    def apply_(self, logits: Tensor, rows: SequenceOf[Continued]) -> None:
        """Make the tokens of drafts that stand the ones that will be chosen.

        Args:
            logits: float32 [num_rows, vocab_size], after all that rules out tokens, and before the
                temperature.
            rows: a sequence with more of its draft follows the one with less.
        """
        drafted = [
            (row, after.sequence.draft[after.num_ahead - 1])
            for row, after in enumerate(rows[1:])
            if isinstance(after, DraftedSequence)
        ]
        if not drafted:
            return
        where, token_ids = upload([*chain(*drafted)], torch.int64, logits.device).view(-1, 2).T
        most, own = logits.amax(-1)[where], logits[where, token_ids]
        stands = (own >= most + self._least) & most.isfinite()
        logits[where, token_ids] = own.masked_fill(stands, _CHOSEN)
