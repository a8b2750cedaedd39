"""Each bug planted here in the verification of drafts is noticed by `test_scheduler`'s oracle."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings

from disagg.engine.sched import block_tables, chunks, scheduler, speculation
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken
from tests.engine.fake_runner import FakeRunner
from tests.engine.workload import Driver, Workload, workloads

Plant = Callable[[pytest.MonkeyPatch], None]
_gain = speculation.gain


def _believe_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def gain(
        pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
    ) -> tuple[tuple[int, ...], None]:
        draft = sequence.draft
        token_ids, _ = _gain(pool, sequence, verified)
        is_wrong = len(token_ids) < len(verified) and sequence.finish_reason() is None
        if is_wrong and token_ids[-1] != draft[len(token_ids) - 1]:
            sequence.tokens[-1] = draft[len(token_ids) - 1]
        return (*token_ids[:-1], sequence.tokens[-1]), None

    patch.setattr(scheduler, "gain", gain)


def _count_what_was_refused_as_computed(patch: pytest.MonkeyPatch) -> None:
    """The wrong token's KV stays where the right one's belongs."""

    def gain(
        pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
    ) -> tuple[tuple[int, ...], None]:
        token_ids, _ = _gain(pool, sequence, verified)
        if len(token_ids) < len(verified):
            sequence.num_computed = min(len(sequence.tokens), sequence.num_slots)
        return token_ids, None

    patch.setattr(scheduler, "gain", gain)


def _publish_before_it_is_verified(patch: pytest.MonkeyPatch) -> None:
    def gain(
        pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
    ) -> tuple[tuple[int, ...], None]:
        num_ahead, known = len(verified) - 1, list(sequence.tokens)
        sequence.tokens += sequence.draft[:num_ahead]
        sequence.num_computed = len(sequence.tokens)
        if sequence.num_computed >= sequence.publish_at:
            block_tables.publish(pool, sequence)
        sequence.tokens[:] = known
        return _gain(pool, sequence, verified)[0], None

    patch.setattr(scheduler, "gain", gain)


def _go_on_after_the_end(patch: pytest.MonkeyPatch) -> None:
    def gain(
        pool: BlockPool, sequence: Sequence, verified: tuple[SampledToken, ...]
    ) -> tuple[tuple[int, ...], None]:
        stop_ids, sequence.stop_ids = sequence.stop_ids, frozenset()
        token_ids, _ = _gain(pool, sequence, verified)
        sequence.stop_ids = stop_ids
        return token_ids, None

    patch.setattr(scheduler, "gain", gain)


def _verify_without_blocks(patch: pytest.MonkeyPatch) -> None:
    def claim(pool: BlockPool, sequence: Sequence, limit: int, num_spare_blocks: int) -> int:
        return min(len(sequence.draft), limit)

    patch.setattr(chunks, "claim", claim)


def _compare_with_the_draft_a_place_too_far(patch: pytest.MonkeyPatch) -> None:
    def next_of(self: FakeRunner, sequence: Sequence, position: int) -> SampledToken:
        ahead = max(position - 1, len(sequence.tokens))
        return _next(self, sequence, ahead)

    _next = FakeRunner._next
    patch.setattr(FakeRunner, "_next", next_of)


@pytest.mark.parametrize(
    "plant",
    [
        _believe_one_token_too_many,
        _count_what_was_refused_as_computed,
        _publish_before_it_is_verified,
        _go_on_after_the_end,
        _verify_without_blocks,
        _compare_with_the_draft_a_place_too_far,
    ],
    ids=lambda plant: plant.__name__.strip("_"),
)
def test_the_oracle_notices(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    @settings(
        max_examples=500, deadline=None, database=None, derandomize=True, phases=[Phase.generate]
    )
    @given(workloads())
    def play_one(workload: Workload) -> None:
        Driver(workload).play()

    with pytest.raises((AssertionError, IndexError, ValueError, ExceptionGroup)):
        play_one()
