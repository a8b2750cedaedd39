"""A thread copies blocks to and fro, each way in order."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from itertools import count

from disagg.kvtransfer.slab import Slab
from disagg.store.block_copier import ThreadCopier

NBYTES = 64


def slab(num_blocks: int, fill: Callable[[int], bytes]) -> Slab:
    memory = ctypes.create_string_buffer(b"".join(map(fill, range(num_blocks))))
    return Slab(ctypes.addressof(memory), num_blocks, NBYTES, "test", owner=memory)


def block(of: Slab, index: int) -> bytes:
    return ctypes.string_at(of.address(index), NBYTES)


def wait(copier: ThreadCopier, num_saved: int, num_loaded: int) -> list[float]:
    seconds: list[float] = []
    while num_saved or len(seconds) < num_loaded:
        num_saved -= copier.take_saved()
        seconds += copier.take_loaded()
        time.sleep(0.001)
    return seconds


def test_blocks_go_out_and_come_back() -> None:
    cache = slab(8, lambda i: bytes([i]) * NBYTES)
    host = slab(8, lambda i: b"\xff" * NBYTES)
    copier = ThreadCopier(cache, host, count().__next__)
    order = list(range(8))
    random.Random(0).shuffle(order)
    copier.save([(i, slot) for slot, i in enumerate(order[:5])])
    copier.save([(order[5], 7)])
    wait(copier, 2, 0)
    slots = [*order[:5], 255, 255, order[5]]
    assert [copier.read_slot(slot) for slot in range(8)] == [bytes([i]) * NBYTES for i in slots]
    for i in range(8):
        ctypes.memset(cache.address(i), 0xDD, NBYTES)
    copier.load([(slot, i) for slot, i in enumerate(order[:5])])
    copier.load([(7, order[5])])
    seconds = wait(copier, 0, 2)
    assert seconds == [1.0, 1.0]
    kept = {i: bytes([i]) * NBYTES for i in order[:6]}
    assert {i: block(cache, i) for i in range(8)} == dict.fromkeys(
        range(8), b"\xdd" * NBYTES
    ) | kept
    copier.close()


def test_it_ends_with_copies_in_its_queue() -> None:
    cache, host = slab(64, lambda i: bytes(NBYTES)), slab(64, lambda i: bytes(NBYTES))
    copier = ThreadCopier(cache, host, count().__next__)
    for _ in range(200):
        copier.save([(i, i) for i in range(64)])
    copier.close()
    assert copier.take_saved() <= 200
