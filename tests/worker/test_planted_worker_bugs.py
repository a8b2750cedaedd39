"""The fleet's oracles earn their trust: each bug planted here is noticed by one of them."""

from __future__ import annotations

import logging

import pytest

from tests.planted import (
    BLOCKS_ARE_PUBLISHED_BEFORE_THEY_ARE_FULL,
    NAMES_WITHOUT_CHAIN,
    Edit,
    bugs,
    plant,
)
from tests.worker.fleet import (
    BlocksLost,
    NeverEnded,
    WrongTokens,
    assert_equivalent,
    assert_thrifty,
)
from tests.worker.plays import Dice, play_in_quiet, play_in_trouble
from tests.worker.rehearsal import play_many

TAKE_EVICTED = "disagg.engine.sched.block_pool:BlockPool.take_evicted"
EXPORT = "disagg.worker.kv_export:KVExport"
IMPORT = "disagg.worker.kv_import:KVImport"
PULLS = "disagg.kvtransfer.pulls"
IS_EARLY = "getattr(each.source, 'is_early', False)"
RELEASE = "self._engine.pool.release([*each.held, *each.reserved])"
END_HOLD = f"{EXPORT}._end", "    hold = self._holds.pop(ticket_id)\n"
GIVEN_UP = f"{IMPORT}.take_waiting", "[*wanted, *moving]"
IN_TROUBLE = bugs(
    # The one that is being filled.
    Edit("an early ticket names one block too many", f"{EXPORT}.early_ticket",
         "num_full = sequence.num_computed //",
         "num_full = min(sequence.num_computed + groups.block_size, len(sequence.tokens) - 1) //"),
    Edit("errors of early pulls are ignored", f"{IMPORT}._finish", "if error is None:",
         f"if error is None or {IS_EARLY}:"),
    Edit("early blocks are named in another order", f"{IMPORT}._accept", "zip(each.reserved,",
         f"zip(each.reserved[::-1] if {IS_EARLY} else each.reserved,"),
    Edit("blocks of an early pull that failed are lost", f"{IMPORT}._finish", RELEASE,
         f"{IS_EARLY} or {RELEASE}"),
    Edit("other blocks are in prefix tickets", f"{EXPORT}.prefix_ticket",
         "    pool = self._engine.pool\n",
         "    pool = self._engine.pool\n"
         "    names = request.block_hashes[1:]\n"
         "    request = msgspec.structs.replace(request, block_hashes=names)\n"),
    Edit("blocks of prefix tickets are not held", f"{EXPORT}.prefix_ticket", "pool.acquire(found)",
         "pass"),
    Edit("prefix holds never end", *END_HOLD, "    if self._holds[ticket_id].is_prefix:\n"
         "        return\n"
         "    hold = self._holds.pop(ticket_id)\n"),
    Edit("the last block is not pulled", f"{PULLS}:PullBook.begin", "zip(source_blocks,",
         "zip(source_blocks[:-1],"),
    Edit("the last block is not pulled", f"{PULLS}:PullBook.begin", "into, strict=True",
         "into[:-1], strict=True"),
    # The ticket's first ones, though some of them were skipped.
    Edit("the wrong blocks are pulled", f"{PULLS}:PullBook.begin",
         "source_blocks = ticket.block_ids[first_block:]",
         "source_blocks = ticket.block_ids[: len(into)]"),
    Edit("the wrong blocks are pulled", f"{PULLS}:PullBook.begin", ".generations[first_block:]",
         ".generations[: len(into)]"),
    Edit("stamps are not bumped", "disagg.engine.sched.block_pool:BlockPool.allocate",
         "self.generations[block_id] += 1", "pass"),
    Edit("stamps are not compared", f"{PULLS}:Pull.is_unchanged", "return all(",
         "return True or all("),
    Edit("errors of pulls are ignored", f"{IMPORT}._finish", "if error is None:",
         f"if error is None or not {IS_EARLY}:"),
    *NAMES_WITHOUT_CHAIN,
    *BLOCKS_ARE_PUBLISHED_BEFORE_THEY_ARE_FULL,
    Edit("an arrival counts one token too many", f"{IMPORT}._accept",
         "num_evicted = num_tokens,", "num_evicted = num_tokens + 1,"),
    Edit("holds never end", *END_HOLD, "    return\n"),
    Edit("holds end twice", *END_HOLD,
         "    hold = self._holds.pop(ticket_id)\n    self._engine.release(hold.block_ids)\n"),
    Edit("two workers wait for each other", f"{IMPORT}.is_stuck", "return bool(",
         "return False and bool("),
    Edit("blocks of a failed pull are lost", f"{IMPORT}._finish", RELEASE,
         f"{IS_EARLY} and {RELEASE}"),
    # While the transport may still write them.
    Edit("blocks of a cancelled pull come back too early", f"{IMPORT}.cancel",
         "each.sequence = None\n",
         f"each.sequence = None; {RELEASE}; each.held = each.reserved = []\n"),
    Edit("skipped blocks are not acquired", f"{IMPORT}._reserve", "pool.acquire(found)", "pass"),
    Edit("a closed link leaves its streams", "disagg.worker.core:WorkerCore.close_link",
         "    for name in", "    return\n    for name in"),
    Edit("the store mixes up blocks", "tests.store.fake_store:FakeStore.get_many",
         "return [self._blocks.get(key) for key in keys]",
         "return [self._blocks.get(key) for key in keys][::-1]"),
    # At the next eviction, when other KV may be in them.
    Edit("evicted blocks are saved too late", TAKE_EVICTED, "evicted = self._evicted\n",
         "evicted, self.late = self.__dict__.get('late', []), self._evicted\n"),
    Edit("evicted blocks are saved too late", TAKE_EVICTED, "if evicted:", "if True:"),
    # One that nothing was written to.
    Edit("a cold prefix counts one block too many", "disagg.worker.tiers:StoreSource.find",
         "end = self.num_here + len(self.fetch.blocks)",
         "end = min(self.num_here + len(self.fetch.blocks) + 1, len(self.names))"),
    Edit("a cold prefix counts one block too many", "disagg.worker.tiers:StoreSource.begin",
         "strict=True", "strict=False"),
    # Such as one whose deadline passed: it is dropped, and its caller waits for ever.
    Edit("a refused arrival says nothing", f"{IMPORT}._pass_on",
         "sequence, each.sequence = each.sequence, None",
         "sequence = None if isinstance(each.source, TicketSource) else each.sequence\n"
         "    each.sequence = None"),
    Edit("a drain forgets who waits for blocks", *GIVEN_UP,
         "[*(each for each in wanted if not each.has_ticket), *moving]"),
    Edit("a drain forgets who waits for the store", *GIVEN_UP,
         "[*(e for e in wanted if type(e.source).__name__ != 'StoreSource'), *moving]"),
)  # fmt: skip
IN_QUIET = bugs(
    Edit("an arrival counts one token too few", f"{EXPORT}.leave",
         "groups = sequence.num_computed,", "groups = max(1, sequence.num_computed - 1),"),
    # Stamps keep the answers right; it only costs.
    Edit("holds end at once", f"{EXPORT}._hold", "    return ticket", "    self.release(name)\n"
         "    self._engine.pool.allocate(self._engine.pool.num_free)\n" "    return ticket"),
    # As if a sequence that no step has seen yet could not go on.
    Edit("holds break whenever a request comes", "disagg.worker.core:WorkerCore.advance",
         "self._engine.is_stuck",
         "(self._engine.has_work and not self._engine.last_plan.sequences)"),
    Edit("tickets of two workers are taken for one", f"{PULLS}:_name",
         "return ticket.source_id, ticket.epoch, ", "return "),
)  # fmt: skip


# What the oracles say of some of them; of others any of `NOTICED`.
FOUND_AS: dict[str, type[AssertionError]] = {
    "stamps are not compared": WrongTokens,
    "holds never end": BlocksLost,
    "a refused arrival says nothing": NeverEnded,
}
NOTICED = (AssertionError, ValueError, IndexError, KeyError)
# Where to begin with those that few plays show. Wherever another one shows first, after a change
# to the fleet, the search goes on to it.
FIRST_SEEDS = {
    "the last block is not pulled": 298,
    "evicted blocks are saved too late": 132,
    "a drain forgets who waits for blocks": 108,
    "a drain forgets who waits for the store": 99,
    "errors of early pulls are ignored": 97,
    "published before they are full": 86,
    "stamps are not bumped": 41,
    "stamps are not compared": 41,
    "other blocks are in prefix tickets": 37,
    "blocks of a cancelled pull come back too early": 35,
    "errors of pulls are ignored": 26,
    "the store mixes up blocks": 19,
    "a cold prefix counts one block too many": 19,
    "two workers wait for each other": 16,
}


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "disagg")


@pytest.mark.parametrize("bug", IN_TROUBLE)
def test_it_is_noticed_in_trouble(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *IN_TROUBLE[bug])
    first = FIRST_SEEDS.get(bug, 0)
    with pytest.raises(FOUND_AS.get(bug, NOTICED)):
        for seed in range(first, first + 2000):
            assert_equivalent(play_in_trouble(Dice(seed), num_trips=range(6, 11)))


def test_what_an_oracle_found_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *IN_TROUBLE["stamps are not compared"])
    seed = play_many(num_steps=3_000).failures["wrong tokens"][0]
    alone = play_many(num_steps=1, first_seed=seed)
    assert alone.num_plays == 1
    assert not alone.met, "nothing of a play that failed counts"


@pytest.mark.parametrize("bug", IN_QUIET)
def test_it_is_noticed_in_quiet_times(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, *IN_QUIET[bug])
    with pytest.raises(NOTICED):
        for seed in range(1000):
            assert_thrifty(play_in_quiet(Dice(seed)))
