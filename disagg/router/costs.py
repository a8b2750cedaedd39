"""The cost of a route, in seconds: five terms, and a price for each SLO that would be missed.

    own       computing the prompt: its uncached tokens, in whole steps; before that, loading its
              LoRA adapter
    queue     waiting: for the rest of the running step and the prompts before it, for what streams
              that begin meanwhile add to its steps, and for a place in the decode batch
    transfer  moving its KV to the worker that decodes; 0 if the same worker does both
    decode    the steps of its own answer
    delay     what others lose: sequences that decode there, requests behind it, and prefixes that
              are evicted for its copy

The cost of a route is their sum; waits that overlap count once. All terms follow from the workers'
fitted time models and measured transfers. A missed SLO costs the seconds that the request is
allowed. The weights below count requests and streams, so they need no tuning for another model or
machine.

`prefill_cost` and `decode_cost` are the terms of one worker. A decision computes them for dozens of
workers, and then `local_route` and `remote_route` for the best pairs (`router/policy.py`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from disagg.messages import HostCounts
from disagg.router.output_length import USUAL_OUTPUT_TOKENS
from disagg.router.route import Candidate
from disagg.router.worker_pools import Side
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
# home: the expected number of such prompts. It decides between workers that cost about the same. A
# worker that is chosen for what it has cached is not one of many: there it counts in proportion to
# what is not cached.
SHARE_MEETING_OTHERS = 0.1

# Steps from the pull to the first decode step: the rest of a running step, and one during the pull.
NUM_STEPS_JOINING = 1.5


class Prompt(NamedTuple):
    """What costs depend on beside the workers.

    num_output_tokens: expected.
    usual_output_tokens: expected answer length of the sequences that run on the workers.
    now: on the fleet's clock, for the rest of a running step.
    prefix_source: the worker with the longest cached prefix; None: none has cached any.
    num_at_source: leading tokens that it has cached.
    ttft_slo_s: latest first token, in seconds; inf: no TTFT SLO.
    has_tpot_slo: whether the request has one of its own or its model's.
    adapter: the digest of its LoRA adapter; "": none.
    miss_s: the price of a missed SLO: the seconds that a request is allowed, with the model's TPOT
        SLO where it has none itself; 0 if the model has none: then only workers refuse.
    """

    num_tokens: int
    num_output_tokens: int = 1
    usual_output_tokens: float = USUAL_OUTPUT_TOKENS
    now: float = 0.0
    prefix_source: WorkerView | None = None
    num_at_source: int = 0
    ttft_slo_s: float = math.inf
    has_tpot_slo: bool = False
    miss_s: float = 0.0
    adapter: str = ""


class PrefillCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_cached_tokens: int
    own_s: float  # to the first token, without a queue
    queue_s: float  # until the queued prompts are computed
    beside_s: float  # what streams that begin before it is done add to its steps
    delay_s: float  # of others: decoding sequences, requests behind it, evicted prefixes
    total_s: float  # the sum
    prefix_source: str | None = None  # the worker to pull the cached tokens from first

    @property
    def first_token_s(self) -> float:
        return self.own_s + self.queue_s + self.beside_s


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    """The last three fields say which TPOT SLOs the stream would miss, if its model has one.

    num_missed: running streams that would miss theirs because of it.
    most_gap_s: the longest gap between its first token and its first step here with which it
        meets its own; less than 0: it misses it in any case.
    is_tight: the SLO leaves less room in a step than a full chunk of prompt tokens takes.
    """

    worker: WorkerView
    num_held_tokens: int  # tokens whose KV is cached there
    place_s: float  # until there is a place in the batch and blocks for the KV
    decode_s: float  # the steps of its own answer
    delay_s: float  # of others: sequences of the batch, prompts that have less room in its steps
    num_missed: float = 0.0
    most_gap_s: float = math.inf
    is_tight: bool = False


class PoolPressure(NamedTuple):
    """What a prompt delays in its pool, whichever worker computes it.

    num_behind: later requests that wait for it, in seconds of the pool's mean worker: a second of a
        slow GPU is a smaller share of the pool's work than a second of a fast GPU. So when many
        prompts wait, slow GPUs take their share, although each prompt takes longer there.
    mean_rate: prompt tokens that this worker computes a second; 0: all GPUs count as equal, because
        requests have no TPOT SLO.
    held_once: (begin, end), in tokens, of the part of the prompt that exactly one worker of the
        pool has cached.
    spares_decodes: False in a pool where all workers prefill and decode: every prompt delays some
        stream there, and avoiding the busiest decoders would only make queues uneven.
    """

    num_behind: float = 0.0
    mean_rate: float = 0.0
    held_once: tuple[int, int] = (0, 0)
    spares_decodes: bool = True

    @classmethod
    def of(cls, side: Side, num_queued: float, spares_decodes: bool = True) -> PoolPressure:
        """`num_queued`: requests per worker that wait in the ingress."""
        num_behind = NUM_BEHIND_PER_QUEUED * (side.num_prompts / side.num_workers + num_queued)
        rates = [each.streams.full_prompt_rate for each in side.workers if each.streams is not None]
        mean_rate = sum(rates) / len(rates) if rates else 0.0
        return cls(num_behind, mean_rate, side.held_once, spares_decodes)


IDLE = PoolPressure()


def prefill_cost(
    worker: WorkerView,
    prompt: Prompt,
    num_held_tokens: int,
    pool: PoolPressure = IDLE,
    num_in_host: int = 0,
) -> PrefillCost:
    """The cost of computing a prompt's KV and its first token on `worker`.

    Args:
        num_held_tokens: leading tokens of the prompt that the worker has cached.
        num_in_host: leading tokens in the host memory behind its cache.
    """
    num_tokens = prompt.num_tokens
    num_cached = num_held_tokens if num_held_tokens < num_tokens else num_tokens - 1
    load_s = 0.0
    if num_in_host > num_cached and worker.host is not None:
        num_cached, load_s = _with_host(worker, worker.host, num_tokens, num_cached, num_in_host)
    num_new = num_tokens - num_cached
    times, backlog = worker.times, worker.backlog
    # As `StepTimeModel.prompts_s`; a decision computes it for dozens of workers.
    work_s = num_new * (
        times.per_token_s + times.per_attended_s * (num_cached + 0.5 * (num_new + 1))
    )
    num_at_once, step_s = backlog.num_at_once, backlog.step_s
    num_steps = -(-num_new // num_at_once)
    steps_s = num_steps * step_s
    own_s = load_s + work_s + steps_s
    beside_s = 0.0
    if worker.streams is not None:
        beside_s = _beside_later_s(worker.streams, num_new, work_s, steps_s)

    # The last queued prompt shares a step with this one. The rest of the running step counts as
    # the prompt's own time if no prompt is before it: nothing is refused for that.
    queue_s = _rest_s(worker, prompt.now) + backlog.later_s
    if backlog.num_later:
        queue_s += (-(-(backlog.num_later + num_new) // num_at_once) - num_steps) * step_s
    if not worker.num_uncomputed_tokens:
        own_s, queue_s = own_s + queue_s, 0.0

    delay_s = 0.0
    if worker.tpot_slo_s != math.inf:
        alone_s = work_s + steps_s + beside_s
    else:
        num_chunks = num_new / CHUNK_TOKENS if num_new > CHUNK_TOKENS else 1.0
        alone_s = work_s + num_chunks * (times.per_step_s + times.per_prompt_step_s)
        if pool.spares_decodes:
            num_delayed = worker.num_decoding
            if not num_delayed and worker.record.role == "decode":
                num_delayed = NUM_STREAMS_EXPECTED
            delay_s = num_delayed * (work_s + num_steps * times.per_prompt_step_s)
    num_behind = pool.num_behind
    if worker.streams is not None and pool.mean_rate:
        num_behind *= worker.streams.full_prompt_rate / pool.mean_rate
    delay_s += num_behind * alone_s
    if not worker.is_home:
        delay_s += SHARE_MEETING_OTHERS * alone_s * (num_new / num_tokens)
    num_shared, num_held_anywhere = pool.held_once
    if num_held_anywhere == num_tokens:
        num_held_anywhere -= 1  # the last token is computed everywhere
    if num_held_anywhere > num_cached and num_held_anywhere > num_shared:
        num_before = num_shared if num_shared > num_cached else num_cached
        delay_s += NUM_COMPUTED_AGAIN * alone_s * ((num_held_anywhere - num_before) / num_new)
    total_s = own_s + queue_s + beside_s + delay_s
    return PrefillCost(worker, num_cached, own_s, queue_s, beside_s, delay_s, total_s)


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


def _rest_s(worker: WorkerView, now: float) -> float:
    """Predicted rest of the running step, in seconds."""
    rest_s = worker.backlog.under_way_s
    if now > worker.began_s:
        rest_s -= now - worker.began_s
    return rest_s if rest_s > 0.0 else 0.0


def with_prefix_pull(cost: PrefillCost, prompt: Prompt, pool: PoolPressure) -> PrefillCost:
    """`cost` changed for the case that its worker first pulls the cached prefix of `prompt`.

    The pull overlaps with the wait in the queue. The second copy takes cache space for a short time
    only, because the source then evicts its copy first.
    """
    worker, source, num_held = cost.worker, prompt.prefix_source, prompt.num_at_source
    assert source is not None
    rest = prefill_cost(worker, prompt, num_held, pool._replace(held_once=(0, 0)))
    num_pulled = num_held - cost.num_cached_tokens
    pull_s = _rest_s(source, prompt.now) + transfer_s(source, worker, num_pulled)
    late_s = max(0.0, pull_s - rest.queue_s)
    return msgspec.structs.replace(
        rest,
        own_s=rest.own_s + late_s,
        total_s=rest.total_s + late_s,
        prefix_source=source.worker_id,
    )


def decode_cost(
    worker: WorkerView,
    num_tokens: int,
    num_held_tokens: int,
    num_output_tokens: int,
    usual_output_tokens: float = USUAL_OUTPUT_TOKENS,
    first_token_s: float = 0.0,
) -> DecodeCost:
    """The cost of generating `num_output_tokens` after `num_tokens` on `worker`.

    A worker with a TPOT SLO fills each step with prompt tokens up to the SLO of its streams
    (`engine/sched/step_budget.py`). While steps stay within the SLO, one more stream does not delay
    the others; it leaves room for fewer prompt tokens. The first stream of a worker displaces most,
    since steps without streams may have any length. So with a tight SLO it is best to gather
    streams on few workers; with a loose one they cost little anywhere. Each stream pays an equal
    share of what all displace: a worker is without streams again only when the last one has ended.
    Once decode steps alone exceed the SLO, each additional stream makes all of them miss it. For
    that all streams on their way count, since they may begin together; for the rest those that are
    expected to decode beside this one. (What both are worth: docs/notebook/routing.md,
    "Completions at 10 ms".)

    Args:
        usual_output_tokens: expected answer length of the sequences that run there.
        first_token_s: until this one's first token, and those of the others on their way.
    """
    num_decoding, num_context = worker.num_decoding, worker.num_context_tokens
    times, tpot_slo_s, streams = worker.times, worker.tpot_slo_s, worker.streams
    batch_s = times.decode_step_s(num_decoding or 1, num_context)
    num_mean_context = num_tokens + 0.5 * num_output_tokens
    place_s = 0.0
    if num_decoding:
        num_ends = _ends_before_place(worker, num_tokens - num_held_tokens, usual_output_tokens)
        if num_ends > 0.0:
            place_s = num_ends * usual_output_tokens * batch_s / num_decoding
    if streams is None:
        added_s = times.per_sequence_s + times.per_context_s * num_mean_context
        decode_s = num_output_tokens * (added_s + batch_s)
        delay_s = num_output_tokens * added_s * num_decoding
        return DecodeCost(worker, num_held_tokens, place_s, decode_s, delay_s)

    slo_s = TPOT_SHARE * tpot_slo_s
    step_s = times.decode_step_s(streams.num + 1, num_context + num_mean_context)
    share = _share_then(streams, first_token_s, usual_output_tokens * batch_s)
    num_then, context_then = share * streams.num, share * num_context
    step_then_s = times.decode_step_s(num_then + 1.0, context_then + num_mean_context)
    # Seconds that the SLO leaves to a stream anyway are no gain.
    decode_s = num_output_tokens * min(1.0, step_then_s / tpot_slo_s) * step_then_s
    displaced_s, rate_then = _displaced_s(worker, num_then + 1.0, step_then_s, num_output_tokens)
    delay_s = displaced_s / (num_then + 1.0)
    if num_then >= 1.0:
        before_s = times.decode_step_s(num_then, context_then)
        rate, _ = prompt_rate(times, tpot_slo_s, num_then, before_s)
        if rate_then < rate:  # queued prompts wait longer
            slower_s = worker.num_uncomputed_tokens * (1.0 / rate_then - 1.0 / rate)
            delay_s += worker.backlog.num_prompts * slower_s
    if place_s > 0.0:  # one worker more must decode: this is its first stream
        first_s = times.decode_step_s(1, num_mean_context)
        delay_s += _displaced_s(worker, 1.0, first_s, num_output_tokens)[0]
    return DecodeCost(
        worker,
        num_held_tokens,
        place_s,
        decode_s,
        delay_s,
        _num_missed(streams, step_s, slo_s, times.per_step_s),
        num_output_tokens * (slo_s - step_s),
        step_s + times.per_prompt_step_s + CHUNK_TOKENS * times.per_token_s > slo_s,
    )


def _share_then(streams: RunningStreams, first_token_s: float, answer_s: float) -> float:
    """The share of a worker's streams that decode when this one begins, as expected.

    Answers end at random, one in `answer_s`; those on their way begin evenly until then, so some
    of them have ended as well (Little's law: as many decode as begin while one does).
    """
    if not streams.num:
        return 0.0
    num_answers = first_token_s / max(answer_s, 1e-6)
    left = math.exp(-num_answers)
    left_of_coming = (1.0 - left) / num_answers if num_answers > 1e-9 else 1.0
    num_coming = streams.num - streams.num_now
    return (streams.num_now * left + num_coming * left_of_coming) / streams.num


def _displaced_s(
    worker: WorkerView, num_streams: float, step_s: float, num_output_tokens: int
) -> tuple[float, float]:
    """How long a worker without streams would compute the prompts that these streams displace while
    an answer is generated; and the prompt tokens that the worker then computes a second.

    Args:
        step_s: a step of these streams without prompt tokens.
    """
    assert worker.streams is not None
    full_rate = worker.streams.full_prompt_rate
    rate, mixed_s = prompt_rate(worker.times, worker.tpot_slo_s, num_streams, step_s)
    return num_output_tokens * mixed_s * max(0.0, full_rate - rate) / full_rate, rate


def _num_missed(streams: RunningStreams, step_s: float, slo_s: float, per_step_s: float) -> float:
    """How many running streams miss their TPOT SLO because of a new one.

    If they miss it anyway, one more stream must end before the worker meets the SLO again. Until
    then it serves fewer streams in time, by the share of its streams that could meet the SLO. That
    share is zero on a GPU that is too slow for any stream, so streams that cannot meet their SLO go
    there first.

    Args:
        step_s: a step without prompt tokens, with the new stream.
        per_step_s: a step with nothing in it.
    """
    if step_s <= slo_s:
        return 0.0
    if streams.step_s <= slo_s:
        return streams.num
    room_s = slo_s - per_step_s
    return room_s / (streams.step_s - per_step_s) if room_s > 0.0 else 0.0


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
    nbytes = destination.record.kv_nbytes(num_tokens)  # of one rank: they pull at once
    return destination.pulls.seconds(source.worker_id, nbytes)


def load_s(worker: WorkerView, adapter: str) -> float:
    """Measured seconds until a worker has a LoRA adapter on its device; infinite if it never has.

    A worker that has loaded none yet counts as if it took no time, so that one is tried.
    """
    if not adapter:
        return 0.0
    if worker.adapters is None:
        return math.inf
    return 0.0 if adapter in worker.adapters.on_device else worker.adapters.load_s


def local_route(
    prompt: Prompt, source: PrefillCost, goal: DecodeCost, pull_s: float = 0.0
) -> Candidate:
    """One worker does both.

    Args:
        pull_s: until it has pulled the KV that another worker has computed for this request.
    """
    own_s = source.own_s + pull_s + load_s(goal.worker, prompt.adapter)
    wait_s = source.queue_s + source.beside_s + goal.place_s
    first_token_s = own_s + wait_s
    total_s = first_token_s + goal.decode_s + source.delay_s + goal.delay_s
    total_s += _missed_s(prompt, goal, first_token_s, 0.0)
    return Candidate(
        None,
        goal.worker.worker_id,
        own_s,
        wait_s,
        first_token_s,
        total_s,
        source.num_cached_tokens,
        source.prefix_source,
        source.beside_s,
    )


def remote_route(prompt: Prompt, source: PrefillCost, goal: DecodeCost) -> Candidate:
    """KV moves from `source` to `goal`. The wait for a place in the decode batch overlaps with
    prefill and transfer."""
    num_moved = prompt.num_tokens - goal.num_held_tokens
    move_s = transfer_s(source.worker, goal.worker, num_moved if num_moved > 0 else 0)
    own_s = source.own_s
    if prompt.adapter:
        own_s += load_s(source.worker, prompt.adapter)
        move_s += load_s(goal.worker, prompt.adapter)
    wait_s = source.queue_s + source.beside_s
    first_token_s = own_s + wait_s
    wait_s = max(wait_s, goal.place_s)
    arrival_s = max(first_token_s + move_s, goal.place_s)
    total_s = arrival_s + goal.decode_s + source.delay_s + goal.delay_s
    # It waits for a step to end before its KV is pulled, and for another before it is part of one.
    gap_s = move_s + NUM_STEPS_JOINING * goal.worker.backlog.under_way_s
    total_s += _missed_s(prompt, goal, first_token_s, gap_s)
    return Candidate(
        source.worker.worker_id,
        goal.worker.worker_id,
        own_s,
        wait_s,
        first_token_s,
        total_s,
        source.num_cached_tokens,
        source.prefix_source,
        wait_s - max(source.queue_s, goal.place_s),
    )


def _missed_s(prompt: Prompt, goal: DecodeCost, first_token_s: float, gap_s: float) -> float:
    """The price of the SLOs that would be missed; and the time that a gap after the first token
    takes from prompts where the SLO is tight, because steps make up for it."""
    num_missed = goal.num_missed + (first_token_s > prompt.ttft_slo_s)
    if not prompt.has_tpot_slo:
        return num_missed * prompt.miss_s
    num_missed += gap_s > goal.most_gap_s
    lost_s = gap_s if goal.is_tight else 0.0
    return lost_s + num_missed * prompt.miss_s
