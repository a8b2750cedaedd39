"""The fleet's oracles earn their trust: each bug planted here is noticed by one of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from disagg.blocks import BlockHash, hash_block
from disagg.engine.engine import Engine
from disagg.engine.sched import block_tables
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.sequence import Sequence as EngineSequence
from disagg.ingress import dispatch
from disagg.kvtransfer import pulls
from disagg.kvtransfer.pulls import Pull, PullBook
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest
from disagg.worker.core import WorkerCore
from disagg.worker.kv_export import KVExport
from disagg.worker.kv_import import KVImport, TicketSource
from disagg.worker.tiers import StoreSource
from tests.engine.planted import hash_blocks_without_chain, publish_before_full
from tests.engine.workload import ROOT
from tests.store.fake_store import FakeStore
from tests.worker import plays as plays_module
from tests.worker.fleet import (
    BlocksLost,
    NeverEnded,
    WrongTokens,
    assert_equivalent,
    assert_thrifty,
)
from tests.worker.plays import Dice, play_in_quiet, play_in_trouble
from tests.worker.rehearsal import play_many

Plant = Callable[[pytest.MonkeyPatch], None]

_allocate = BlockPool.allocate
_begin = PullBook.begin
_leave = KVExport.leave
_prefix_ticket = KVExport.prefix_ticket
_early_ticket = KVExport.early_ticket
_end_hold = KVExport._end
_accept = KVImport._accept
_finish = KVImport._finish
_cancel = KVImport.cancel
_pass_on = KVImport._pass_on
_take_waiting = KVImport.take_waiting
_get_many = FakeStore.get_many


def _is_early(kv_import: KVImport, move: Any) -> bool:
    return getattr(kv_import._moving[move].source, "is_early", False)


def _the_last_block_is_not_pulled(patch: pytest.MonkeyPatch) -> None:
    def begin(*args: Any) -> Pull:
        pull = _begin(*args)
        last = pull.runs[-1]
        return replace(pull, runs=(*pull.runs[:-1], last._replace(num_blocks=last.num_blocks - 1)))

    patch.setattr(PullBook, "begin", begin)


def _the_wrong_blocks_are_pulled(patch: pytest.MonkeyPatch) -> None:
    """The ticket's first ones, though some of them were skipped."""

    def begin(
        book: PullBook, ticket: KVTicket, first_block: int, into: Sequence[int], *others: Any
    ) -> Pull:
        def shifted(values: tuple[int, ...]) -> tuple[int, ...]:
            return (*values[len(into) :], *values[: len(into)])

        wrong = replace(
            ticket, block_ids=shifted(ticket.block_ids), generations=shifted(ticket.generations)
        )
        return _begin(book, wrong, first_block, into, *others)

    patch.setattr(PullBook, "begin", begin)


def _stamps_are_not_bumped(patch: pytest.MonkeyPatch) -> None:
    def allocate(pool: BlockPool, num_blocks: int, *, apart: bool = False) -> list[int] | None:
        block_ids = _allocate(pool, num_blocks, apart=apart)
        for block_id in block_ids or ():
            pool.generations[block_id] -= 1
        return block_ids

    patch.setattr(BlockPool, "allocate", allocate)


def _stamps_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pull, "is_unchanged", lambda pull, generations: True)


def _errors_of_pulls_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def finish(kv_import: KVImport, move: Any, error: str | None, now: float) -> Any:
        return _finish(kv_import, move, error if _is_early(kv_import, move) else None, now)

    patch.setattr(KVImport, "_finish", finish)


def _names_without_chain(patch: pytest.MonkeyPatch) -> None:
    def of_one(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
        return hash_block(ROOT, tokens)

    patch.setattr(plays_module, "hash_blocks", hash_blocks_without_chain)
    patch.setattr(dispatch, "hash_block", of_one)
    patch.setattr(block_tables, "hash_block", of_one)


def _an_arrival_counts_one_token_too_many(patch: pytest.MonkeyPatch) -> None:
    def accept(kv_import: KVImport, each: Any, now: float) -> None:
        each.source.num_tokens += bool(each.source.num_tokens)
        _accept(kv_import, each, now)

    patch.setattr(KVImport, "_accept", accept)


def _an_arrival_counts_one_token_too_few(patch: pytest.MonkeyPatch) -> None:
    def leave(kv_export: KVExport, sequence: EngineSequence, now: float) -> KVTicket:
        sequence.num_computed -= sequence.num_computed > 1
        return _leave(kv_export, sequence, now)

    patch.setattr(KVExport, "leave", leave)


def _holds_never_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVExport, "_end", lambda kv_export, ticket_id, how: None)


def _holds_end_twice(patch: pytest.MonkeyPatch) -> None:
    def end(kv_export: KVExport, ticket_id: str, how: Any) -> None:
        kv_export._engine.release(kv_export._holds[ticket_id].block_ids)
        _end_hold(kv_export, ticket_id, how)

    patch.setattr(KVExport, "_end", end)


def _holds_end_at_once(patch: pytest.MonkeyPatch) -> None:
    """Stamps keep the answers right; it only costs."""

    def leave(kv_export: KVExport, sequence: EngineSequence, now: float) -> KVTicket:
        ticket = _leave(kv_export, sequence, now)
        kv_export.release(ticket.ticket_id)
        _allocate(kv_export._engine.pool, kv_export._engine.pool.num_free)
        return ticket

    patch.setattr(KVExport, "leave", leave)


def _holds_break_whenever_a_request_comes(patch: pytest.MonkeyPatch) -> None:
    """As if a sequence that no step has seen yet could not go on."""

    def is_stuck(engine: Engine) -> bool:
        return engine.has_work and not engine.last_plan.sequences

    patch.setattr(Engine, "is_stuck", property(is_stuck, lambda engine, value: None), raising=False)


def _two_workers_wait_for_each_other(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVImport, "is_stuck", False)


def _tickets_of_two_workers_are_taken_for_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pulls, "_name", lambda ticket: ticket.ticket_id)


def _blocks_of_a_failed_pull_are_lost(patch: pytest.MonkeyPatch) -> None:
    def finish(kv_import: KVImport, move: Any, error: str | None, now: float) -> Any:
        if error is not None and not _is_early(kv_import, move):
            each = kv_import._moving[move]
            each.held, each.reserved = [], []
        return _finish(kv_import, move, error, now)

    patch.setattr(KVImport, "_finish", finish)


def _blocks_of_a_cancelled_pull_come_back_too_early(patch: pytest.MonkeyPatch) -> None:
    """While the transport may still write them."""

    def cancel(kv_import: KVImport, request_id: str) -> bool:
        for each in kv_import._moving.values():
            if each.is_of(request_id):
                kv_import._engine.pool.release([*each.held, *each.reserved])
                each.held, each.reserved = [], []
        return _cancel(kv_import, request_id)

    patch.setattr(KVImport, "cancel", cancel)


def _skipped_blocks_are_not_acquired(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockPool, "acquire", lambda pool, block_ids: None)


def _a_closed_link_leaves_its_streams(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerCore, "close_link", lambda core, link_id, now: None)


def _the_store_mixes_up_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakeStore, "get_many", lambda store, keys: _get_many(store, keys)[::-1])


def _evicted_blocks_are_saved_too_late(patch: pytest.MonkeyPatch) -> None:
    """At the next eviction, when other KV may be in them."""

    def give_up(engine: Engine) -> None:
        late = engine.__dict__.setdefault("late", [])
        if engine.save_evicted is not None and late:
            engine.save_evicted(list(late))
            late.clear()
        late.extend(engine.pool.take_evicted())

    patch.setattr(Engine, "_give_up_evicted", give_up)


def _a_cold_prefix_counts_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """One that nothing was written to."""
    find = StoreSource.find

    def find_more(source: StoreSource, first_block: int) -> int | None:
        num_found = find(source, first_block)
        return num_found and min(num_found + 1, len(source.names) - first_block)

    def begin(source: StoreSource, first_block: int, into: list[int]) -> None:
        blocks = source.fetch.blocks[first_block - source.num_here :]
        for block_id, block in zip(into, blocks, strict=False):
            source.write_block(block_id, block)

    patch.setattr(StoreSource, "find", find_more)
    patch.setattr(StoreSource, "begin", begin)


def _a_refused_arrival_says_nothing(patch: pytest.MonkeyPatch) -> None:
    """Such as one whose deadline passed: it is dropped, and its caller waits for ever."""

    def pass_on(kv_import: KVImport, each: Any, now: float) -> None:
        if isinstance(each.source, TicketSource):
            each.sequence = None
        _pass_on(kv_import, each, now)

    patch.setattr(KVImport, "_pass_on", pass_on)


def _a_drain_forgets_who_waits_for_blocks(patch: pytest.MonkeyPatch) -> None:
    _take_none(patch, lambda source: bool(source.num_tokens))


def _a_drain_forgets_who_waits_for_the_store(patch: pytest.MonkeyPatch) -> None:
    _take_none(patch, lambda source: isinstance(source, StoreSource))


def _take_none(patch: pytest.MonkeyPatch, is_forgotten: Callable[[Any], bool]) -> None:
    def take_waiting(kv_import: KVImport) -> list[EngineSequence]:
        forgotten = [each.sequence for each in kv_import._queued if is_forgotten(each.source)]
        return [sequence for sequence in _take_waiting(kv_import) if sequence not in forgotten]

    patch.setattr(KVImport, "take_waiting", take_waiting)


def _other_blocks_are_in_prefix_tickets(patch: pytest.MonkeyPatch) -> None:
    def prefix_ticket(
        kv_export: KVExport, name: str, request: GenerateRequest, now: float
    ) -> KVTicket:
        wrong = msgspec.structs.replace(request, block_hashes=request.block_hashes[1:])
        return _prefix_ticket(kv_export, name, wrong, now)

    patch.setattr(KVExport, "prefix_ticket", prefix_ticket)


def _blocks_of_prefix_tickets_are_not_held(patch: pytest.MonkeyPatch) -> None:
    def prefix_ticket(
        kv_export: KVExport, name: str, request: GenerateRequest, now: float
    ) -> KVTicket:
        ticket = _prefix_ticket(kv_export, name, request, now)
        kv_export._engine.pool.release(ticket.block_ids)
        return ticket

    patch.setattr(KVExport, "prefix_ticket", prefix_ticket)


def _prefix_holds_never_end(patch: pytest.MonkeyPatch) -> None:
    def end(kv_export: KVExport, ticket_id: str, how: Any) -> None:
        if not kv_export._holds[ticket_id].is_prefix:
            _end_hold(kv_export, ticket_id, how)

    patch.setattr(KVExport, "_end", end)


def _an_early_ticket_names_one_block_too_many(patch: pytest.MonkeyPatch) -> None:
    """The one that is being filled."""

    def early_ticket(kv_export: KVExport, sequence: EngineSequence) -> KVTicket | None:
        more = copy(sequence)
        size = kv_export._engine.pool.block_size
        more.num_computed = min(sequence.num_computed + size, len(sequence.tokens) - 1)
        return _early_ticket(kv_export, more)

    patch.setattr(KVExport, "early_ticket", early_ticket)


def _errors_of_early_pulls_are_ignored(patch: pytest.MonkeyPatch) -> None:
    def finish(kv_import: KVImport, move: Any, error: str | None, now: float) -> Any:
        return _finish(kv_import, move, None if _is_early(kv_import, move) else error, now)

    patch.setattr(KVImport, "_finish", finish)


def _early_blocks_are_named_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def finish(kv_import: KVImport, move: Any, error: str | None, now: float) -> Any:
        if _is_early(kv_import, move):
            kv_import._moving[move].reserved.reverse()
        return _finish(kv_import, move, error, now)

    patch.setattr(KVImport, "_finish", finish)


def _blocks_of_an_early_pull_that_failed_are_lost(patch: pytest.MonkeyPatch) -> None:
    def finish(kv_import: KVImport, move: Any, error: str | None, now: float) -> Any:
        if error is not None and _is_early(kv_import, move):
            return kv_import._moving.pop(move).source
        return _finish(kv_import, move, error, now)

    patch.setattr(KVImport, "_finish", finish)


IN_TROUBLE: list[Plant] = [
    _an_early_ticket_names_one_block_too_many,
    _errors_of_early_pulls_are_ignored,
    _early_blocks_are_named_in_another_order,
    _blocks_of_an_early_pull_that_failed_are_lost,
    _other_blocks_are_in_prefix_tickets,
    _blocks_of_prefix_tickets_are_not_held,
    _prefix_holds_never_end,
    _the_last_block_is_not_pulled,
    _the_wrong_blocks_are_pulled,
    _stamps_are_not_bumped,
    _stamps_are_not_compared,
    _errors_of_pulls_are_ignored,
    _names_without_chain,
    publish_before_full,
    _an_arrival_counts_one_token_too_many,
    _holds_never_end,
    _holds_end_twice,
    _two_workers_wait_for_each_other,
    _blocks_of_a_failed_pull_are_lost,
    _blocks_of_a_cancelled_pull_come_back_too_early,
    _skipped_blocks_are_not_acquired,
    _a_closed_link_leaves_its_streams,
    _the_store_mixes_up_blocks,
    _evicted_blocks_are_saved_too_late,
    _a_cold_prefix_counts_one_block_too_many,
    _a_refused_arrival_says_nothing,
    _a_drain_forgets_who_waits_for_blocks,
    _a_drain_forgets_who_waits_for_the_store,
]
IN_QUIET: list[Plant] = [
    _an_arrival_counts_one_token_too_few,
    _holds_end_at_once,
    _holds_break_whenever_a_request_comes,
    _tickets_of_two_workers_are_taken_for_one,
]


# What the oracles say of some of them; of others any of `NOTICED`.
FOUND_AS: dict[Plant, type[AssertionError]] = {
    _stamps_are_not_compared: WrongTokens,
    _holds_never_end: BlocksLost,
    _a_refused_arrival_says_nothing: NeverEnded,
}
NOTICED = (AssertionError, ValueError, IndexError, KeyError)
# Where to begin with those that few plays show. Wherever another one shows first, after a change
# to the fleet, the search goes on to it.
FIRST_SEEDS: dict[Plant, int] = {
    _the_last_block_is_not_pulled: 298,
    _evicted_blocks_are_saved_too_late: 132,
    _a_drain_forgets_who_waits_for_blocks: 108,
    _a_drain_forgets_who_waits_for_the_store: 99,
    _errors_of_early_pulls_are_ignored: 97,
    publish_before_full: 86,
    _stamps_are_not_bumped: 41,
    _stamps_are_not_compared: 41,
    _other_blocks_are_in_prefix_tickets: 37,
    _blocks_of_a_cancelled_pull_come_back_too_early: 35,
    _errors_of_pulls_are_ignored: 26,
    _the_store_mixes_up_blocks: 19,
    _a_cold_prefix_counts_one_block_too_many: 19,
    _two_workers_wait_for_each_other: 16,
}


@pytest.fixture(autouse=True)
def _quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "disagg")


@pytest.mark.parametrize("plant", IN_TROUBLE, ids=lambda plant: plant.__name__.strip("_"))
def test_it_is_noticed_in_trouble(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    first = FIRST_SEEDS.get(plant, 0)
    with pytest.raises(FOUND_AS.get(plant, NOTICED)):
        for seed in range(first, first + 2000):
            assert_equivalent(play_in_trouble(Dice(seed), num_trips=range(6, 11)))


def test_what_an_oracle_found_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    _stamps_are_not_compared(monkeypatch)
    seed = play_many(num_steps=3_000).failures["wrong tokens"][0]
    alone = play_many(num_steps=1, first_seed=seed)
    assert alone.num_plays == 1
    assert not alone.met, "nothing of a play that failed counts"


@pytest.mark.parametrize("plant", IN_QUIET, ids=lambda plant: plant.__name__.strip("_"))
def test_it_is_noticed_in_quiet_times(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(NOTICED):
        for seed in range(1000):
            assert_thrifty(play_in_quiet(Dice(seed)))
