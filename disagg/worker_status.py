"""A worker's status, sent with every step: routers predict seconds from it, and `/metrics` shows
its fields under the names declared beside them.

It is part of every frame, so it is small, and computing it needs no loop over requests.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec

from disagg.adapters import AdapterReport
from disagg.metric import counter, gauge

_store = partial(
    counter,
    "store_blocks",
    "KV blocks between a worker and the cold store (Redis), by outcome. hit: loaded instead of"
    " computed; miss: looked up and not found; stored: written; known: evicted, and already in the"
    " store; dropped: not written, because the store was unreachable or the queue full; failed: a"
    " write that failed; damaged: read with a wrong digest, deleted, and also counted as a miss",
)
_host = partial(
    counter,
    "host_tier_blocks",
    "KV blocks copied between a worker's KV cache and its host memory, by outcome. saved: copied"
    " to host memory; torn: reused by the cache during the copy, which is discarded; dropped: not"
    " copied, because all of host memory was being read; loaded: copied back",
)
_hold = partial(
    counter,
    "kv_holds_ended",
    "KV tickets that a worker issued to others, by how the hold on their blocks ended. released:"
    " the reader has its copy, or needs none; expired: no reader came in time; broken: the worker"
    " needed the memory, or had too many holds; unknown: a release of a ticket that was not held"
    " any more. After expired and broken the reader computes the prompt itself",
)
_drafts = "Tokens of drafts (speculative decoding) that a worker"


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """A worker's fitted `time_model.StepTimeModel`: seconds per unit of each feature."""

    coefficients: tuple[float, ...]
    num_observed: int
    median_error: Annotated[
        float,
        gauge(
            "step_time_error_ratio",
            "Median error of a worker's recent predictions of its step times, as a share of the"
            " measured time. Routing and admission rest on these predictions",
        ),
    ]  # of recent predictions, as a fraction
    num_prompts: int = 0  # observed steps with prompt tokens


class TransferFigure(msgspec.Struct, frozen=True, array_like=True):
    """A decode worker's measured pulls from one source."""

    source_id: str
    latency_s: float
    bytes_per_s: float
    lane: str = ""  # lane of the last pull ("cuda_ipc", "rc_mlx5", ...); "" if unknown


class PullCounts(msgspec.Struct, frozen=True, array_like=True):
    """Pulls of KV that one lane carried, since the worker started; `lane` as in `TransferFigure`.

    One that failed has no lane.
    """

    lane: str = ""
    num_ok: int = 0
    num_torn: int = 0  # the source used the blocks again meanwhile
    num_failed: int = 0  # also those that could not begin
    num_given_up: int = 0  # ended, successfully or not, when no sequence waited any more
    nbytes: int = 0  # of those that are ok
    seconds: float = 0.0  # that these took


class HoldCounts(msgspec.Struct, frozen=True, array_like=True):
    """How the holds of tickets ended, counted since the worker started."""

    num_released: Annotated[int, _hold(outcome="released")] = 0
    num_expired: Annotated[int, _hold(outcome="expired")] = 0
    num_broken: Annotated[int, _hold(outcome="broken")] = 0
    num_unknown: Annotated[int, _hold(outcome="unknown")] = 0


class StoreCounts(msgspec.Struct, array_like=True):
    """Blocks between a worker and the store, since the worker started. A status has a copy."""

    num_hits: Annotated[int, _store(outcome="hit")] = 0  # loaded
    num_misses: Annotated[int, _store(outcome="miss")] = 0  # not found
    num_stored: Annotated[int, _store(outcome="stored")] = 0
    num_known: Annotated[int, _store(outcome="known")] = 0  # not sent: the store has them
    # Not sent: the store is away, or too many wait.
    num_dropped: Annotated[int, _store(outcome="dropped")] = 0
    num_failed: Annotated[int, _store(outcome="failed")] = 0  # writes that failed
    num_damaged: Annotated[int, _store(outcome="damaged")] = 0  # read with a wrong digest


class HostCounts(msgspec.Struct, array_like=True):
    """A worker's host tier: its blocks now, counts since the worker started, and load times. A
    status has a copy."""

    nbytes: Annotated[
        int,
        gauge("host_tier_bytes", "Evicted KV blocks that a worker keeps in host memory, in bytes"),
    ] = 0
    num_saved: Annotated[int, _host(outcome="saved")] = 0  # blocks
    # Evicted while they were copied, so that the copy does not count.
    num_torn: Annotated[int, _host(outcome="torn")] = 0
    num_dropped: Annotated[int, _host(outcome="dropped")] = 0  # all that is here is being loaded
    num_loaded: Annotated[int, _host(outcome="loaded")] = 0
    load_s: Annotated[
        float,
        counter(
            "host_tier_load_seconds", "Time that loading KV blocks from a worker's host memory took"
        ),
    ] = 0.0
    latency_s: float = 0.0  # of a load, and for each block, as lately observed
    block_s: float = 0.0


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True):
    """A worker's load after a step."""

    num_running: Annotated[
        int, gauge("num_requests_running", "Requests in a worker's running batch")
    ] = 0
    num_waiting: Annotated[
        int,
        gauge(
            "num_requests_waiting",
            "Requests that wait on a worker: for a place in its batch, for KV blocks, for a KV"
            " transfer, or for a grammar to be compiled",
        ),
    ] = 0
    # Prompt tokens of running and waiting sequences that are still to do.
    num_uncomputed_tokens: Annotated[
        int,
        gauge("uncomputed_tokens", "Prompt tokens on a worker whose KV is still to be computed"),
    ] = 0
    # Tokens with KV of all running sequences.
    num_context_tokens: Annotated[
        int, gauge("context_tokens", "Tokens whose KV a worker's running batch reads in each step")
    ] = 0
    num_free_blocks: int = 0  # free or idle (evictable)
    num_blocks: int = 0
    num_holds: Annotated[
        int,
        gauge("kv_holds", "KV tickets of a worker whose blocks are kept until another pulls them"),
    ] = 0
    accepting: bool = True  # False: draining
    step_costs: StepCosts | None = None
    transfers: tuple[TransferFigure, ...] = ()
    store: StoreCounts | None = None  # None: the worker has no cold tier
    requests_nbytes: Annotated[
        int,
        gauge("requests_bytes", "Prompts, drafts and grammars of all requests on a worker, bytes"),
    ] = 0
    num_drafted: Annotated[
        int, counter("spec_decode_num_draft_tokens", f"{_drafts} has verified")
    ] = 0
    num_accepted: Annotated[
        int, counter("spec_decode_num_accepted_tokens", f"{_drafts} has verified and accepted")
    ] = 0
    host: HostCounts | None = None  # None: the worker has no host tier
    num_preempted: Annotated[
        int,
        counter(
            "preemptions",
            "Requests that a worker took out of its running batch for want of KV blocks; their KV"
            " is computed again",
        ),
    ] = 0
    holds: HoldCounts | None = None
    pulls: tuple[PullCounts, ...] = ()  # one for each lane
    num_prefilling: int = 0  # of those that run, with prompt tokens to compute
    num_leaving: int = 0  # of these, to decode on another worker
    home_ingress: str = ""  # which prefers this worker among equal ones; "": all do
    num_corrupted: Annotated[
        int,
        counter(
            "corrupted_requests",
            "Requests that a worker ended because the model's logits were NaN or infinite",
        ),
    ] = 0
    num_spans_dropped: Annotated[
        int,
        counter(
            "trace_spans_dropped",
            "Spans of traces that a worker lost, because the collector was slow, away or refused"
            " them",
        ),
    ] = 0
    adapters: AdapterReport | None = None  # None: LoRA is not enabled
    num_drafts: Annotated[
        int,
        counter(
            "spec_decode_num_drafts", "Drafts (speculative decoding) that a worker has verified"
        ),
    ] = 0
    num_accepted_at: tuple[int, ...] = ()  # for each position, drafts that were right up to there
