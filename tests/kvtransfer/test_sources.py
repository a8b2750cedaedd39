"""Which ranks of a worker a slab copies from: every byte once, and to its place."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from disagg.engine.device.kv_shape import KVShape
from disagg.errors import TransferFailed
from disagg.kernels.kv_pages import FORMATS, KVFormat, KVPages, pages_of
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.pulls import PullBook, describe, sources_of
from disagg.kvtransfer.slab import BlockPart, Slab, Stamps
from disagg.kvtransfer.ticket import issue_ticket
from disagg.kvtransfer.transport import PullDone
from disagg.models.share import Share
from disagg.worker.ranked import RankedTransport
from tests.kvtransfer.memory import Memory, peer_of, rank_memories
from tests.worker.fake_ranks import FakeRank, tasks_of

NUM_BLOCKS = 6


class Rank:
    """A rank's cache, and its slab."""

    def __init__(self, shape: KVShape, name: str, fleet: LocalFleet) -> None:
        self.shape = shape
        self.memory = torch.randint(0, 256, (NUM_BLOCKS * shape.block_nbytes,), dtype=torch.uint8)
        sizes = (shape.num_layers, shape.num_own_heads, shape.block_size, shape.head_dim)
        self.pages = pages_of(self.memory, shape.format, *sizes)
        slab = Slab(
            self.memory.data_ptr(),
            NUM_BLOCKS,
            shape.block_nbytes,
            shape.layout,
            owner=self.memory,
            part=shape.part,
        )
        self.stamps = Stamps(NUM_BLOCKS, name, 1)
        self.transport = LocalTransport(fleet, slab, self.stamps, clock=lambda: 0.0)

    @property
    def heads(self) -> slice:
        return slice(*self.shape.share.kv_heads(self.shape.num_kv_heads))


def ranks_of(shape: KVShape, name: str, num_ranks: int, fleet: LocalFleet) -> list[Rank]:
    names = [f"{name}.{rank}" if rank else name for rank in range(num_ranks)]
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    shapes = [replace(shape, share=share) for share in shares]
    return [Rank(*each, fleet) for each in zip(shapes, names, strict=True)]


def parts(pages: KVPages) -> list[Tensor]:
    """All that is stored, as bytes: [num_blocks, num_layers, 2, num_kv_heads, ...] each."""
    every = [pages.values] if pages.scales is None else [pages.values, pages.scales]
    return [each.view(torch.uint8) for each in every]


SIZES = st.integers(1, 8).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        *2 * [st.sampled_from([n for n in range(1, 17) if heads % n == 0 or n % heads == 0])],
    )
)


@given(
    SIZES,
    st.sampled_from(list(FORMATS.values())),
    st.integers(1, 3),
    st.integers(1, 5),
    st.sampled_from([2, 6, 16]),
    st.permutations(range(NUM_BLOCKS)),
    st.permutations(range(NUM_BLOCKS)),
    st.integers(1, NUM_BLOCKS),
)
def test_every_byte_of_every_head_arrives_where_the_layout_says_and_nothing_else_is_written(
    sizes: tuple[int, int, int],
    format: KVFormat,
    num_layers: int,
    block_size: int,
    head_dim: int,
    blocks: list[int],
    into: list[int],
    num: int,
) -> None:
    num_heads, num_source_ranks, num_ranks = sizes
    whole = KVShape(num_layers, num_heads, block_size, head_dim, format, "weights")
    fleet, blocks, into = LocalFleet(), blocks[:num], into[:num]
    source = ranks_of(whole, "source", num_source_ranks, fleet)
    nbytes = NUM_BLOCKS * whole.block_nbytes
    memory = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    stored = parts(pages_of(memory, format, num_layers, num_heads, block_size, head_dim))
    for rank in source:
        for own, all_heads in zip(parts(rank.pages), stored, strict=True):
            own.copy_(all_heads[:, :, :, rank.heads])
    reader = ranks_of(whole, "reader", num_ranks, fleet)
    before = [rank.memory.clone() for rank in reader]
    transport = RankedTransport(
        reader[0].transport, tasks_of([FakeRank(rank.transport) for rank in reader[1:]])
    )
    transport.add_peer(peer_of([rank.transport.peer for rank in source]))
    ticket = issue_ticket(
        source[0].transport.peer,
        source[0].stamps.generations,
        ticket_id="t",
        num_tokens=1,
        block_ids=blocks,
    )
    transport.pull(ticket, 0, into)
    (done,) = transport.poll()
    assert isinstance(done, PullDone) and done.error is None
    others = [block for block in range(NUM_BLOCKS) if block not in into]
    for rank, was in zip(reader, before, strict=True):
        for own, all_heads in zip(parts(rank.pages), stored, strict=True):
            assert torch.equal(own[into], all_heads[blocks][:, :, :, rank.heads])
        now = rank.memory.view(NUM_BLOCKS, -1)
        assert torch.equal(now[others], was.view(NUM_BLOCKS, -1)[others])


CUTS = st.sets(st.integers(1, 63)).map(lambda cuts: [0, *sorted(cuts), 64])


@given(CUTS, st.integers(0, 63), st.integers(1, 64), st.lists(st.integers(0, 3), max_size=4))
def test_each_byte_comes_from_one_rank_that_has_it(
    cuts: list[int], begin: int, nbytes: int, repeated: list[int]
) -> None:
    """Whatever the ranks are: parts of unlike sizes, some of them twice."""
    nbytes = min(nbytes, 64 - begin)
    pairs = list(itertools.pairwise(cuts))
    pairs += [pairs[i % len(pairs)] for i in repeated]
    peers = [
        Memory(f"rank{i}", num_blocks=1, block_nbytes=end - first, part=BlockPart(first, 64)).peer()
        for i, (first, end) in enumerate(pairs)
    ]
    slab = Slab(4096, 1, nbytes, "l", part=BlockPart(begin, 64, copy=1))
    at = begin
    for source in sources_of(slab, peer_of(peers)):
        assert source.rank.part is not None and source.nbytes > 0
        assert source.here == at - begin
        assert source.rank.part.begin + source.there == at
        assert source.there >= 0 and source.there + source.nbytes <= source.rank.block_nbytes
        at += source.nbytes
    assert at == begin + nbytes


def test_ranks_with_the_same_heads_are_all_pulled_from() -> None:
    """4 ranks for 2 KV heads: each of 4 readers has a source of its own, each of 2 has one."""
    peer = peer_of([memory.peer() for memory in rank_memories("source", 4, num_heads=2)])

    def chosen(num_ranks: int) -> list[list[str]]:
        memories = rank_memories("reader", num_ranks, num_heads=2)
        return [[s.rank.worker_id for s in sources_of(each.slab, peer)] for each in memories]

    assert chosen(4) == [["source"], ["source.1"], ["source.2"], ["source.3"]]
    assert chosen(2) == [["source"], ["source.2"]]
    assert chosen(1) == [["source", "source.2"]]


@pytest.mark.parametrize(
    ("num_source_ranks", "num_ranks", "num_ranges"),
    [(2, 2, 1), (2, 4, 64), (4, 2, 128), (1, 8, 64), (8, 1, 512)],
)
def test_a_pull_of_4096_tokens_of_llama_3_70b_takes_few_descriptors(
    num_source_ranks: int, num_ranks: int, num_ranges: int
) -> None:
    """In each rank, of neighbouring blocks on both sides; docs/models.md has the numbers."""
    whole = KVShape(80, 8, 64, 128, FORMATS["bfloat16"], "weights")

    def slab_of(rank: int, num_ranks: int) -> Slab:
        shape = replace(whole, share=Share(rank, num_ranks))
        return Slab(4096, 64, shape.block_nbytes, shape.layout, part=shape.part)

    stamps = Stamps(64, "source", 1)
    peers = [
        describe("local", slab_of(rank, num_source_ranks), stamps)
        for rank in range(num_source_ranks)
    ]
    peer = peer_of(peers)
    ticket = issue_ticket(
        peer, stamps.generations, ticket_id="t", num_tokens=4096, block_ids=range(64)
    )
    for rank in range(num_ranks):
        slab = slab_of(rank, num_ranks)
        book = PullBook(slab, "local")
        book.add_peer(peer)
        pull = book.begin(ticket, 0, range(64), 0.0)
        ranges = [each for source in pull.sources for each in pull.block_ranges(slab, source)]
        assert len(ranges) == num_ranges
        assert sum(each.nbytes for each in ranges) == pull.nbytes == slab.nbytes
        assert pull.largest_nbytes(slab) == max(each.nbytes for each in ranges)


def test_bytes_that_no_rank_has_are_named() -> None:
    memory = Memory("source", block_nbytes=32, part=BlockPart(0, 64))
    slab = Slab(4096, 1, 64, "l")
    with pytest.raises(TransferFailed, match=r"bytes 0 to 32 of each block.* has byte 32$"):
        sources_of(slab, memory.peer())


def test_a_whole_block_of_one_rank_is_one_run() -> None:
    memory = Memory("source")
    (source,) = sources_of(memory.slab, memory.peer())
    assert source == (memory.peer(), 0, 0, memory.block_nbytes)
