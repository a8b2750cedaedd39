"""The oracle earns its trust: each bug planted here is noticed by the checks of the other tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from msgspec.structs import replace

from disagg.engine.sched import block_tables, scheduler
from disagg.engine.sched.async_scheduling import AsyncScheduling, ProjectedPlan
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.engine.sched.step import Choose, SampledToken, StepPlan, TokenEvent
from disagg.time_model import StepFeatures
from tests.engine import workload
from tests.engine.fake_runner import FakeDevice, work_of
from tests.engine.planted import hash_blocks_without_chain, publish_before_full
from tests.engine.workload import Driver, Workload, workloads

Plant = Callable[[pytest.MonkeyPatch], None]

_allocate = BlockPool.allocate
_apply = Scheduler.apply
_give_back = block_tables.give_back
_find_prefix = block_tables.find_prefix
_plan = Scheduler.plan
_plan_following = Scheduler.plan_following
_after = ProjectedPlan.__init__
_end = AsyncScheduling.end
_launch = FakeDevice.launch


def _hashes_without_chain(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(workload, "hash_blocks", hash_blocks_without_chain)


def _publish_on_admission(patch: pytest.MonkeyPatch) -> None:
    """A planned block is not a computed one, however soon it will be."""

    def adopt(pool: BlockPool, sequence: EngineSequence, found: list[int], new: list[int]) -> None:
        ownership_adopt(pool, sequence, found, new)
        for block_id, name in zip(sequence.block_ids, sequence.block_hashes, strict=False):
            pool.publish(block_id, name)

    ownership_adopt = block_tables.adopt
    patch.setattr(block_tables, "adopt", adopt)


def _release_before_use(patch: pytest.MonkeyPatch) -> None:
    def allocate(pool: BlockPool, num_blocks: int, *, apart: bool = False) -> list[int] | None:
        block_ids = _allocate(pool, num_blocks, apart=apart)
        pool.release((block_ids or [])[:1])
        return block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def _release_twice(patch: pytest.MonkeyPatch) -> None:
    def give_back(pool: BlockPool, sequence: EngineSequence) -> None:
        pool.release(sequence.block_ids[:1])
        _give_back(pool, sequence)

    patch.setattr(scheduler, "give_back", give_back)


def _lose_a_block(patch: pytest.MonkeyPatch) -> None:
    def give_back(pool: BlockPool, sequence: EngineSequence) -> None:
        sequence.block_ids = sequence.block_ids[1:]
        _give_back(pool, sequence)

    patch.setattr(scheduler, "give_back", give_back)


def _use_without_acquiring(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "acquire", lambda pool, block_ids: None)


def _evict_but_keep_the_name(patch: pytest.MonkeyPatch) -> None:
    def evict(pool: BlockPool, block_id: int) -> None:
        del pool._idle[block_id]
        pool._hash_of[block_id] = None
        pool._free.add(block_id)

    patch.setattr(BlockPool, "_evict", evict)


def _keep_progress_when_preempted(patch: pytest.MonkeyPatch) -> None:
    def give_back(pool: BlockPool, sequence: EngineSequence) -> None:
        num_computed = sequence.num_computed
        _give_back(pool, sequence)
        sequence.num_computed = num_computed

    patch.setattr(scheduler, "give_back", give_back)


def _match_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """The block after the last hit is taken for a hit, if there is any block at all."""

    def find_prefix(pool: BlockPool, sequence: EngineSequence) -> list[int]:
        found = _find_prefix(pool, sequence)
        others = [i for i in pool.match(sequence.block_hashes) if i not in found]
        idle = [i for i in pool._idle if i not in found]
        return found + (others or idle)[:1]

    patch.setattr(block_tables, "find_prefix", find_prefix)


def _forget_the_last_token_of_a_chunk(patch: pytest.MonkeyPatch) -> None:
    def apply(
        self: Scheduler, plan: StepPlan, sampled: Sequence[SampledToken | None]
    ) -> list[TokenEvent]:
        events = _apply(self, plan, sampled)
        for work in work_of(plan)[plan.num_decodes :]:
            if work.sequence.num_uncomputed > 1:
                work.sequence.num_computed += 1
        return events

    patch.setattr(Scheduler, "apply", apply)


def _overlapping_blocks(patch: pytest.MonkeyPatch) -> None:
    def allocate(pool: BlockPool, num_blocks: int, *, apart: bool = False) -> list[int] | None:
        block_ids = _allocate(pool, num_blocks, apart=apart)
        if block_ids is not None and len(block_ids) > 1:
            pool.release(block_ids[1:2])
            return [block_ids[0], block_ids[0], *block_ids[2:]]
        return block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def _grow_a_step_too_late(patch: pytest.MonkeyPatch) -> None:
    """A decode writes the KV of its token behind its last block."""

    def plan(self: Scheduler) -> StepPlan:
        for each in self.running:
            each.num_slots += 1
        planned = _plan(self)
        for each in self.running:
            each.num_slots -= 1
        return planned

    patch.setattr(Scheduler, "plan", plan)


def _never_take_blocks_back(patch: pytest.MonkeyPatch) -> None:
    """Growth fails for ever once the cache is full: a livelock."""

    def plan(self: Scheduler) -> StepPlan:
        growing = [each for each in self.running if len(each.tokens) > each.num_slots]
        if len(growing) > self.pool.num_free:
            return StepPlan((), (), 0, StepFeatures())
        return _plan(self)

    patch.setattr(Scheduler, "plan", plan)


def _give_blocks_back_while_a_step_writes_to_them(patch: pytest.MonkeyPatch) -> None:
    def release(self: Scheduler, block_ids: list[int], *, is_spent: bool = False) -> None:
        self.pool.release(block_ids, is_spent=is_spent)

    patch.setattr(Scheduler, "release", release)


def _begin_where_the_step_before_began(patch: pytest.MonkeyPatch) -> None:
    def plan_following(self: Scheduler, plan: StepPlan) -> StepPlan | None:
        following = _plan_following(self, plan)
        if following is None:
            return None
        starts = [start - 1 for start in following.first_positions()]
        return replace(following, starts=starts, continues=False)

    patch.setattr(Scheduler, "plan_following", plan_following)


def _choose_before_the_host_knows(patch: pytest.MonkeyPatch) -> None:
    def launch(self: FakeDevice, plan: StepPlan) -> Choose:
        results = _launch(self, plan)()
        return lambda: results

    patch.setattr(FakeDevice, "launch", launch)


def _verify_a_draft_and_go_on(patch: pytest.MonkeyPatch) -> None:
    """Whoever has a draft takes part in the next step, as if its first token were wrong."""

    def init(self: ProjectedPlan, plan: StepPlan, *others: Any) -> None:
        _after(self, plan, *others)
        for sequence, num_tokens in zip(plan.sequences, plan.query_lens, strict=True):
            is_verified = sequence.num_computed + num_tokens > len(sequence.tokens)
            if is_verified and sequence not in others[0]:
                self.decodes.append(sequence)

    patch.setattr(ProjectedPlan, "__init__", init)


def _continue_whoever_ends(patch: pytest.MonkeyPatch) -> None:
    def init(self: ProjectedPlan, plan: StepPlan, *others: Any) -> None:
        _after(self, plan, *others)
        ended = [each for each in plan.sequences[: plan.num_decodes] if each not in self.decodes]
        self.decodes += [each for each in ended if each not in others[0]]

    patch.setattr(ProjectedPlan, "__init__", init)


def _plan_as_if_nothing_were_under_way(patch: pytest.MonkeyPatch) -> None:
    """Whoever is in the middle of a prompt computes the same chunk again."""

    def init(self: ProjectedPlan, plan: StepPlan, *others: Any) -> None:
        _after(self, plan, *others)
        self.prefills = [(sequence, sequence.num_computed) for sequence, _ in self.prefills]

    patch.setattr(ProjectedPlan, "__init__", init)


def _apply_what_was_wasted(patch: pytest.MonkeyPatch) -> None:
    def end(self: AsyncScheduling) -> set[EngineSequence]:
        _end(self)
        return set()

    patch.setattr(AsyncScheduling, "end", end)


PLANTS: list[Plant] = [
    _hashes_without_chain,
    publish_before_full,
    _publish_on_admission,
    _release_before_use,
    _release_twice,
    _lose_a_block,
    _use_without_acquiring,
    _evict_but_keep_the_name,
    _keep_progress_when_preempted,
    _match_one_block_too_many,
    _forget_the_last_token_of_a_chunk,
    _overlapping_blocks,
    _grow_a_step_too_late,
    _never_take_blocks_back,
]
AHEAD: list[Plant] = [  # where steps are planned ahead, and nowhere else
    _give_blocks_back_while_a_step_writes_to_them,
    _begin_where_the_step_before_began,
    _plan_as_if_nothing_were_under_way,
    _continue_whoever_ends,
    _choose_before_the_host_knows,
    _verify_a_draft_and_go_on,
    _apply_what_was_wasted,
]


@pytest.mark.parametrize("plant", PLANTS + AHEAD, ids=lambda plant: plant.__name__.strip("_"))
def test_the_oracle_notices(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    @settings(max_examples=3000, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(workloads(on_device=True if plant in AHEAD else None))
    def play(workload: Workload) -> None:
        Driver(workload).play()

    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        play()
