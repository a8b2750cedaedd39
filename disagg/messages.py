"""Every message that crosses a process boundary inside disagg, in one file.

Frozen `msgspec` structs over msgpack; unknown fields are refused, so a version mismatch shows as
an error and never as a silently dropped option. Hot messages are arrays on the wire. What comes
from outside (HTTP) has structs of its own in `api/openai/fields.py`.

    ingress -> worker   Hello, then Start | Prefetch | Cancel | Release | Peers | Resync | Frequency
                        | AdapterNews
    worker -> ingress   Challenge, then Welcome | Refused, then Snapshot and StepFrames
    worker -> command line, while it starts   StartStep
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec

from disagg.adapters import Adapter, AdapterEntry
from disagg.blocks import HASH_NBYTES, BlockHash
from disagg.errors import DisaggError, error_from_code
from disagg.kv_groups import STATE, KVGroups, Window
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.worker_status import HoldCounts as HoldCounts
from disagg.worker_status import HostCounts as HostCounts
from disagg.worker_status import PullCounts as PullCounts
from disagg.worker_status import StepCosts as StepCosts
from disagg.worker_status import StoreCounts as StoreCounts
from disagg.worker_status import TransferFigure as TransferFigure
from disagg.worker_status import WorkerStatus as WorkerStatus

T = TypeVar("T")

WIRE_VERSION = 6

FinishReason: TypeAlias = Literal["stop", "length"]
Role: TypeAlias = Literal["prefill", "decode"]
GrammarKind: TypeAlias = Literal["json", "regex", "choice", "lark"]
StartPhase: TypeAlias = Literal["weights", "kv_blocks", "warm_up", "ready"]  # in this order


class Grammar(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A grammar that the answer must follow (structured output).

    source: a JSON schema, a regular expression, a JSON list of texts, or a Lark grammar.
    """

    kind: GrammarKind
    source: str


class Thinking(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The marks of an answer's reasoning, in token ids, and its budget.

    starts: an answer that begins with one of these begins with reasoning.
    end: the tokens that end the reasoning.
    forced_end: the tokens that the engine writes to end it; they end with `end`.
    then: tokens after the end and before a grammar begins.
    is_open: the prompt has begun the reasoning.
    is_framed: the answer never begins before `end`, with or without reasoning.
    budget: the maximum number of reasoning tokens; None: no limit.
    """

    starts: tuple[tuple[int, ...], ...]
    end: tuple[int, ...]
    forced_end: tuple[int, ...]
    then: tuple[int, ...] = ()
    is_open: bool = False
    is_framed: bool = False
    budget: int | None = None


class Pooling(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What to return of the last token of a prompt, in place of an answer.

    token_ids: the tokens whose logits are returned; empty: its hidden state, after
        the last norm and of length 1.
    head: of vLLM alone, what the head of a reranker says in place of both: its "score", or the
        "logit" below it; "": neither.
    """

    token_ids: tuple[int, ...] = ()
    head: Literal["", "score", "logit"] = ""


class KVEviction(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The tokens that keep their KV when it moves: the first and the last, in whole blocks.

    Sinks and a window of StreamingLLM (arXiv 2309.17453). The answer then loses what lies between.
    """

    window: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    sinks: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 4


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How to choose tokens. `api/` has checked it; `seed` is always set."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    seed: int = 0  # 64 bits; randomness is a function of (seed, position) only
    logprobs: int | None = None  # None: none; n: the chosen token's and the n most likely ones'
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens but the first
    logprobs_until: int | None = None  # only for so many first tokens of the answer; None: all
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, number that is added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # empty: all are
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # no part of the answer is one of these
    stop_token_ids: tuple[int, ...] = ()  # the model's end-of-sequence tokens included
    grammar: Grammar | None = None
    thinking: Thinking | None = None  # if it has a budget, or a grammar begins behind it
    kv_eviction: KVEviction | None = None
    pooling: Pooling | None = None  # with it `max_tokens` is 1: the token itself is of no use

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often it occurred."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


# Checked wherever one comes in: workers publish the names that they were told.
BlockName: TypeAlias = Annotated[
    BlockHash, msgspec.Meta(min_length=HASH_NBYTES, max_length=HASH_NBYTES)
]


ReportedName: TypeAlias = Annotated[
    BlockHash, msgspec.Meta(min_length=HASH_NBYTES, max_length=HASH_NBYTES + 1)
]


class GenerateRequest(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """A request as ingresses and engines see it: tokens, not text.

    `token_ids` is the prompt and, if the request was rerouted, the tokens generated so far;
    `num_prompt_tokens` says where the prompt ends. `draft_token_ids` is a proposed continuation of
    `token_ids`, from another model. The engine accepts the tokens that it would have sampled
    itself, so a draft changes the time of an answer and never its text.
    """

    request_id: str
    model: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    hash_root: BlockHash
    block_hashes: tuple[BlockName, ...]  # of the full blocks of `token_ids`, up to an image
    sampling: SamplingParams
    deadline_unix_s: float
    block_size: int = 0  # of `block_hashes`; 0: the receiving worker's
    tenant: str = ""
    traceparent: str = ""
    draft_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower is earlier, as vLLM has it
    ttft_slo_s: float = 0.0  # 0: its model's, if it has one; inf: none
    tpot_slo_s: float = 0.0
    cache_salt: str = ""  # with the tenant it keeps blocks apart; `hash_root` has both in it
    adapter: Adapter | None = None  # `hash_root` has its digest in it
    images: tuple[bytes, ...] = ()  # files, in the order of their marks in `token_ids`

    @property
    def scores_prompt(self) -> bool:
        """Whether it requests log-probabilities of its prompt. Then the whole prompt is computed,
        even if it is cached. They come with the first token, and not again if it moves later."""
        is_new = len(self.token_ids) == self.num_prompt_tokens
        return is_new and self.sampling.prompt_logprobs is not None


class WireError(msgspec.Struct, frozen=True, array_like=True):
    """A `DisaggError` on the wire."""

    code: str
    message: str
    param: str | None = None

    @classmethod
    def from_error(cls, error: DisaggError) -> WireError:
        return cls(error.code, error.message, error.param)

    def to_error(self) -> DisaggError:
        return error_from_code(self.code, self.message, self.param)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: of the token there, and of the most likely tokens."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), most likely first
    rank: int = 0  # of the token, from 1; 0: not known, as in answers


class StageTimes(msgspec.Struct, frozen=True, array_like=True):
    """The stages of a worker until its first token of a request, in seconds.

    is_prefill: the worker computed the prompt; otherwise it imported the prompt's KV.
    queue_s: from the request's arrival to its first step, without the pull.
    pull_s: of KV from another worker; 0 without a pull.
    compute_s: from the beginning of that step to the token.
    pull_nbytes: pulled for the request, also before it arrived here.
    pull_lane: of its last pull ("cma", "tcp", ...); "" without one, and if unknown.
    """

    is_prefill: bool
    queue_s: float
    pull_s: float
    compute_s: float
    pull_nbytes: int = 0
    pull_lane: str = ""


class TokenDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One item of an answer: what a sequence gained in one engine step.

    The last delta of a stream has exactly one of `finish_reason`, `error` and `ticket` (the last
    when the sequence left a prefill worker and goes on elsewhere).
    """

    stream_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None  # one per token when asked for
    num_cached_tokens: int = 0  # prompt tokens that were not computed here; in the first delta
    ticket: KVTicket | None = None
    error: WireError | None = None
    early_ticket: KVTicket | None = None  # full blocks of a prompt whose rest is being computed
    times: StageTimes | None = None  # in the first delta with tokens of each worker
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # in the answer's first, if asked for
    pooled: bytes | None = None  # float32, little-endian: what `SamplingParams.pooling` asks for
    num_image_tokens: int = 0  # of the prompt, besides its `token_ids`; in the first delta

    @property
    def is_last(self) -> bool:
        return not (self.finish_reason is None and self.ticket is None and self.error is None)


# Gets the deltas of one stream as they arrive, and must not wait. Its exceptions end the stream.
PutDelta: TypeAlias = Callable[[TokenDelta], None]


class AnswerEnded(Exception):
    """Raised by a `PutDelta`: the answer has ended before its tokens do, as by a stop string."""


class KVEvent(msgspec.Struct, frozen=True, array_like=True):
    """Blocks were cached on a worker, or evicted.

    block_hashes: of rows, and marked ones of recurrent states (`KVGroups.reported`).
    tier: the engine's KV cache, or the host memory behind it.
    """

    kind: Literal["stored", "removed"]
    block_hashes: tuple[ReportedName, ...] = ()
    tier: Literal["cache", "host"] = "cache"


class WorkerRecord(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """What a worker publishes once about itself: who it is and how to reach it.

    num_blocks: of all layers, for a sequence of a usual length.
    kv_windows: of the groups of layers that have blocks of their own (`kv_groups`).
    """

    worker_id: str
    role: Role
    model: str  # the tier's served name
    host: str
    port: int
    epoch: int
    block_size: int
    num_blocks: int
    max_model_len: int
    peer: Peer
    pid: int
    max_num_seqs: int = 0  # places in its batch; 0: not said
    max_num_batched_tokens: int = 0  # of one step; 0: not said
    kv_windows: tuple[Window, ...] = (None,)

    @property
    def has_states(self) -> bool:
        """Whether its model has recurrent states beside its KV."""
        return STATE in self.kv_windows

    def kv_nbytes(self, num_tokens: int) -> int:
        """Bytes of the KV that a sequence of this length has on one rank."""
        if self.kv_windows == (None,):
            return -(-num_tokens // self.block_size) * self.peer.block_nbytes
        groups = KVGroups(self.kv_windows, self.block_size)
        return groups.num_needed(num_tokens) * self.peer.block_nbytes


class StartStep(msgspec.Struct, frozen=True, array_like=True):
    """How far a worker's start is: bytes of its weights, or the number of its KV blocks.

    With these the sizes of its steps are settled; 0: not said.
    """

    phase: StartPhase
    num_done: int = 0
    num_total: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0


# Pool -> worker -> the last step of each phase that it has reached.
StartsByPool: TypeAlias = Mapping[str, Mapping[str, Mapping[StartPhase, StartStep]]]


# Hot or small control messages, tagged so that one decoder serves a direction of a link.

NO_STREAM = 0


class Challenge(msgspec.Struct, frozen=True, tag="challenge", array_like=True):
    """First frame on a link, from the worker: prove that you know the cluster's key."""

    version: int
    nonce: bytes


class Hello(msgspec.Struct, frozen=True, tag="hello", array_like=True):
    """The ingress answers with HMAC(key, nonce) and a nonce for the worker to prove the same."""

    version: int
    ingress_id: str
    proof: bytes
    nonce: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome", array_like=True):
    proof: bytes
    worker: WorkerRecord


class Refused(msgspec.Struct, frozen=True, tag="refused", array_like=True):
    """The worker's last frame when the handshake fails: a sentence for the operator."""

    reason: str


class Start(msgspec.Struct, frozen=True, tag="start", array_like=True):
    """Run a request on this worker.

    hand_over: stop after one token and return a ticket for the KV (prefill). A request without
        tokens asks for a cached prefix: nothing is computed; the ticket is for the blocks that are
        cached under its hashes.
    ticket: another worker has the KV of the first tokens (decode).
    """

    stream_id: int  # chosen by the ingress's link, from 1 and growing; `NO_STREAM` before
    request: GenerateRequest
    hand_over: bool = False
    ticket: KVTicket | None = None

    @property
    def is_prefix_request(self) -> bool:
        return self.hand_over and not self.request.token_ids


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch", array_like=True):
    """Pull the blocks of an early ticket into the cache, if there is room: the request will follow.

    block_hashes: of the ticket's blocks, possibly followed by more.
    """

    ticket: KVTicket
    block_hashes: tuple[BlockName, ...]
    traceparent: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel", array_like=True):
    stream_id: int


class Release(msgspec.Struct, frozen=True, tag="release", array_like=True):
    """The KV of a ticket that this worker issued will not be pulled."""

    ticket_id: str


class Peers(msgspec.Struct, frozen=True, tag="peers", array_like=True):
    """Workers whose KV may be pulled, so that handshakes happen before requests need them.

    gone: ids of those that have left; what is known of them can be forgotten.
    """

    peers: tuple[Peer, ...]
    gone: tuple[str, ...] = ()


class Resync(msgspec.Struct, frozen=True, tag="resync", array_like=True):
    """The ingress missed frames: send a snapshot of what the cache holds."""


class AdapterNews(msgspec.Struct, frozen=True, tag="adapters", array_like=True):
    """What the ingress knows of the LoRA adapters of the worker's model."""

    entries: tuple[AdapterEntry, ...]


class Frequency(msgspec.Struct, frozen=True, tag="frequency", array_like=True):
    """How often an ingress wants to hear of cache and load: at most every `interval_s` seconds.

    0: with every step. Tokens are sent with every step in any case.
    """

    interval_s: float


class StepFrame(msgspec.Struct, frozen=True, tag="step", array_like=True):
    """What one engine step did: tokens of this ingress's streams; and, of one or more steps, cache
    changes and the load after them.

    status: None: as in the last frame that had one.
    kept: the parts of the status that are as in that frame, and left out here: bits in the order of
        `links.reports.RARE`.
    """

    sequence_number: int  # per link, from 1, without gaps
    deltas: tuple[TokenDelta, ...]
    kv_events: tuple[KVEvent, ...] = ()
    status: WorkerStatus | None = None
    kept: int = 0


class Snapshot(msgspec.Struct, frozen=True, tag="snapshot", array_like=True):
    """Findable blocks of a worker as of `sequence_number`; step frames bring the others."""

    sequence_number: int
    block_hashes: tuple[ReportedName, ...]
    status: WorkerStatus


ToWorker: TypeAlias = (
    Hello | Start | Prefetch | Cancel | Release | Peers | Resync | Frequency | AdapterNews
)
ToIngress: TypeAlias = Challenge | Welcome | Refused | StepFrame | Snapshot

_encoder = msgspec.msgpack.Encoder()
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_to_ingress: msgspec.msgpack.Decoder[ToIngress] = msgspec.msgpack.Decoder(ToIngress)
_worker_record = msgspec.msgpack.Decoder(WorkerRecord)


def encode(message: ToWorker | ToIngress | WorkerRecord) -> bytes:
    return _encoder.encode(message)


def decode_to_worker(frame: bytes) -> ToWorker:
    """Raises `msgspec.DecodeError` on anything that is not a message of this version."""
    return _decode(_to_worker, frame)


def decode_to_ingress(frame: bytes) -> ToIngress:
    """Raises `msgspec.DecodeError` on anything that is not a message of this version."""
    return _decode(_to_ingress, frame)


def decode_worker_record(raw: bytes) -> WorkerRecord:
    """Raises `msgspec.DecodeError` on anything that is not a record of this version."""
    return _decode(_worker_record, raw)


def _decode(decoder: msgspec.msgpack.Decoder[T], raw: bytes) -> T:
    try:
        return decoder.decode(raw)
    except UnicodeDecodeError as error:  # which msgspec lets through
        raise msgspec.DecodeError(f"Text that is not UTF-8: {error}") from error
