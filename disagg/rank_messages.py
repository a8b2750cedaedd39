"""The messages between the first rank of a worker and its other ranks, over two connections.

Pipes on one node, TCP between nodes (where `RankStart` comes from who starts the process).

    first -> other   RankStart, RankCache
    first -> other   RankStep | RankCapture | RankSlot, RankAdapter | ForgetAdapter,
                     ConnectPeer | ForgetPeer | PullBlocks, RankCopies,
                     RankPut | RankFetch, on the second one: begun one after another
    other -> first   RankUp, RankLoaded, RankReady;
                     then RankDone for each numbered task;
                     RankFailed before it ends by itself

The end of a connection is the end of the other process.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from disagg.adapters import Adapter
from disagg.config import ServeConfig, TierConfig
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone

LOOPBACK = "127.0.0.1"  # ranks of one node need not be reached from elsewhere


class RankStart(msgspec.Struct, frozen=True, tag="start"):
    """Load the part of `rank`, one of `num_ranks`.

    tier: with the settings of the worker's role.
    meeting_place: by which the ranks find each other: a file, or tcp:HOST:PORT of the first.
    host: an address of the rank's node, at which the others reach it.
    num_threads: of torch, on a CPU.
    """

    config: ServeConfig
    tier: TierConfig
    rank: int
    num_ranks: int
    meeting_place: str
    host: str
    num_threads: int
    worker_id: str
    epoch: int

    @property
    def name(self) -> str:
        """Of the rank, as the KV transport calls it."""
        return f"{self.worker_id}.{self.rank}"


class RankCache(msgspec.Struct, frozen=True, tag="cache"):
    """Allocate so many KV blocks. Their stamps are the first rank's.

    max_num_seqs: of a step; the first rank's, since ranks may find unequal GPUs.
    """

    num_blocks: int
    max_num_seqs: int


class ConnectPeer(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Another worker, from whose ranks this rank may pull KV."""

    peer: Peer


class ForgetPeer(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A worker has left; this rank needs no connection to its ranks any more."""

    worker_id: str


class PullBlocks(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Pull `ticket.block_ids[first_block:]` into the blocks `into`."""

    number: int
    ticket: KVTicket
    first_block: int
    into: list[int]


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What the numbers of a step are; see `engine.device.batching`.

    lengths: of the parts of the numbers: the slot of each sequence; the position and KV slot of
        each token; the context length of each sequence; the token ids that are not on the device
        yet; cells of the block tables, and the blocks to write there. Unless all sequences decode,
        also the first token of each sequence and the end, the rows whose logits are needed, and the
        slots of these rows.
    num_unread: the tokens of the first `num_unread` sequences are known on the device only.
    has_adapters: whether a sequence has a LoRA adapter.
    are_shifted: see `models.batch.Batch`.
    """

    lengths: list[int]
    num_unread: int
    num_decodes: int
    query_lens: tuple[int, ...]
    has_adapters: bool = False
    are_shifted: bool = False

    @property
    def num_seqs(self) -> int:
        return self.lengths[0]

    @property
    def num_tokens(self) -> int:
        return self.lengths[1]

    @property
    def num_changes(self) -> int:
        return self.lengths[5]

    @property
    def num_logits(self) -> int:
        return self.num_seqs if self.are_decodes else self.lengths[8]

    @property
    def are_decodes(self) -> bool:
        return self.num_decodes == self.num_seqs


class RankStep(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The numbers of a step. Which captured graph computes it follows from them, as on the first
    rank.

    numbers: int64.
    num_slots: for which the tables need room.
    scored: first and end of the token rows that are projected to logits beside the last ones; None:
        only logits are read of the step, so that a graph may compute it.
    shares_tokens: when the step is computed, the first rank broadcasts the tokens that it samples,
        so that the next step can begin before the host has read them.
    """

    numbers: bytes
    shape: StepShape
    num_slots: int
    scored: list[tuple[int, int]] | None
    shares_tokens: bool


class RankCapture(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Capture these steps as CUDA graphs, while the first rank does; see `ModelRunner.capture`."""

    max_num_seqs: int


class RankSlot(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """Write a LoRA adapter, which this rank has read, to a slot on the device."""

    slot: int
    digest: str


class RankAdapter(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Read this rank's part of a LoRA adapter into host memory."""

    number: int
    adapter: Adapter


class ForgetAdapter(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """Free the host memory of a LoRA adapter."""

    digest: str


class RankCopies(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Begin to copy this rank's part of blocks between its KV cache and its host memory, as of the
    steps before.

    pairs: (block, slot) of blocks to save, or (slot, block) of blocks to load.
    """

    number: int
    is_load: bool
    pairs: list[tuple[int, int]]


class RankPut(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """Put this rank's part of blocks into the store, as of the steps before. They are read before
    anything that is said later is begun.

    blocks: each with its number in the cache or, if `in_host`, that of its slot in host memory.
    """

    number: int
    blocks: list[tuple[int, bytes]]
    in_host: bool


class RankFetch(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """Load this rank's part of the blocks `names` from the store into the blocks `into`."""

    number: int
    names: list[bytes]
    into: list[int]


class RankUp(msgspec.Struct, frozen=True, tag="up"):
    """The rank has a device, and is about to meet the others."""


class RankLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """Its weights are loaded. room_nbytes: for KV, on a GPU."""

    room_nbytes: int | None


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """It computes steps. peer: how other workers reach its slab."""

    peer: Peer


class RankFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not start, or failed: a sentence."""

    message: str


class RankDone(msgspec.Struct, frozen=True, tag="done"):
    """A task of the rank has ended: a pull, a copy, a put, a fetch, or reading an adapter.

    seconds: of pulls, and of copies from host memory.
    nbytes, is_torn: of pulls, as in `PullDone`.
    num_damaged: of fetches, damaged values that this rank has read from the store so far.
    """

    number: int
    error: str | None = None
    seconds: float = 0.0
    nbytes: int = 0
    is_torn: bool = False
    num_damaged: int = 0

    @classmethod
    def of_pull(cls, number: int, done: PullDone) -> RankDone:
        return cls(number, done.error, done.seconds, done.nbytes, done.is_torn)


ToRank: TypeAlias = RankStart | RankCache
RankWork: TypeAlias = RankStep | RankCapture | RankSlot
RankMove: TypeAlias = ConnectPeer | ForgetPeer | PullBlocks | RankCopies | RankPut | RankFetch
RankTask: TypeAlias = RankWork | RankMove | RankAdapter | ForgetAdapter
FromRank: TypeAlias = RankUp | RankLoaded | RankReady | RankFailed | RankDone

_encoder = msgspec.msgpack.Encoder()
_to_rank: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
_from_rank: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_task: msgspec.msgpack.Decoder[RankTask] = msgspec.msgpack.Decoder(RankTask)


def encode(message: ToRank | FromRank | RankTask) -> bytes:
    return _encoder.encode(message)


def decode_to_rank(frame: bytes) -> ToRank:
    return _to_rank.decode(frame)


def decode_from_rank(frame: bytes) -> FromRank:
    return _from_rank.decode(frame)


def decode_task(frame: bytes) -> RankTask:
    return _task.decode(frame)
