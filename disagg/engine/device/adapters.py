"""The LoRA adapters of a worker: host copies, of which some are in slots on the device.

Adapters are read by a thread, and written to a slot between two steps. `AdapterMemory` is what
each rank has; `DeviceAdapters`, on the first rank, decides what is where. A request brings the path
and the digest of its adapter, so a worker needs no list of adapters to serve one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakSet

from disagg.adapters import Adapter
from disagg.config import EngineConfig
from disagg.engine.device.followers import Followers
from disagg.engine.sched.adapter_slots import AdapterSlots
from disagg.engine.sched.sequence import Sequence
from disagg.errors import DisaggError, Unavailable
from disagg.models.adapter import describe_adapter, digest_of
from disagg.models.adapter_weights import AdapterTables, HostAdapter, read_adapter
from disagg.models.decoder import Decoder
from disagg.models.description import ModelDescription
from disagg.models.share import Share
from disagg.rank_messages import RankSlot

_SHARE_OF_NEWEST = 0.3  # of the newest time in the mean of load times


class AdapterMemory:
    """Reserves the memory for a rank's part of adapters, on the host and on its device."""

    def __init__(
        self, decoder: Decoder, description: ModelDescription, share: Share, config: EngineConfig
    ) -> None:
        self._description, self._share, self._config = description, share, config
        self._dtype, self._device = decoder.dtype, decoder.device
        self._tables = decoder.adapters = AdapterTables(
            description.config,
            share,
            config.max_loras,
            config.max_lora_rank,
            decoder.dtype,
            decoder.device,
        )
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._copies: dict[str, Future[HostAdapter]] = {}  # by digest

    def load(self, adapter: Adapter) -> Future[HostAdapter]:
        """Begin to read an adapter into host memory, unless that was begun before."""
        if adapter.digest not in self._copies:
            self._copies[adapter.digest] = self._thread.submit(self._read, adapter)
        return self._copies[adapter.digest]

    def forget(self, digest: str) -> None:
        self._copies.pop(digest, None)

    def write(self, slot: int, digest: str) -> None:
        """Write an adapter that was read to a slot, behind the steps that were launched."""
        self._tables.write(slot, self._copies[digest].result())

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, adapter: Adapter) -> HostAdapter:
        config = self._config
        described = describe_adapter(adapter.path, self._description, config.max_lora_rank)
        read = read_adapter(
            described,
            self._description.config,
            self._dtype,
            self._share,
            pinned=self._device.type == "cuda",
        )
        if digest_of(adapter.path) != adapter.digest:  # after reading, so that both are the same
            raise Unavailable(
                f"The files of the adapter {adapter.name!r} in {adapter.path} have changed since it"
                " was loaded; load it again."
            )
        return read


class DeviceAdapters:
    """Implements `AdapterGate`, for the engine's thread: gives sequences the adapters' slots.

    Args:
        followers: the worker's other ranks.
    """

    def __init__(
        self,
        memory: AdapterMemory,
        config: EngineConfig,
        is_running: Callable[[Sequence], bool],
        followers: Followers | None = None,
    ) -> None:
        self._slots = AdapterSlots(config.max_loras, is_running)
        self._load_s = 0.0  # from the start of reading to the end of writing
        self._memory, self._followers = memory, followers
        self._most = max(config.max_cpu_loras or 0, config.max_loras)
        self._loads: OrderedDict[str, _Load] = OrderedDict()  # by digest, the last used last

    def load(self, adapter: Adapter) -> None:
        self._load(adapter)

    def watch(self, is_running: Callable[[Sequence], bool]) -> None:
        self._slots.is_running = is_running

    def report(self) -> tuple[tuple[str, ...], float]:
        return self._slots.digests, self._load_s

    def is_ready(self, sequence: Sequence) -> bool:
        """Whether the sequence has its adapter's slot. If not, call again later.

        Raises:
            DisaggError: the adapter cannot be loaded.
        """
        adapter = sequence.adapter
        if adapter is None or sequence.adapter_slot >= 0:
            return True
        load = self._load(adapter)
        if load is None:
            return False
        load.sequences.add(sequence)
        if not load.is_done:
            return False
        try:
            load.check()
        except Exception as error:
            self._forget(adapter.digest)  # the next request tries again
            if isinstance(error, Unavailable):
                raise
            why = error.message if isinstance(error, DisaggError) else str(error)
            raise Unavailable(f"The adapter {adapter.name!r} cannot be loaded: {why}.") from error
        taken = self._slots.take(adapter.digest, sequence)
        if taken is None:
            return False
        slot, is_new = taken
        if is_new:
            begun_s = time.perf_counter()
            if self._followers is not None:
                self._followers.follow(RankSlot(slot, adapter.digest))
            self._memory.write(slot, adapter.digest)
            self._measured(load.seconds + time.perf_counter() - begun_s)
        sequence.adapter_slot = slot
        return True

    def close(self) -> None:
        self._memory.close()

    def _load(self, adapter: Adapter) -> _Load | None:
        """None: the host memory is full of adapters for which sequences wait."""
        load = self._loads.get(adapter.digest)
        if load is None:
            if len(self._loads) >= self._most:
                free = (d for d, each in self._loads.items() if not self._is_awaited(each))
                oldest = next(free, None)
                if oldest is None:
                    return None
                self._forget(oldest)
            parts: list[Future[HostAdapter] | Future[None]] = [self._memory.load(adapter)]
            if self._followers is not None:
                parts.append(self._followers.load_adapter(adapter))
            load = self._loads[adapter.digest] = _Load(parts)
        self._loads.move_to_end(adapter.digest)
        return load

    def _is_awaited(self, load: _Load) -> bool:
        is_running = self._slots.is_running
        waits = any(each.adapter_slot < 0 and is_running(each) for each in load.sequences)
        return waits or not load.is_done

    def _forget(self, digest: str) -> None:
        del self._loads[digest]
        self._memory.forget(digest)
        if self._followers is not None:
            self._followers.forget_adapter(digest)

    def _measured(self, seconds: float) -> None:
        share = _SHARE_OF_NEWEST if self._load_s else 1.0
        self._load_s += share * (seconds - self._load_s)


class _Load:
    """The reading of one adapter, on all ranks.

    sequences: those that have asked for it.
    """

    def __init__(self, parts: list[Future[HostAdapter] | Future[None]]) -> None:
        self._parts = parts
        self._begun_s = time.perf_counter()
        self.seconds = 0.0
        self.sequences = WeakSet[Sequence]()
        for part in parts:
            part.add_done_callback(self._ended)

    @property
    def is_done(self) -> bool:
        return all([part.done() for part in self._parts])

    def check(self) -> None:
        """Raise the error of a rank that could not read it."""
        for part in self._parts:
            part.result()

    def _ended(self, part: Future[HostAdapter] | Future[None]) -> None:
        self.seconds = time.perf_counter() - self._begun_s
