"""The parts of a worker: engine, KV memory, transport, store. They are built once, at start."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import time
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from disagg.adapters import AdapterEntry
from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import largest_step, step_times
from disagg.config import EngineConfig, ServeConfig, TierConfig, TransferPrior
from disagg.engine.device.choices import choose_device
from disagg.engine.engine import Engine
from disagg.errors import NotEnoughMemory, StartupError
from disagg.imports import uncollected_imports
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.slab import HOST, Slab, Stamps, allocate_host
from disagg.kvtransfer.transport import Transport
from disagg.kvtransfer.ucx import LOOPBACK, interface_of
from disagg.messages import StartStep
from disagg.models.adapter import configured_adapters
from disagg.models.description import describe_model
from disagg.store.block_copier import BlockCopier, ThreadCopier
from disagg.store.cold_tier import Block, ColdStore, ColdTier, StoreThread, num_queueable
from disagg.store.host_tier import HostTier
from disagg.time_model import StepTimeModel, TransferTimeModel
from disagg.worker.first_steps import first_steps
from disagg.worker.kv_import import KVTier
from disagg.worker.other_rank import RankNodes
from disagg.worker.ranked import RankedCopier, RankedFetches, RankedStoreThread, RankedTransport
from disagg.worker.ranks import Ranks
from disagg.worker.tiers import StoreLookup

if TYPE_CHECKING:  # needs torch
    from disagg.engine.device.kv_cache import KVCache
    from disagg.engine.device.stream_copier import BlockReader

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Parts:
    """A worker's parts.

    read_blocks, write_block: read and write the bytes of blocks by block id, for the cold tier.
    host_tier: keeps copies of blocks in host memory.
    first_times: the time model before the first request, from measured steps and the roofline.
    max_requests_nbytes: limit of the memory of all prompts in the worker, waiting and running.
    transfer_prior: predicted times of pulls until one is measured.
    ranks: the other ranks of the worker, if it has several.
    adapters: the LoRA adapters that are served from the start.
    """

    engine: Engine
    stamps: Stamps
    transport: Transport
    cold_tier: ColdTier | None
    read_blocks: Callable[[Sequence[int]], Sequence[Block]]
    write_block: Callable[[int, bytes], None]
    first_times: StepTimeModel = StepTimeModel()  # noqa: RUF009 - it is frozen
    max_requests_nbytes: int = EngineConfig().max_requests_nbytes
    host_tier: HostTier | None = None
    transfer_prior: TransferPrior | None = None
    ranks: Ranks | None = None
    adapters: Sequence[AdapterEntry] = ()

    def tiers(self) -> list[KVTier]:
        """The tiers behind this worker's cache, fastest first."""
        tiers: list[KVTier] = []
        if self.host_tier is not None:
            tiers.append(self.host_tier)
        if self.cold_tier is not None:
            fetches = None if self.ranks is None else RankedFetches(self.ranks.tasks)
            tiers.append(StoreLookup(self.cold_tier, self.write_block, fetches))
        return tiers


def build_parts(
    config: ServeConfig,
    tier: TierConfig,
    worker_id: str,
    epoch: int,
    local_fleet: LocalFleet | None = None,
    progress: Callable[[StartStep], None] = lambda step: None,
    nodes: RankNodes | None = None,
) -> Parts:
    """Load the model and reserve the memory. Slow: seconds to minutes.

    Args:
        local_fleet: connects the workers of this process with `transport: local`.
        progress: called with the progress, in the calling thread.
        nodes: the nodes of the worker, if it has several.

    Raises:
        StartupError: the worker cannot start.
    """
    if tier.engine.nnodes > 1 and nodes is None:
        raise StartupError(
            f"Tier {tier.name!r} has nnodes = {tier.engine.nnodes}, which needs Ray; a fleet in"
            " one process has one node.",
            param="nnodes",
        )
    ranks: Ranks | None = None
    with contextlib.ExitStack() as on_error:
        if tier.engine.tensor_parallel_size > 1:
            ranks = Ranks(config, tier, worker_id, epoch, nodes)
            on_error.callback(ranks.close)
        # Imported here so that this package can be imported without torch.
        with uncollected_imports():
            from disagg.engine.device.build import build_engine

        made: list[Stamps] = []

        def new_generations(num_blocks: int) -> MutableSequence[int]:
            made.append(Stamps(num_blocks, worker_id, epoch))
            return made[0].generations

        model, engine_config = describe_model(tier.directory), tier.engine
        adapters = configured_adapters(
            tier.lora_modules, tier.name, model, engine_config.max_lora_rank
        )
        if ranks is not None:
            engine_config = msgspec.structs.replace(engine_config, num_threads=ranks.num_threads)
        gpu_name = first_gpu(tier.engine)
        engine, kv_cache = build_engine(
            engine_config,
            model,
            progress,
            new_generations,
            largest_step=largest_step(tier.engine, model, gpu_name),
            followers=ranks,
        )
        prior, roofline = step_times(
            shape_of(model),
            gpu_name,
            tier.engine.tensor_parallel_size,
            expert_parallel=tier.engine.enable_expert_parallel,
        )
        log.info(
            "Step times of %s are predicted from the roofline of %s at first.", tier.name, roofline
        )
        stamps = made[0]
        memory = RankMemory.build(config, tier.engine, kv_cache, stamps, local_fleet)
        cold_tier = new_cold_tier(memory.store, memory.slab, ranks)
        copier, transport, host_tier = memory.copier, memory.transport, None
        if ranks is not None:
            ranks.check_layout(transport.peer.layout)
            transport = RankedTransport(transport, ranks.tasks)
        if copier is not None:
            if ranks is not None:
                copier = RankedCopier(copier, ranks.tasks)
            block_nbytes = memory.slab.block_nbytes * tier.engine.tensor_parallel_size
            displaced = partial(cold_tier.offer, in_host=True) if cold_tier is not None else None
            host_tier = HostTier(
                copier,
                memory.num_slots,
                block_nbytes,
                stamps.generations,
                displaced,
                engine.pool.groups.reported,
            )
        parts = Parts(
            engine,
            stamps,
            transport,
            cold_tier,
            memory.read_blocks,
            kv_cache.write_block,
            first_steps(engine, time.perf_counter, prior),
            tier.engine.max_requests_nbytes,
            host_tier,
            config.transfer_prior,
            ranks,
            adapters,
        )
        on_error.pop_all()
        return parts


def first_gpu(config: EngineConfig) -> str:
    """The name of a worker's first GPU, with which all its ranks plan; "" on a CPU."""
    from disagg.kernels.dispatch import device_name

    return device_name(HOST if choose_device(config) == "cpu" else 0)


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The KV memory of one rank, and what moves its blocks.

    store: for its part of evicted blocks.
    num_slots: blocks in host memory behind the cache.
    copier: copies to and from there; None if there is none.
    read_blocks: see `Parts`.
    """

    slab: Slab
    store: ColdStore | None
    num_slots: int
    copier: BlockCopier | None
    read_blocks: Callable[[Sequence[int]], Sequence[Block]]
    transport: Transport

    @classmethod
    def build(
        cls,
        config: ServeConfig,
        engine: EngineConfig,
        kv_cache: KVCache,
        stamps: Stamps,
        local_fleet: LocalFleet | None = None,
    ) -> RankMemory:
        """Raises `StartupError`, also as `NotEnoughMemory`."""
        shape = kv_cache.shape
        slab = Slab(
            kv_cache.base_address,
            kv_cache.num_blocks,
            kv_cache.block_nbytes,
            kv_cache.layout,
            kv_cache.device_id,
            owner=kv_cache,
            part=shape.part,
        )
        num_slots = num_host_blocks(engine, slab.block_nbytes * engine.tensor_parallel_size)
        store = new_store(config, engine, kv_cache.layout, shape.own_heads, shape.num_kv_heads)
        reader: BlockReader | None = None
        if store is not None and slab.device_id != HOST:
            from disagg.engine.device.stream_copier import BlockReader

            # More blocks than this never wait to be stored.
            reader = BlockReader(kv_cache.slab, num_queueable(slab.block_nbytes))
        return cls(
            slab,
            store,
            num_slots,
            new_copier(kv_cache, slab, num_slots) if num_slots else None,
            reader or kv_cache.read_blocks,
            new_transport(
                config,
                slab,
                stamps,
                local_fleet,
                kv_cache.begin_thread,
                reader.wait if reader is not None else lambda: None,
            ),
        )


def new_transport(
    config: ServeConfig,
    slab: Slab,
    stamps: Stamps,
    local_fleet: LocalFleet | None,
    begin_thread: Callable[[], None] = lambda: None,
    before_pull: Callable[[], None] = lambda: None,
) -> Transport:
    """Make the transport that the configuration names. `NixlTransport` has the arguments."""
    if config.transport == "local":
        fleet = local_fleet if local_fleet is not None else LocalFleet()
        return LocalTransport(fleet, slab, stamps, clock=time.monotonic)
    # NIXL here and Redis below are imported only by workers that use them.
    from disagg.kvtransfer.nixl_transport import NixlTransport

    if slab.device_id != HOST:
        _warn_of_allocator(os.environ)
    return NixlTransport(
        slab,
        stamps,
        clock=time.monotonic,
        interface=transfer_interface(config),
        ucx=config.ucx,
        begin_thread=begin_thread,
        before_pull=before_pull,
    )


def _warn_of_allocator(environment: Mapping[str, str]) -> None:
    """Warn if torch does not allocate with `cudaMalloc`, which CUDA IPC needs."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        if "expandable_segments:true" in environment.get(name, "").lower().replace(" ", ""):
            log.warning(
                "%s has expandable_segments:True. CUDA IPC cannot share such memory, so KV may move"
                " between GPUs of this machine through host memory (see the lane in /metrics);"
                " remove the setting.",
                name,
            )


def transfer_interface(config: ServeConfig) -> str | None:
    """The network interface for UCX.

    It is the configured one, or None to let UCX's environment variables decide, or the interface of
    the worker's address.
    """
    if config.transfer_interface is not None:
        return config.transfer_interface
    if "UCX_NET_DEVICES" in os.environ:
        return None
    if config.link_host is None:  # all workers are in this process
        return LOOPBACK
    return interface_of(config.link_host)


def new_store(
    config: ServeConfig,
    engine: EngineConfig,
    layout: str,
    pieces: range = range(1),
    num_pieces: int = 1,
) -> ColdStore | None:
    """The store for evicted blocks; None if none is configured or KV is not to be stored.

    Args:
        pieces: the pieces of a block (KV heads) that are here, out of `num_pieces`.
    """
    if config.redis_url is None or not config.cold_tier_nbytes or not engine.enable_prefix_caching:
        return None
    from disagg.store.redis_store import RedisStore

    secret = config.cluster_key.encode()
    return RedisStore(config.redis_url, layout, pieces=pieces, num_pieces=num_pieces, secret=secret)


def new_cold_tier(
    store: ColdStore | None, slab: Slab, ranks: Ranks | None = None
) -> ColdTier | None:
    """The cold tier of the first rank, if there is a store."""
    if store is None:
        return None
    nbytes = slab.block_nbytes
    thread = (
        StoreThread(store, nbytes)
        if ranks is None
        else RankedStoreThread(store, nbytes, ranks.tasks)
    )
    return ColdTier(thread, TransferTimeModel())


def num_host_blocks(config: EngineConfig, block_nbytes: int) -> int:
    """Number of blocks in the host tier; 0 if there is none.

    Args:
        block_nbytes: size of a block on all ranks together.

    Raises:
        NotEnoughMemory: the machine has less memory, or not even one block fits.
    """
    nbytes = int(config.kv_offloading_size * 2**30)
    where = "this machine has" if config.nnodes == 1 else "the nodes have"
    machine_nbytes = config.nnodes * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if nbytes and not block_nbytes <= nbytes <= machine_nbytes:
        raise NotEnoughMemory(
            f"kv_offloading_size = {config.kv_offloading_size} GiB is {nbytes} bytes, but a KV"
            f" block has {block_nbytes} and {where} {machine_nbytes}. Choose a size in between.",
            param="kv_offloading_size",
        )
    return nbytes // block_nbytes


def new_copier(kv_cache: KVCache, slab: Slab, num_slots: int) -> BlockCopier:
    """A copier between a cache and `num_slots` blocks of host memory."""
    if slab.device_id != HOST:
        from disagg.engine.device.stream_copier import StreamCopier

        return StreamCopier(kv_cache.slab, num_slots)
    memory = allocate_host(num_slots * slab.block_nbytes)
    # The view keeps the memory alive; an mmap with a view cannot be closed.
    view = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(view)
    host = Slab(address, num_slots, slab.block_nbytes, slab.layout, owner=view)
    return ThreadCopier(slab, host, time.perf_counter)
