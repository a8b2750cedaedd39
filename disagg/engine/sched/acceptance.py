"""How far a proposer's drafts were right: of one sequence, and of all."""

from __future__ import annotations

from itertools import accumulate
from operator import mul

MAX_DRAFT = 7  # tokens of a proposer's draft
# A sequence's drafts are believed to be as those of others lately, as if so many were tried at each
# position. At first such a share is believed to be right. Each new draft makes what is known count
# for less: of one sequence, and of all.
NUM_ASSUMED, SHARE_ASSUMED = 2.0, 0.6
KEPT, KEPT_OF_ALL = 0.95, 0.99
NUM_RESTS = 64  # steps without a draft while others have some, after which half is forgotten


class Acceptance:
    """How far drafts were right lately.

    Args:
        of_all: what is known of other sequences; None: this is it.

    Attributes:
        shares: for each position, the share of drafts that is right there if all before is. It is
            believed to be as in other sequences, and in these as at the position before.
        chances: for each position, the chance that a draft is right up to there.
        is_asked: whether the sequence's draft, if it has one, is the proposer's.
    """

    __slots__ = (
        "_kept",
        "_num_rests",
        "_of_all",
        "_right",
        "_tried",
        "chances",
        "is_asked",
        "shares",
    )

    def __init__(self, of_all: Acceptance | None = None) -> None:
        self._of_all = of_all
        self._kept = KEPT if of_all else KEPT_OF_ALL
        self._right = [0.0] * MAX_DRAFT
        self._tried = [0.0] * MAX_DRAFT
        self._num_rests = 0
        self.is_asked = False
        self._keep(1.0)

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        for i in range(min(num_accepted + 1, num_drafted, len(self._tried))):
            self._tried[i] += 1.0
            self._right[i] += i < num_accepted
        self._keep(self._kept)
        self.is_asked = False

    def rest(self) -> None:
        """Record that a draft would not pay, while those of others do. Half is forgotten at last,
        so that it is tried again."""
        self._num_rests += 1
        if self._num_rests % (NUM_RESTS) == 0:
            self._keep(0.5)

    def _keep(self, share: float) -> None:
        for counts in (self._right, self._tried):
            counts[:] = [share * count for count in counts]
        self.shares: list[float] = []
        assumed = SHARE_ASSUMED
        for i, (right, tried) in enumerate(zip(self._right, self._tried, strict=True)):
            assumed = self._of_all.shares[i] if self._of_all else assumed
            assumed = (right + NUM_ASSUMED * assumed) / (tried + NUM_ASSUMED)
            self.shares.append(assumed)
        self.chances = [*accumulate(self.shares, mul)]
