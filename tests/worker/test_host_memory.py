"""Host memory of a worker: how much there may be, and that every format's bytes survive it."""

from __future__ import annotations

import time

import pytest
import torch

from disagg.blocks import hash_block, hash_root
from disagg.config import EngineConfig
from disagg.config_checks import parse_config
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import KVShape
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kernels.kv_pages import FORMATS
from disagg.kvtransfer.slab import Slab
from disagg.store.host_tier import HostTier
from disagg.worker.parts import new_copier, num_host_blocks

NUM_BLOCKS = 8


def settle(tier: HostTier) -> None:
    while tier.num_under_way:
        tier.poll()
        time.sleep(0.001)
    tier.check()


@pytest.mark.parametrize("format", FORMATS)
def test_blocks_of_every_format_come_back_as_they_were(format: str) -> None:
    shape = KVShape(2, 3, 4, 8, FORMATS[format], "weights")
    cache = KVCache(shape, NUM_BLOCKS, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (NUM_BLOCKS, cache.block_nbytes), generator=generator)
    contents = [bytes(row) for row in blocks.tolist()]
    for block_id, content in enumerate(contents):
        cache.write_block(block_id, content)
    slab = Slab(cache.base_address, NUM_BLOCKS, cache.block_nbytes, cache.layout, owner=cache)
    tier = HostTier(new_copier(cache, slab, 6), 6, cache.block_nbytes, [0] * NUM_BLOCKS)
    root = hash_root("weights", 4)
    names = [hash_block(root, [block_id]) for block_id in range(6)]
    tier.save(list(zip([5, 3, 0, 7, 1, 2], names, strict=True)))
    settle(tier)
    cache.slab.zero_()
    tier.load(names, [0, 1, 2, 4, 3, 7])
    settle(tier)
    found = [cache.read_block(block_id) for block_id in (0, 1, 2, 4, 3, 7)]
    assert found == [contents[block_id] for block_id in (5, 3, 0, 7, 1, 2)]
    assert cache.read_block(5) == cache.read_block(6) == bytes(cache.block_nbytes)
    tier.close()


def test_sizes_are_in_gib_and_must_make_sense() -> None:
    def num_blocks(gib: float) -> int:
        return num_host_blocks(EngineConfig(kv_offloading_size=gib), 1 << 20)

    assert [num_blocks(gib) for gib in (0.0, 1 / 1024, 0.5)] == [0, 1, 512]
    for gib in (1e-5, 1e9):
        with pytest.raises(NotEnoughMemory, match="a KV block has 1048576") as refused:
            num_blocks(gib)
        assert refused.value.param == "kv_offloading_size"


def test_it_is_refused_without_prefix_caching() -> None:
    engine = {"kv_offloading_size": 1.0, "enable_prefix_caching": False}
    with pytest.raises(StartupError, match="finds none of it without prefix caching"):
        parse_config({"tiers": [{"model": "demo-small", "engine": engine}], "cluster_key": "key"})
