"""What only the local twin can show: faults planted at exact moments of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import KVShape
from disagg.errors import StartupError
from disagg.kernels.kv_pages import FORMATS
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.pulls import Pull, Source
from disagg.kvtransfer.slab import BlockPart, Slab, Stamps
from disagg.kvtransfer.ticket import issue_ticket
from disagg.kvtransfer.transport import PullDone
from tests.kvtransfer.memory import Memory


def open_side(fleet: LocalFleet, memory: Memory) -> LocalTransport:
    return LocalTransport(fleet, memory.slab, memory.stamps, clock=time.monotonic)


class Torn(LocalTransport):
    """Calls back at the three moments that matter."""

    def __init__(self, fleet: LocalFleet, memory: Memory) -> None:
        super().__init__(fleet, memory.slab, memory.stamps, clock=time.monotonic)
        self.before_copy: Callable[[], None] = lambda: None
        self.before_stamps: Callable[[], None] = lambda: None
        self.after_stamps: Callable[[], None] = lambda: None

    def _copy_blocks(self, pull: Pull, source: Source, side: LocalTransport) -> None:
        self.before_copy()
        super()._copy_blocks(pull, source, side)

    def _copy_generations(self, pull: Pull, side: LocalTransport) -> None:
        self.before_stamps()
        super()._copy_generations(pull, side)
        self.after_stamps()


BLOCKS = st.permutations(range(32)).flatmap(lambda ids: st.integers(1, 8).map(lambda n: ids[:n]))


@given(BLOCKS, BLOCKS, st.sampled_from(["before", "during", "after"]), st.integers(0, 31))
def test_a_pull_is_accepted_exactly_when_its_blocks_were_not_used_again(
    block_ids: list[int], into: list[int], when: str, reused: int
) -> None:
    num = min(len(block_ids), len(into))
    block_ids, into = block_ids[:num], into[:num]
    fleet, source, reader = LocalFleet(), Memory("source"), Memory("reader")
    serving, side = open_side(fleet, source), Torn(fleet, reader)
    side.add_peer(serving.peer)
    ticket = source.ticket("t", block_ids)

    def reuse() -> None:
        source.reuse(reused)

    moments = {"before": "before_copy", "during": "before_stamps", "after": "after_stamps"}
    setattr(side, moments[when], reuse)
    side.pull(ticket, 0, into)
    (done,) = side.poll()
    assert isinstance(done, PullDone)
    assert (done.error is None) == (when == "after" or reused not in block_ids)
    if done.error is None:
        assert reader.holds_copy(source, ticket, into)


def test_device_memory_that_nobody_can_copy_is_refused() -> None:
    slab = Slab(4096, 1, 64, "l", device_id=0)
    with pytest.raises(StartupError, match="cannot copy this slab"):
        LocalTransport(LocalFleet(), slab, Stamps(1, "w", 1), clock=time.monotonic)
    shape = KVShape(2, 1, 4, 8, FORMATS["bfloat16"], "weights")
    cache = KVCache(shape, 1, torch.device("cpu"))
    part = Slab(4096, 1, 64, "l", device_id=0, owner=cache, part=BlockPart(0, 128))
    with pytest.raises(StartupError, match="cannot copy this slab"):
        LocalTransport(LocalFleet(), part, Stamps(1, "w", 1), clock=time.monotonic)


def test_blocks_of_a_device_are_copied_by_their_owner() -> None:
    """As in `disagg cascade calibrate` on a GPU: the host cannot address what it copies."""
    shape = KVShape(2, 1, 4, 8, FORMATS["bfloat16"], "weights")
    fleet = LocalFleet()
    caches = [KVCache(shape, 8, torch.device("cpu")) for _ in range(2)]
    stamps = [Stamps(8, name, 1) for name in ("source", "reader")]
    source, reader = (
        LocalTransport(
            fleet,
            Slab(1, 8, cache.block_nbytes, cache.layout, device_id=0, owner=cache),
            table,
            clock=time.monotonic,
        )
        for cache, table in zip(caches, stamps, strict=True)
    )
    caches[0].slab.copy_(torch.randn(caches[0].slab.shape))
    reader.add_peer(source.peer)
    ticket = issue_ticket(
        source.peer, stamps[0].generations, ticket_id="t", num_tokens=12, block_ids=[2, 3, 7]
    )
    reader.pull(ticket, 0, [0, 1, 5])
    (done,) = reader.poll()
    assert isinstance(done, PullDone) and done.error is None
    assert torch.equal(caches[1].slab[[0, 1, 5]], caches[0].slab[[2, 3, 7]])
    assert not caches[1].slab[[2, 3, 4, 6, 7]].any()


def test_a_process_opens_once() -> None:
    fleet, memory = LocalFleet(), Memory("w")
    open_side(fleet, memory)
    with pytest.raises(StartupError, match="already"):
        open_side(fleet, memory)
