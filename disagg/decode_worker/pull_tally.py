"""Counts KV pulls by lane and outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from disagg.kvtransfer.transport import PullDone
from disagg.messages import PullCounts


@dataclass(slots=True)
class PullTally:
    """The pulls of one worker since it started.

    counts: one entry for each lane (UCX's names, or ""). A new tuple when a pull ends, so that the
        status of every step can contain it without a copy.
    """

    counts: tuple[PullCounts, ...] = ()
    _by_lane: dict[str, PullCounts] = field(default_factory=dict)

    def ended(self, done: PullDone, *, is_given_up: bool = False) -> None:
        """
        Args:
            is_given_up: no sequence waited for it any more.
        """
        before = self._of(done.lane)
        if is_given_up:
            after = msgspec.structs.replace(before, num_given_up=before.num_given_up + 1)
        elif done.error is None:
            after = msgspec.structs.replace(
                before,
                num_ok=before.num_ok + 1,
                nbytes=before.nbytes + done.nbytes,
                seconds=before.seconds + done.seconds,
            )
        elif done.is_torn:
            after = msgspec.structs.replace(before, num_torn=before.num_torn + 1)
        else:
            after = msgspec.structs.replace(before, num_failed=before.num_failed + 1)
        self._keep(after)

    def refused(self) -> None:
        """A pull could not begin."""
        before = self._of("")
        self._keep(msgspec.structs.replace(before, num_failed=before.num_failed + 1))

    def _of(self, lane: str) -> PullCounts:
        return self._by_lane.get(lane) or PullCounts(lane)

    def _keep(self, counts: PullCounts) -> None:
        self._by_lane[counts.lane] = counts
        self.counts = tuple(self._by_lane.values())
