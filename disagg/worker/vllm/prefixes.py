"""The blocks that vLLM caches, under our names, from its KV events.

vLLM names a block by a hash of its own, but its event has the block's tokens and the salt of the
request. The worker's salt is the root of our chain of names, so our name of each block follows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec

from disagg.blocks import HASH_NBYTES, BlockHash, hash_block, hash_blocks, hash_image
from disagg.messages import KVEvent

TheirHash: TypeAlias = bytes | int
# Of the groups of layers of a hybrid model those in which a prefix must be whole.
WHOLE_PREFIX = (None, "full_attention", "mla_attention")


class BlockStored(msgspec.Struct, tag=True):
    block_hashes: list[TheirHash]
    parent_block_hash: TheirHash | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None  # "GPU" is the engine's cache, on CPUs too
    extra_keys: list[list[Any] | None] | None = None  # of each block: adapter, images, salt
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    block_hashes: list[TheirHash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    pass


TheirEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    unix_s: float
    events: list[TheirEvent]


_decoder = msgspec.msgpack.Decoder(EventBatch)


def read_batch(payload: bytes) -> list[TheirEvent]:
    """Raises `msgspec.DecodeError` where it is none of a tested version."""
    return _decoder.decode(payload).events


def salt_of(root: BlockHash) -> str:
    """The salt with which vLLM keeps the blocks of this root apart from all others."""
    return root.hex()


def _root_of(extra_keys: Iterable[Any]) -> BlockHash | None:
    for key in extra_keys:
        if isinstance(key, str) and len(key) == 2 * HASH_NBYTES:
            try:
                return bytes.fromhex(key)
            except ValueError:
                continue
    return None


def _names(parent: BlockHash, event: BlockStored) -> list[BlockHash]:
    if event.extra_keys is None:
        return hash_blocks(parent, event.token_ids, event.block_size)
    names = []
    for number, keys in enumerate(event.extra_keys):
        # In 0.32 ["mm", name, offset], later without "mm".
        images = [key[-2] for key in keys or () if isinstance(key, list)]
        for digest in images:
            parent = hash_image(parent, digest)
        if not images:
            begin = number * event.block_size
            parent = hash_block(parent, event.token_ids[begin : begin + event.block_size])
        names.append(parent)
    return names


class PrefixNames:
    """Our names of what one engine has cached.

    Equal blocks that two sequences computed at the same time are cached twice in vLLM, and an event
    comes for each: a name is gone when both are.
    """

    def __init__(self) -> None:
        self._names: dict[TheirHash, BlockHash] = {}
        self._copies: dict[TheirHash, int] = {}

    def all(self) -> tuple[BlockHash, ...]:
        return tuple(self._names.values())

    def apply(self, events: Iterable[TheirEvent]) -> tuple[KVEvent, ...]:
        """Take in events in their order. Returns what they mean to the router."""
        changes: list[KVEvent] = []
        for event in events:
            match event:
                case BlockStored():
                    kind, names = "stored", self._store(event)
                case BlockRemoved():
                    kind, names = "removed", self._remove(event)
                case AllBlocksCleared():
                    kind, names = "removed", self.clear()
            if names:
                changes.append(KVEvent(kind, tuple(names)))  # type: ignore[arg-type]
        return tuple(changes)

    def clear(self) -> list[BlockHash]:
        """Forget all. Returns the names that are gone."""
        names = list(self._names.values())
        self._names.clear()
        self._copies.clear()
        return names

    def _store(self, event: BlockStored) -> list[BlockHash]:
        if event.medium not in (None, "GPU") or event.kv_cache_spec_kind not in WHOLE_PREFIX:
            return []
        if event.parent_block_hash is not None:
            parent = self._names.get(event.parent_block_hash)
        else:
            parent = _root_of((event.extra_keys or [None])[0] or ())
        if parent is None:  # not a request of a router, or after a gap
            return []
        names = _names(parent, event)
        new = []
        for theirs, name in zip(event.block_hashes, names, strict=True):
            self._copies[theirs] = self._copies.get(theirs, 0) + 1
            if theirs not in self._names:
                self._names[theirs] = name
                new.append(name)
        return new

    def _remove(self, event: BlockRemoved) -> list[BlockHash]:
        if event.medium not in (None, "GPU"):
            return []
        gone = []
        for theirs in event.block_hashes:
            left = self._copies.get(theirs, 1) - 1
            if left > 0:
                self._copies[theirs] = left
            elif theirs in self._names:
                gone.append(self._names.pop(theirs))
                del self._copies[theirs]
        return gone
