"""The order of a GPU's copies, on streams that are played here; bytes are those of real tensors."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import pytest
import torch

from disagg.engine.device.stream_copier import BlockReader, StreamCopier
from disagg.errors import StartupError
from disagg.store.cold_tier import ColdTier, StoreThread
from disagg.time_model import TransferTimeModel
from disagg.worker.tiers import KVOffload
from tests.store.tiers import Gate, name


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.at_ms: float | None = None
        self._stream: Stream | None = None

    def record(self) -> None:
        event, self._stream = self, Stream.current
        Stream.current.do(lambda: setattr(event, "at_ms", Stream.current.device_ms()))

    def synchronize(self) -> None:
        """The host waits."""
        assert self._stream is not None
        self._stream.run()

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None and end.at_ms is not None
        return end.at_ms - self.at_ms


class Stream:
    """Does its work when it is told to run, and not before what it waits for is done."""

    current: Stream
    all: list[Stream]

    def __init__(self, device: object = None) -> None:
        self._work: list[Callable[[], object]] = []
        self._ms = 0.0
        self.num_waits = 0
        Stream.all.append(self)

    def do(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def wait_event(self, event: Event) -> None:
        self.do(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        before = list(other._work)

        def catch_up() -> None:
            while other._work and other._work[0] in before:
                other._work.pop(0)()

        self.do(catch_up)

    def device_ms(self) -> float:
        self._ms += 2.0
        return self._ms

    def synchronize(self) -> None:
        self.num_waits += 1
        self.run()

    def run(self) -> None:
        before, Stream.current = Stream.current, self
        while self._work:
            self._work.pop(0)()
        Stream.current = before


class Cudart:
    """Counts what is registered, as bytes by address."""

    def __init__(self, largest_nbytes: int = 1 << 30) -> None:
        self.registered: dict[int, int] = {}
        self._largest_nbytes = largest_nbytes

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if nbytes > self._largest_nbytes:
            return 2  # cudaErrorMemoryAllocation
        assert address not in self.registered
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert not any(stream._work for stream in Stream.all), "a copy would write to it"
        del self.registered[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    return cudart


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch, cudart: Cudart) -> Stream:
    """The stream on which steps are computed."""
    Stream.all = []
    compute = Stream.current = Stream()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, Stream.current = Stream.current, stream
        yield
        Stream.current = before

    copy = torch.Tensor.copy_

    def run_all(device: torch.device) -> None:
        for stream in Stream.all:
            stream.run()

    def copy_later(into: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert non_blocking, "the host would wait"
        Stream.current.do(lambda: copy(into, source))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
    monkeypatch.setattr(torch.cuda, "synchronize", run_all)
    return compute


def test_copies_come_after_the_work_before_them_and_beside_the_work_after(compute: Stream) -> None:
    cache = torch.zeros(6, 3)
    copier = StreamCopier(cache, 4)
    saves, loads = Stream.all[1:]
    compute.do(lambda: cache.fill_(7.0))  # the step that fills the blocks
    copier.save([(2, 0), (3, 1), (5, 3)])
    compute.do(lambda: cache.fill_(9.0))  # a later step
    saves.run()
    assert copier.take_saved() == 1 and copier.take_saved() == 0
    assert copier.read_slot(0) == copier.read_slot(3) == torch.full((3,), 7.0).numpy().tobytes()
    copier.load([(0, 4), (3, 1)])
    copier.load([(1, 0)])
    assert not copier.take_loaded()
    loads.run()
    assert cache[:, 0].tolist() == [7.0, 7.0, 9.0, 9.0, 7.0, 9.0]
    assert copier.take_loaded() == [pytest.approx(2e-3)] * 2 and not copier.take_loaded()


def taken(late: Sequence[Callable[[], bytes]]) -> list[float]:
    """The blocks, of one number each."""
    return [torch.frombuffer(bytearray(take()), dtype=torch.float32).item() for take in late]


@pytest.mark.parametrize("is_taken_first", [True, False])
def test_evicted_blocks_are_read_before_later_work_overwrites_them(
    is_taken_first: bool, compute: Stream
) -> None:
    cache = torch.arange(8.0).view(8, 1)
    read = BlockReader(cache, 4)
    began: list[bool] = []
    compute.do(lambda: began.append(True))  # a step under way, which writes to other blocks
    late = read([5, 1, 2, 7])
    compute.do(lambda: cache.fill_(-1.0))  # the next step owns the blocks
    if is_taken_first:
        assert taken(late) == [5.0, 1.0, 2.0, 7.0]
        assert not began, "the store's thread waits for the copy alone"
    compute.run()
    assert cache[5] == -1.0
    if not is_taken_first:
        assert taken(late) == [5.0, 1.0, 2.0, 7.0]


def test_who_reads_blocks_does_not_wait(compute: Stream) -> None:
    read = BlockReader(torch.arange(8.0).view(8, 1), 4)
    copies = Stream.all[1]
    late = read([3, 4])
    num_waits = copies.num_waits
    assert read([]) == [] and num_waits == 0 and copies._work
    read.wait()  # who writes past the device's queue
    assert copies.num_waits == num_waits + 1 and not copies._work
    assert taken(late) == [3.0, 4.0]
    compute.run()


def test_memory_of_a_taken_block_is_used_again(compute: Stream) -> None:
    cache = torch.arange(8.0).view(8, 1)
    read = BlockReader(cache, 2)
    for first in range(0, 8, 2):
        assert taken(read([first, first + 1])) == [first, first + 1]
    compute.run()


def test_an_evicted_block_reaches_the_store_while_the_engine_goes_on(compute: Stream) -> None:
    cache = torch.arange(8.0).view(8, 1)
    gate = Gate()
    gate.open.clear()
    tier = ColdTier(StoreThread(gate, 4), TransferTimeModel())
    tier.offer([(0, name(9))], lambda numbers: [bytes(4)])
    assert gate.entered.acquire(timeout=60)  # the store's thread is busy
    offload = KVOffload(SimpleNamespace(), None, tier, BlockReader(cache, 4))  # type: ignore[arg-type]
    names = [name(number) for number in range(3)]
    offload.save_evicted(list(zip((6, 2, 3), names, strict=True)))
    compute.do(lambda: cache.fill_(-1.0))
    compute.run()  # the device is done before anybody takes the bytes
    gate.open.set()
    assert tier.close(60.0)
    found = gate.store.get_many(names)
    assert found == [torch.tensor([each]).numpy().tobytes() for each in (6.0, 2.0, 3.0)]


def test_memory_that_nobody_closes_is_unregistered(compute: Stream, cudart: Cudart) -> None:
    read = BlockReader(torch.zeros(6, 3), 2)
    assert len(cudart.registered) == 1
    del read
    gc.collect()
    assert not cudart.registered


def test_exactly_what_was_asked_for_is_pinned_and_all_of_it_given_back(
    compute: Stream, cudart: Cudart
) -> None:
    cache = torch.ones(6, 3, dtype=torch.bfloat16)
    copier = StreamCopier(cache, 5)
    assert [*cudart.registered.values()] == [5 * 3 * 2], "and not the next power of two"
    copier.save([(2, 0)])
    copier.close()
    assert not cudart.registered


@pytest.mark.parametrize("has_cuda", [True, False])
def test_memory_that_cannot_be_pinned_is_refused_in_words(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cudart() -> Cudart:
        if not has_cuda:
            raise AssertionError("Torch not compiled with CUDA enabled")
        return Cudart(largest_nbytes=40)

    monkeypatch.setattr(torch.cuda, "cudart", cudart)
    with pytest.raises(StartupError, match=r"48 bytes of host memory cannot be pinned") as refused:
        StreamCopier(torch.zeros(6, 3), 4)
    assert refused.value.param == "kv_offloading_size"
