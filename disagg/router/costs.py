"""What a choice costs, in seconds of waiting over everyone it makes wait.

    prefill on a worker    the rest of the step under way and what is queued there, then the
                           request's own uncached tokens, step by step; these make
                           every sequence that decodes there wait, and those who come behind; and
                           a prefix that another worker holds takes room from others' prefixes
    a loan                 the rest of the lender's step under way, and the transfer of what it has
    transfer               latency and bytes that the decode worker does not hold yet
    decode on a worker     until others end, where the batch or the cache is full; the own steps in
                           the batch it joins; and every other sequence of the batch waits for what
                           one more makes each step longer

All of it follows from workers' fitted time models and measured transfers. The two weights are
numbers of requests, so nothing has to be tuned again for another model or machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from disagg.messages import HostCounts
from disagg.router.fleet import WorkerView
from disagg.router.output_length import USUAL_OUTPUT_TOKENS
from disagg.time_model import CHUNK_TOKENS

# A decode worker is kept clear for streams: a prompt that it computes delays at least one, which
# may come meanwhile. So an idle fleet hands long prompts over, and computes short rests in place.
NUM_STREAMS_EXPECTED = 1

# Who makes a queue longer delays those who come behind, until it has drained: as many as wait now
# come while these are served, and as many again behind them.
NUM_BEHIND_PER_QUEUED = 2.0

# A prefix held twice is room for one prefix less, which will be computed again, and displace one
# itself. What several workers hold is in demand everywhere, and one copy more is none too many.
# Measured on the Mooncake trace (docs/notebook/routing.md, "Simulator").
NUM_COMPUTED_AGAIN = 7.0

# To a decode worker that has pulled from nobody. Optimistic: too high a price would never be found
# out, because nothing would be moved.
UNMEASURED_LATENCY_S = 2e-3
UNMEASURED_S_PER_BYTE = 1e-10


class PrefillCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_cached_tokens: int
    own_s: float  # to the first token, if nothing were queued
    queue_s: float  # until what is queued has been computed; 0 where nothing is
    harm_s: float  # to others: who decode there, come behind, or lose their prefix
    total_s: float  # all of it
    lender: str | None = None  # who holds the cached tokens, if they are to be pulled before

    @property
    def first_token_s(self) -> float:
        return self.own_s + self.queue_s


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_held_tokens: int  # whose KV is there already
    place_s: float  # until there is a place in the batch, and room for the KV
    decode_s: float  # of the own steps, and what they make others wait


def prefill_cost(
    worker: WorkerView,
    num_tokens: int,
    num_held_tokens: int,
    num_behind: float = 0.0,
    num_held_once: tuple[int, int] = (0, 0),
    spares_decodes: bool = True,
    num_in_host: int = 0,
    now: float = 0.0,
) -> PrefillCost:
    """Computing a prompt's KV and its first token on `worker`.

    Args:
        num_behind: requests that will wait for this one; see `requests_behind`.
        num_held_once: after how many tokens the part of the prompt begins, and ends, whose KV one
            worker of the pool has and no other.
        spares_decodes: False where everybody prefills: then each prompt delays somebody's streams,
            and sending it where they are few only makes queues uneven.
        num_in_host: leading tokens whose KV is in the host memory behind the worker's cache.
        now: on the fleet's clock; a step under way that began then, or later, counts as a whole.
    """
    times = worker.times
    num_cached = num_held_tokens if num_held_tokens < num_tokens else num_tokens - 1
    load_s = 0.0
    if num_in_host > num_cached and worker.host is not None:
        num_cached, load_s = _with_host(worker, worker.host, num_tokens, num_cached, num_in_host)
    num_new = num_tokens - num_cached
    work_s = times.prompts_s(num_new, num_cached)
    num_steps = num_new / CHUNK_TOKENS if num_new > CHUNK_TOKENS else 1.0
    alone_s = work_s + num_steps * times.coefficients[0]
    backlog = worker.backlog
    num_own = -(-num_new // backlog.num_at_once)
    own_s = load_s + work_s + num_own * backlog.step_s
    wait_s = _rest_s(worker, now) + backlog.later_s
    if backlog.num_later:
        num_more = -(-(backlog.num_later + num_new) // backlog.num_at_once) - num_own
        wait_s += num_more * backlog.step_s
    queue_s = harm_s = 0.0
    if worker.num_uncomputed_tokens:
        queue_s = wait_s
    else:
        own_s += wait_s
    num_delayed = worker.num_decoding
    if not num_delayed and worker.record.role == "decode":
        num_delayed = NUM_STREAMS_EXPECTED
    if num_delayed and spares_decodes:
        harm_s = num_delayed * work_s
    harm_s += num_behind * alone_s
    num_shared, num_held_anywhere = num_held_once
    if num_held_anywhere > num_cached and num_held_anywhere > num_shared:
        num_before = num_shared if num_shared > num_cached else num_cached
        harm_s += NUM_COMPUTED_AGAIN * alone_s * ((num_held_anywhere - num_before) / num_new)
    return PrefillCost(worker, num_cached, own_s, queue_s, harm_s, own_s + queue_s + harm_s)


def with_loan(
    cost: PrefillCost,
    lender: WorkerView,
    num_tokens: int,
    num_lent_tokens: int,
    num_behind: float = 0.0,
    spares_decodes: bool = True,
    now: float = 0.0,
) -> PrefillCost:
    """The same after pulling the KV of the first tokens from the cache of `lender`.

    Arguments are those of `cost`. Who waits in the queue pulls meanwhile. No prefix loses its room
    for long, as the lender gives up first what it has lent.
    """
    worker = cost.worker
    rest = prefill_cost(
        worker, num_tokens, num_lent_tokens, num_behind, spares_decodes=spares_decodes, now=now
    )
    num_pulled = num_lent_tokens - cost.num_cached_tokens
    pull_s = _rest_s(lender, now) + transfer_s(lender, worker, num_pulled)
    own_s = rest.own_s + max(0.0, pull_s - rest.queue_s)
    total_s = own_s + rest.queue_s + rest.harm_s
    return PrefillCost(
        worker,
        rest.num_cached_tokens,
        own_s,
        rest.queue_s,
        rest.harm_s,
        total_s,
        lender.worker_id,
    )


def _rest_s(worker: WorkerView, now: float) -> float:
    """What is left of the step under way."""
    rest_s = worker.backlog.under_way_s
    if now > worker.began_s:
        rest_s -= now - worker.began_s
    return rest_s if rest_s > 0.0 else 0.0


def _with_host(
    worker: WorkerView, host: HostCounts, num_tokens: int, num_cached: int, num_in_host: int
) -> tuple[int, float]:
    """How many tokens will not be computed, and the seconds to load them: as the worker decides."""
    num_reached = min(num_in_host, num_tokens - 1)
    num_loaded = num_reached - num_cached
    load_s = host.latency_s + host.block_s * -(-num_loaded // worker.record.block_size)
    if load_s < worker.times.prefill_s(num_loaded, num_cached):
        return num_reached, load_s
    return num_cached, 0.0


def requests_behind(pool: Sequence[WorkerView], num_held: float = 0.0) -> float:
    """How many requests one more will delay in its pool, for as long as it is computed itself.

    Args:
        num_held: requests for each worker that wait in the ingress.
    """
    num_queued = sum(each.backlog.num_prompts for each in pool)
    return NUM_BEHIND_PER_QUEUED * (num_queued / len(pool) + num_held)


def decode_cost(
    worker: WorkerView,
    num_tokens: int,
    num_held_tokens: int,
    num_output_tokens: int,
    usual_output_tokens: float = USUAL_OUTPUT_TOKENS,
) -> DecodeCost:
    """Generating `num_output_tokens` after `num_tokens` on `worker`.

    Args:
        usual_output_tokens: how long the answers of those who are there already get.
    """
    num_decoding, num_context = worker.num_decoding, worker.num_context_tokens
    per_step_s, _, _, per_sequence_s, per_context_s = worker.times.coefficients
    added_s = per_sequence_s + per_context_s * (num_tokens + 0.5 * num_output_tokens)
    batch_s = per_step_s + per_sequence_s * (num_decoding or 1) + per_context_s * num_context
    decode_s = num_output_tokens * (added_s + batch_s + added_s * num_decoding)
    place_s = 0.0
    if num_decoding:
        num_ends = _ends_before_place(worker, num_tokens - num_held_tokens, usual_output_tokens)
        if num_ends > 0.0:
            place_s = num_ends * usual_output_tokens * batch_s / num_decoding
    return DecodeCost(worker, num_held_tokens, place_s, decode_s)


def _ends_before_place(
    worker: WorkerView, num_missing_tokens: int, usual_output_tokens: float
) -> float:
    """How many sequences must end on `worker` before one more has a place and room for its KV.

    Those who wait there already come first, and need as much room as a usual prompt. While one
    sequence ends the others grow by as much as one answer together, so an end leaves the room of a
    prompt: what a sequence holds on average, less half an answer.
    """
    num_decoding, num_waiting = worker.num_decoding, worker.num_waiting
    block_size = worker.record.block_size
    num_freed = worker.num_context_tokens / num_decoding - 0.5 * usual_output_tokens
    if num_freed < block_size:
        num_freed = block_size
    num_room = (worker.num_free_blocks - num_decoding) * block_size  # as `Scheduler` keeps it
    num_ends = (num_missing_tokens + num_waiting * num_freed - num_room) / num_freed
    num_places = worker.record.max_num_seqs
    if num_places:
        num_late = num_decoding + num_waiting + 1 - num_places
        if num_late > num_ends:
            num_ends = num_late
    return num_ends


def transfer_s(source: WorkerView, destination: WorkerView, num_tokens: int) -> float:
    """Moving the KV of `num_tokens` tokens; infinite where the two cannot read each other's."""
    if source.record.peer.layout != destination.record.peer.layout:
        return float("inf")
    num_blocks = -(-num_tokens // source.record.block_size)
    nbytes = num_blocks * source.record.peer.block_nbytes
    figures = destination.transfers
    for figure in figures:
        if figure.source_id == source.worker_id:
            return figure.latency_s + nbytes / figure.bytes_per_s
    if figures:  # it is the destination's network that is known
        each_s = (figure.latency_s + nbytes / figure.bytes_per_s for figure in figures)
        return sum(each_s) / len(figures)
    return UNMEASURED_LATENCY_S + nbytes * UNMEASURED_S_PER_BYTE
