"""Every end of a pull is counted once, under its lane and outcome."""

from __future__ import annotations

from disagg.decode_worker.pull_tally import PullTally
from disagg.kvtransfer.transport import PullDone
from disagg.messages import PullCounts


def test_pulls_are_counted_by_lane_and_outcome() -> None:
    tally = PullTally()
    assert not tally.counts
    tally.ended(PullDone(1, None, 2, 64, 0.5, "cma"))
    tally.ended(PullDone(2, None, 1, 32, 0.25, "cma"))
    tally.ended(PullDone(3, None, 1, 32, 9.0, "cma"), is_given_up=True)
    tally.ended(PullDone(4, "the stamps changed", 1, 32, 0.1, is_torn=True))
    tally.ended(PullDone(5, "the peer is gone", 1, 32, 0.1))
    tally.ended(PullDone(6, "the peer is gone", 1, 32, 0.1), is_given_up=True)
    tally.refused()
    assert tally.counts == (
        PullCounts("cma", num_ok=2, num_given_up=1, nbytes=96, seconds=0.75),
        PullCounts("", num_torn=1, num_failed=2, num_given_up=1),
    )
