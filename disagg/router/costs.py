"""The cost of each routing choice, in seconds: the request's own time plus the delay of others.

    prefill on a worker    the rest of the running step, the queue, and the request's uncached
                           tokens (own_s, queue_s); what streams that begin meanwhile add to its
                           steps (beside_s); plus the delay of sequences that decode there and of
                           requests behind it, and the cache space taken by another copy of a
                           prefix (harm_s)
    a prefix pull          the rest of the other worker's running step, and the transfer
    transfer               latency, and the bytes that the decode worker does not have yet
    decode on a worker     the wait for a place in the batch and for KV blocks; the steps of its
                           own answer; and the extra time of every step for the other sequences

All of it follows from the workers' fitted time models and measured transfers. The two weights below
count requests, so they need no tuning for another model or machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from disagg.messages import HostCounts
from disagg.router.output_length import USUAL_OUTPUT_TOKENS
from disagg.router.worker_view import RunningStreams, WorkerView, prompt_rate
from disagg.time_model import CHUNK_TOKENS, TPOT_SHARE

# A prompt on a decode worker is charged for delaying at least one stream, even if none runs there:
# one may arrive meanwhile. So an idle fleet still prefills long prompts on prefill workers, and
# only short uncached suffixes on decode workers. With a TPOT SLO this is not charged: a worker fits
# prompts into the slack of its streams, and misses of SLOs are charged as such. Preferring roles
# there made one split of the same workers better than another, and most of them worse
# (docs/notebook/routing.md, "Roles and slack").
NUM_STREAMS_EXPECTED = 1

# A prompt also delays the requests that arrive while the queue drains: as many as wait now arrive
# while those are served, and as many again behind them.
NUM_BEHIND_PER_QUEUED = 2.0

# A second copy of a prefix evicts another prefix, which is then computed again and evicts one in
# turn. Copies of a prefix that several workers hold already are free: it is in demand everywhere.
# Measured on the Mooncake trace (docs/notebook/routing.md, "Simulator").
NUM_COMPUTED_AGAIN = 7.0

# Another ingress may send a prompt at the same moment to a worker where this ingress is not the
# home: of how many prompts that is expected. It decides between workers that cost about the same.
# A worker that is chosen for what it has cached is not one of many: there it counts in proportion
# to what is not cached.
SHARE_MEETING_OTHERS = 0.1


class PrefillCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_cached_tokens: int
    own_s: float  # to the first token, without a queue
    queue_s: float  # until the queued prompts are computed
    beside_s: float  # what streams that begin before it is done add to its steps
    harm_s: float  # delay of others: decoding sequences, requests behind it, evicted prefixes
    total_s: float  # the sum
    prefix_source: str | None = None  # the worker to pull the cached tokens from first

    @property
    def first_token_s(self) -> float:
        return self.own_s + self.queue_s + self.beside_s


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_held_tokens: int  # tokens whose KV is cached there
    place_s: float  # until there is a place in the batch and blocks for the KV
    decode_s: float  # the steps of its own answer, and the delay of the batch's other sequences
    added: AddedStream | None = None  # on workers whose requests have a TPOT SLO


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
    """The cost of computing a prompt's KV and its first token on `worker`.

    Args:
        num_held_tokens: leading tokens of the prompt that the worker has cached.
        num_behind: requests that will wait behind this one; see `requests_behind`.
        num_held_once: (begin, end), in tokens, of the part of the prompt that exactly one worker of
            the pool has cached.
        spares_decodes: False in a pool where all workers prefill and decode: every prompt delays
            some stream there, and avoiding the busiest decoders would only make queues uneven.
        num_in_host: leading tokens in the host tier behind the worker's cache.
        now: on the fleet's clock, for the rest of the running step.
    """
    num_cached = num_held_tokens if num_held_tokens < num_tokens else num_tokens - 1
    load_s = 0.0
    if num_in_host > num_cached and worker.host is not None:
        num_cached, load_s = _with_host(worker, worker.host, num_tokens, num_cached, num_in_host)
    num_new = num_tokens - num_cached
    times = worker.times
    # As `StepTimeModel.prompts_s`; a decision computes it for dozens of workers.
    work_s = num_new * (
        times.per_token_s + times.per_attended_s * (num_cached + 0.5 * (num_new + 1))
    )
    num_steps = num_new / CHUNK_TOKENS if num_new > CHUNK_TOKENS else 1.0
    alone_s = work_s + num_steps * (times.per_step_s + times.per_prompt_step_s)
    backlog = worker.backlog
    num_at_once, step_s = backlog.num_at_once, backlog.step_s
    num_own = -(-num_new // num_at_once)
    steps_s = num_own * step_s
    own_s = load_s + work_s + steps_s
    beside_s = 0.0
    if worker.streams is not None:
        beside_s = _beside_later_s(worker.streams, num_new, work_s, steps_s)
    wait_s = _rest_s(worker, now) + backlog.later_s
    if backlog.num_later:
        wait_s += (-(-(backlog.num_later + num_new) // num_at_once) - num_own) * step_s
    queue_s = harm_s = 0.0
    if worker.num_uncomputed_tokens:
        queue_s = wait_s
    else:
        own_s += wait_s
    if worker.tpot_slo_s != math.inf:
        alone_s = work_s + steps_s + beside_s
    elif spares_decodes:
        num_delayed = worker.num_decoding
        if not num_delayed and worker.record.role == "decode":
            num_delayed = NUM_STREAMS_EXPECTED
        harm_s = num_delayed * (work_s + num_own * times.per_prompt_step_s)
    harm_s += num_behind * alone_s
    if not worker.is_home:
        harm_s += SHARE_MEETING_OTHERS * alone_s * (num_new / num_tokens)
    num_shared, num_held_anywhere = num_held_once
    if num_held_anywhere > num_cached and num_held_anywhere > num_shared:
        num_before = num_shared if num_shared > num_cached else num_cached
        harm_s += NUM_COMPUTED_AGAIN * alone_s * ((num_held_anywhere - num_before) / num_new)
    total_s = own_s + queue_s + beside_s + harm_s
    return PrefillCost(worker, num_cached, own_s, queue_s, beside_s, harm_s, total_s)


def _beside_later_s(streams: RunningStreams, num_new: int, work_s: float, steps_s: float) -> float:
    """By how much the streams that are to come lengthen a prompt's steps.

    Prompts that are queued here, or computed elsewhere for this worker, decode here before a long
    prompt is done, and its steps are then as short as their TPOT SLO demands. Others add this, so
    admission counts it as waiting.

    Args:
        steps_s: what these steps take beside the streams that run now.
    """
    if not streams.num or streams.room_s <= 0.0:
        return 0.0
    return max(0.0, streams.beside_s(num_new, work_s) - steps_s)


def with_prefix_pull(
    cost: PrefillCost,
    prefix_source: WorkerView,
    num_tokens: int,
    num_source_tokens: int,
    num_behind: float = 0.0,
    spares_decodes: bool = True,
    now: float = 0.0,
) -> PrefillCost:
    """`cost` changed for the case that its worker first pulls a cached prefix from another worker.

    The pull overlaps with the wait in the queue. The second copy takes cache space for a short time
    only, because `prefix_source` then evicts its copy first.

    Args:
        cost: of the same worker without a prefix pull.
        num_source_tokens: leading tokens that `prefix_source` has cached.

    The other arguments are those of `prefill_cost`.
    """
    worker = cost.worker
    rest = prefill_cost(
        worker, num_tokens, num_source_tokens, num_behind, spares_decodes=spares_decodes, now=now
    )
    num_pulled = num_source_tokens - cost.num_cached_tokens
    pull_s = _rest_s(prefix_source, now) + transfer_s(prefix_source, worker, num_pulled)
    own_s = rest.own_s + max(0.0, pull_s - rest.queue_s)
    total_s = own_s + rest.queue_s + rest.beside_s + rest.harm_s
    return PrefillCost(
        worker,
        rest.num_cached_tokens,
        own_s,
        rest.queue_s,
        rest.beside_s,
        rest.harm_s,
        total_s,
        prefix_source.worker_id,
    )


def _rest_s(worker: WorkerView, now: float) -> float:
    """Predicted rest of the running step, in seconds."""
    rest_s = worker.backlog.under_way_s
    if now > worker.began_s:
        rest_s -= now - worker.began_s
    return rest_s if rest_s > 0.0 else 0.0


def _with_host(
    worker: WorkerView, host: HostCounts, num_tokens: int, num_cached: int, num_in_host: int
) -> tuple[int, float]:
    """Cached tokens with the host tier, and seconds to load them; decided as the worker does."""
    num_reached = min(num_in_host, num_tokens - 1)
    num_loaded = num_reached - num_cached
    load_s = host.latency_s + host.block_s * -(-num_loaded // worker.record.block_size)
    if load_s < worker.times.prefill_s(num_loaded, num_cached):
        return num_reached, load_s
    return num_cached, 0.0


def requests_behind(
    workers: Sequence[WorkerView], num_prompts: int, num_workers: int, num_held: float = 0.0
) -> list[float]:
    """How many later requests a new prompt delays in its pool by its own computing time.

    The number depends on the worker: a second of a slow GPU is a smaller share of the pool's work
    than a second of a fast GPU. So when many prompts wait, slow GPUs take their share, although
    each prompt takes longer there. If requests have no TPOT SLO, all GPUs count as equal.

    Args:
        num_prompts: that wait on the pool's workers or are computed.
        num_held: requests per worker that wait in the ingress.
    """
    num_behind = NUM_BEHIND_PER_QUEUED * (num_prompts / num_workers + num_held)
    rates = [worker.streams.full_prompt_rate for worker in workers if worker.streams is not None]
    if len(rates) < len(workers) or not rates:
        return [num_behind] * len(workers)
    per_rate = num_behind * len(rates) / sum(rates)
    return [per_rate * rate for rate in rates]


def decode_cost(
    worker: WorkerView,
    num_tokens: int,
    num_held_tokens: int,
    num_output_tokens: int,
    usual_output_tokens: float = USUAL_OUTPUT_TOKENS,
) -> DecodeCost:
    """The cost of generating `num_output_tokens` after `num_tokens` on `worker`.

    Args:
        usual_output_tokens: expected answer length of the sequences that run there.
    """
    num_decoding, num_context = worker.num_decoding, worker.num_context_tokens
    times = worker.times
    added_s = times.per_sequence_s
    added_s += times.per_context_s * (num_tokens + 0.5 * num_output_tokens)
    batch_s = times.decode_step_s(num_decoding or 1, num_context)
    added = None
    if worker.tpot_slo_s == math.inf:
        decode_s = num_output_tokens * (added_s + batch_s + added_s * num_decoding)
    else:
        added = added_stream(worker, num_tokens, num_output_tokens)
        # Seconds that the SLO leaves to a stream anyway are no gain.
        used = min(1.0, added.step_s / worker.tpot_slo_s)
        decode_s = num_output_tokens * used * added.step_s + added.lost_s
    place_s = 0.0
    if num_decoding:
        num_ends = _ends_before_place(worker, num_tokens - num_held_tokens, usual_output_tokens)
        if num_ends > 0.0:
            place_s = num_ends * usual_output_tokens * batch_s / num_decoding
            if worker.streams is not None:  # one worker more must decode
                decode_s += first_stream_s(worker, num_tokens, num_output_tokens)
    return DecodeCost(worker, num_held_tokens, place_s, decode_s, added)


def _ends_before_place(
    worker: WorkerView, num_missing_tokens: int, usual_output_tokens: float
) -> float:
    """How many sequences must end on `worker` before a new one has a place and blocks for its KV.

    Sequences that wait there come first; each is assumed to need what an end frees. While one
    sequence ends, the others together grow by one answer, so an end frees the blocks of a prompt:
    the mean context length minus half an answer.
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
    """Seconds to transfer the KV of `num_tokens` tokens; infinite if the layouts differ."""
    if source.record.peer.layout != destination.record.peer.layout:
        return float("inf")
    num_blocks = -(-num_tokens // source.record.block_size)
    nbytes = num_blocks * destination.record.peer.block_nbytes  # of one rank: they pull at once
    return destination.pulls.seconds(source.worker_id, nbytes)


class AddedStream(NamedTuple):
    """What one more stream, which will generate `num_tokens`, costs a worker with a TPOT SLO.

    A worker fills each step with prompt tokens up to the SLO of its streams
    (`engine/sched/step_budget.py`). While steps stay within the SLO, one more stream does not delay
    the others; it leaves room for fewer prompt tokens. The first stream of a worker displaces most,
    since steps without streams may have any length. So with a tight SLO it is best to gather
    streams on few workers; with a loose one they cost little anywhere. Once decode steps alone
    exceed the SLO, each additional stream makes all of them miss it.

    per_step_s: a step with nothing in it.
    before_s, step_s: a step without prompt tokens, before it and with it.
    lost_s: how long the worker, without the stream, would compute the prompts that the stream
        displaces.
    is_tight: the SLO leaves less room in a step than a full chunk of prompt tokens takes.
    """

    num_tokens: int
    num_streams: int  # before it
    tpot_slo_s: float
    per_step_s: float
    before_s: float
    step_s: float
    lost_s: float
    is_tight: bool

    @property
    def num_others_missed(self) -> float:
        """How many running streams miss their TPOT SLO because of the new stream.

        If they miss it anyway, one more stream must end before the worker meets the SLO again.
        Until then it serves fewer streams in time, by the share of its streams that could meet the
        SLO. That share is zero on a GPU that is too slow for any stream, so streams that cannot
        meet their SLO go there first.
        """
        slo_s = TPOT_SHARE * self.tpot_slo_s
        if self.step_s <= slo_s:
            return 0.0
        if self.before_s <= slo_s:
            return self.num_streams
        room_s = slo_s - self.per_step_s
        return room_s / (self.before_s - self.per_step_s) if room_s > 0.0 else 0.0

    def is_missed(self, gap_s: float) -> bool:
        """Whether the new stream misses its own TPOT SLO.

        Args:
            gap_s: between its first token and its first step on this worker.
        """
        return self.step_s + gap_s / self.num_tokens > TPOT_SHARE * self.tpot_slo_s


def added_stream(worker: WorkerView, num_tokens: int, num_output_tokens: int) -> AddedStream:
    """A stream of `num_output_tokens` after `num_tokens` on `worker`, which has a TPOT SLO."""
    times, tpot_slo_s, before = worker.times, worker.tpot_slo_s, worker.streams
    assert before is not None
    num_context_then = worker.num_context_tokens + num_tokens + 0.5 * num_output_tokens
    step_s = times.decode_step_s(before.num + 1, num_context_then)
    rate_then, mixed_s = prompt_rate(times, tpot_slo_s, before.num + 1, step_s)
    lost_s = 0.0
    if rate_then < before.prompt_rate:
        lost_rate = before.prompt_rate - rate_then
        lost_s = num_output_tokens * mixed_s * lost_rate / before.full_prompt_rate
        num_queued = worker.num_uncomputed_tokens  # queued prompts wait longer
        slower_s = num_queued * (1.0 / rate_then - 1.0 / before.prompt_rate)
        lost_s += worker.backlog.num_prompts * slower_s
    full_s = step_s + times.per_prompt_step_s + CHUNK_TOKENS * times.per_token_s
    is_tight = full_s > TPOT_SHARE * tpot_slo_s
    return AddedStream(
        num_output_tokens,
        before.num,
        tpot_slo_s,
        times.per_step_s,
        before.step_s,
        step_s,
        lost_s,
        is_tight,
    )


def first_stream_s(worker: WorkerView, num_tokens: int, num_output_tokens: int) -> float:
    """As `lost_s`, if the stream were the first one on a worker like this."""
    times, tpot_slo_s, streams = worker.times, worker.tpot_slo_s, worker.streams
    assert streams is not None
    step_s = times.decode_step_s(1, num_tokens + 0.5 * num_output_tokens)
    rate, mixed_s = prompt_rate(times, tpot_slo_s, 1, step_s)
    full_rate = streams.full_prompt_rate
    return num_output_tokens * mixed_s * max(0.0, full_rate - rate) / full_rate
