"""The oracle earns its trust: each bug planted here is noticed by the checks of the other tests."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings

from tests.engine.workload import Driver, Workload, workloads
from tests.planted import (
    BLOCKS_ARE_PUBLISHED_BEFORE_THEY_ARE_FULL,
    NAMES_WITHOUT_CHAIN,
    Edit,
    bugs,
    plant,
)

SCHED = "disagg.engine.sched"
GIVE_BACK = f"{SCHED}.block_tables:give_back", "pool.release(disown(sequence))"
ALLOCATE = f"{SCHED}.block_pool:BlockPool.allocate", "    return block_ids"
PROJECTED = f"{SCHED}.async_scheduling:ProjectedPlan.__init__"
BUGS = bugs(
    *NAMES_WITHOUT_CHAIN,
    *BLOCKS_ARE_PUBLISHED_BEFORE_THEY_ARE_FULL,
    # A planned block is not a computed one, however soon it will be.
    Edit("published on admission", f"{SCHED}.block_tables:adopt",
         "    sequence.num_published = rows_with_kv\n",
         "    sequence.num_published = rows_with_kv\n"
         "    for block_id, name in zip(sequence.block_ids, sequence.block_hashes):\n"
         "        pool.publish(block_id, name)\n"),
    Edit("released before use", *ALLOCATE, "    self.release(block_ids[:1])\n    return block_ids"),
    Edit("released twice", *GIVE_BACK,
         "pool.release([*sequence.block_ids[:1], *disown(sequence)])"),
    Edit("a block is lost", *GIVE_BACK, "pool.release(disown(sequence)[1:])"),
    Edit("used without being acquired", f"{SCHED}.block_pool:BlockPool.acquire", "in block_ids:",
         "in ():"),
    Edit("evicted, but the name stays", f"{SCHED}.block_pool:BlockPool._evict",
         "del self._block_of[block_hash]", "return self._free.add(block_id)"),
    Edit("progress is kept when preempted", *GIVE_BACK, "num_computed = sequence.num_computed\n"
         "    pool.release(disown(sequence))\n" "    sequence.num_computed = num_computed"),
    # The block after the last hit is taken for a hit, if there is any block at all.
    Edit("one block too many matches", f"{SCHED}.block_tables:find_prefix",
         "return cached_table(pool, sequence.block_hashes[:num_findable])",
         "found = cached_table(pool, sequence.block_hashes[:num_findable])\n"
         "    others = [i for i in pool.match(sequence.block_hashes) if i not in found]\n"
         "    return found + (others or [i for i in pool._idle if i not in found])[:1]"),
    Edit("the last token of a chunk is forgotten", f"{SCHED}.scheduler:Scheduler.apply",
         "    return events", "    for each in plan.sequences[plan.num_decodes:]:\n"
         "        each.num_computed += each.num_uncomputed > 1\n" "    return events"),
    Edit("blocks overlap", *ALLOCATE, "    if len(block_ids) > 1:\n"
         "        self.release(block_ids[1:2])\n"
         "        block_ids[1] = block_ids[0]\n" "    return block_ids"),
    # A decode writes the KV of its token behind its last block.
    Edit("growth comes a step too late", f"{SCHED}.scheduler:Scheduler.plan", "> each.num_slots]",
         "> each.num_slots + 1]"),
    # Growth fails for ever once the cache is full: a livelock.
    Edit("blocks are never taken back", f"{SCHED}.scheduler:Scheduler.plan",
         "self._grow_by_turns(growing)", "return Chunks(pool, 0, [], 0).step_plan([])"),
)  # fmt: skip
# Where steps are planned ahead, and nowhere else.
AHEAD = bugs(
    Edit("blocks are given back while a step writes to them",
         f"{SCHED}.scheduler:Scheduler.release", "self._async_scheduling.release",
         "self.pool.release"),
    Edit("begins where the step before began", f"{SCHED}.scheduler:Scheduler.plan_following",
         "    return following", "    from msgspec.structs import replace\n"
         "    starts = [start - 1 for start in following.first_positions()]\n"
         "    return replace(following, starts=starts, continues=False)"),
    # Whoever is in the middle of a prompt computes the same chunk again.
    Edit("planned as if nothing were under way", PROJECTED, "append((sequence, end))",
         "append((sequence, sequence.num_computed))"),
    Edit("whoever ends is continued", PROJECTED, "== each.num_slots]",
         "== each.num_slots]\n"
         "    self.decodes += {*sequences[:n]} - {*self.decodes} - gone"),
    Edit("chosen before the host knows", "tests.engine.fake_runner:FakeDevice.launch",
         "    return choose", "    results = choose()\n    return lambda: results"),
    # Whoever has a draft takes part in the next step, as if its first token were wrong.
    Edit("a draft is verified, and its sequence goes on", PROJECTED,
         "(each.hand_over or each.draft)", "each.hand_over"),
    Edit("what was wasted is applied", f"{SCHED}.async_scheduling:AsyncScheduling.end",
         "return gone", "return set()"),
)  # fmt: skip


@pytest.mark.parametrize("bug", [*BUGS, *AHEAD])
def test_the_oracle_notices(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *(BUGS | AHEAD)[bug])

    @settings(max_examples=3000, deadline=None, derandomize=True, phases=[Phase.generate])
    @given(workloads(on_device=True if bug in AHEAD else None))
    def play(workload: Workload) -> None:
        Driver(workload).play()

    with pytest.raises((AssertionError, ValueError, IndexError, KeyError)):
        play()
