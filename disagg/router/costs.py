"""What a choice costs, in seconds of waiting over everyone it makes wait.

    prefill on a worker    what is queued there, then the request's own uncached tokens; and every
                           sequence that decodes there waits as long as the own tokens take
    transfer               latency and bytes that the decode worker does not hold yet
    decode on a worker     the own steps in the batch it joins; and every other sequence of the
                           batch waits for what one more makes each step longer

All of it follows from workers' fitted time models and measured transfers, so nothing needs a
weight that would have to be tuned again for another model or machine.
"""

from __future__ import annotations

import msgspec

from disagg.router.fleet import WorkerView
from disagg.time_model import CHUNK_TOKENS

# Most answers are shorter than their limit. A figure of this size ranks decode workers the same
# way as the true length would, unless nearly all answers are far shorter.
TYPICAL_OUTPUT_TOKENS = 128

# A decode worker is kept clear for streams: a prompt that it computes delays at least one, which
# may come meanwhile. So an idle fleet hands long prompts over, and computes short rests in place.
NUM_STREAMS_EXPECTED = 1

# Between two workers that have not met: pessimistic for a network, so that a first transfer is
# tried where prefill is long anyway.
UNMEASURED_LATENCY_S = 2e-3
UNMEASURED_S_PER_BYTE = 1e-9


class PrefillCost(msgspec.Struct, frozen=True):
    worker: WorkerView
    num_cached_tokens: int
    first_token_s: float  # from now
    harm_s: float  # to sequences that decode there

    @property
    def total_s(self) -> float:
        return self.first_token_s + self.harm_s


class DecodeCost(msgspec.Struct, frozen=True):
    worker: WorkerView
    num_held_tokens: int  # whose KV is there already
    total_s: float


def prefill_cost(worker: WorkerView, num_tokens: int, num_held_tokens: int) -> PrefillCost:
    """Computing a prompt's KV and its first token on `worker`."""
    times = worker.times
    num_cached = min(num_held_tokens, num_tokens - 1)
    num_new = num_tokens - num_cached
    own_s = times.prefill_s(num_new, num_cached)
    first_token_s = own_s
    num_queued = worker.num_uncomputed_tokens
    if num_queued:
        first_token_s += times.prefill_s(num_queued, 0, worker.num_waiting)
    per_step_s = times.coefficients[0]
    if worker.num_decoding:
        decode_s = times.decode_step_s(worker.num_decoding, worker.num_context_tokens) - per_step_s
        first_token_s += decode_s * max(1.0, (num_queued + num_new) / CHUNK_TOKENS)
    num_delayed = worker.num_decoding
    if worker.record.role == "decode":
        num_delayed = max(num_delayed, NUM_STREAMS_EXPECTED)
    harm_s = num_delayed * (own_s - max(1.0, num_new / CHUNK_TOKENS) * per_step_s)
    return PrefillCost(worker, num_cached, first_token_s, harm_s)


def decode_cost(
    worker: WorkerView, num_tokens: int, num_held_tokens: int, num_output_tokens: int
) -> DecodeCost:
    """Generating `num_output_tokens` after `num_tokens` on `worker`."""
    _, _, _, per_sequence_s, per_context_s = worker.times.coefficients
    num_final = num_tokens + num_output_tokens
    added_s = per_sequence_s + per_context_s * (num_tokens + 0.5 * num_output_tokens)
    step_s = added_s + worker.times.decode_step_s(
        max(1, worker.num_decoding), worker.num_context_tokens
    )
    total_s = num_output_tokens * (step_s + added_s * worker.num_decoding)
    num_room = worker.num_free_blocks * worker.record.block_size
    if num_final > num_room + num_held_tokens and worker.num_decoding:
        total_s += TYPICAL_OUTPUT_TOKENS * step_s  # until somebody there ends
    return DecodeCost(worker, num_held_tokens, total_s)


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
