"""What a choice costs, in seconds of waiting over everyone it makes wait.

    prefill on a worker    what is queued there, then the request's own uncached tokens; and every
                           sequence that decodes there waits as long as the own tokens take
    transfer               latency and bytes that the decode worker does not hold yet
    decode on a worker     until others end, where the batch or the cache is full; the own steps in
                           the batch it joins; and every other sequence of the batch waits for what
                           one more makes each step longer

All of it follows from workers' fitted time models and measured transfers, so nothing needs a
weight that would have to be tuned again for another model or machine.
"""

from __future__ import annotations

import msgspec

from disagg.router.fleet import USUAL_OUTPUT_TOKENS, WorkerView
from disagg.time_model import CHUNK_TOKENS

# A decode worker is kept clear for streams: a prompt that it computes delays at least one, which
# may come meanwhile. So an idle fleet hands long prompts over, and computes short rests in place.
NUM_STREAMS_EXPECTED = 1

# Between two workers that have not met: pessimistic for a network, so that a first transfer is
# tried where prefill is long anyway.
UNMEASURED_LATENCY_S = 2e-3
UNMEASURED_S_PER_BYTE = 1e-9


class PrefillCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_cached_tokens: int
    own_s: float  # to the first token, if nothing were queued
    queue_s: float  # until what is queued has been computed
    harm_s: float  # to sequences that decode there
    total_s: float  # all of it

    @property
    def first_token_s(self) -> float:
        return self.own_s + self.queue_s


class DecodeCost(msgspec.Struct, frozen=True, gc=False):
    worker: WorkerView
    num_held_tokens: int  # whose KV is there already
    place_s: float  # until there is a place in the batch, and room for the KV
    decode_s: float  # of the own steps, and what they make others wait


def prefill_cost(worker: WorkerView, num_tokens: int, num_held_tokens: int) -> PrefillCost:
    """Computing a prompt's KV and its first token on `worker`."""
    times = worker.times
    num_cached = num_held_tokens if num_held_tokens < num_tokens else num_tokens - 1
    num_new = num_tokens - num_cached
    alone_s = own_s = times.prefill_s(num_new, num_cached)
    num_steps = num_new / CHUNK_TOKENS if num_new > CHUNK_TOKENS else 1.0
    queue_s = harm_s = 0.0
    num_queued = worker.num_uncomputed_tokens
    if num_queued:
        queue_s = times.prefill_s(num_queued, 0, worker.num_waiting)
    per_step_s = times.coefficients[0]
    num_delayed = worker.num_decoding
    if num_delayed:
        ride_s = times.decode_step_s(num_delayed, worker.num_context_tokens) - per_step_s
        own_s += ride_s * num_steps
        queue_s += ride_s * num_queued / CHUNK_TOKENS
    elif worker.record.role == "decode":
        num_delayed = NUM_STREAMS_EXPECTED
    if num_delayed:
        harm_s = num_delayed * (alone_s - num_steps * per_step_s)
    return PrefillCost(worker, num_cached, own_s, queue_s, harm_s, own_s + queue_s + harm_s)


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
        num_missing = num_tokens + num_output_tokens - num_held_tokens
        num_ends = _ends_before_place(worker, num_missing)
        if num_ends > 0.0:
            place_s = num_ends * usual_output_tokens * batch_s / num_decoding
    return DecodeCost(worker, num_held_tokens, place_s, decode_s)


def _ends_before_place(worker: WorkerView, num_missing_tokens: int) -> float:
    """How many sequences must end on `worker` before one more has a place and room for its KV.

    Those who wait there already come first, and need as much room as those who decode.
    """
    num_decoding, num_waiting = worker.num_decoding, worker.num_waiting
    num_usual = max(1.0, worker.num_context_tokens / num_decoding)
    num_room = worker.num_free_blocks * worker.record.block_size
    num_ends = (num_missing_tokens + num_waiting * num_usual - num_room) / num_usual
    num_places = worker.record.max_num_seqs
    if num_places:
        num_ends = max(num_ends, num_decoding + num_waiting + 1 - num_places)
    return num_ends


def transfer_s(source: WorkerView, destination: WorkerView, num_tokens: int) -> float:
    """Moving the KV of `num_tokens` tokens; infinite where the two cannot read each other's."""
    if source.record.peer.layout != destination.record.peer.layout:
        return float("inf")
    num_blocks = -(-num_tokens // source.record.block_size)
    nbytes = num_blocks * source.record.peer.block_nbytes
    for figure in destination.transfers:
        if figure.source_id == source.worker_id:
            return figure.latency_s + nbytes / figure.bytes_per_s
    return UNMEASURED_LATENCY_S + nbytes * UNMEASURED_S_PER_BYTE
