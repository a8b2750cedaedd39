"""The slab's layout, the bytes of a block, and how many blocks there are."""

from __future__ import annotations

import ctypes
import dataclasses
import sys

import pytest
import torch

from disagg.config import EngineConfig
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.device.kv_shape import CPU_CACHE_NBYTES, KVShape, choose_num_blocks
from disagg.errors import NotEnoughMemory
from disagg.kernels.kv_pages import FORMATS
from disagg.models.share import Share

CPU = torch.device("cpu")
SHAPE = KVShape(
    num_layers=3,
    num_kv_heads=2,
    block_size=4,
    head_dim=8,
    format=FORMATS["bfloat16"],
    fingerprint="weights",
)


def choose(config: EngineConfig, max_model_len: int = 100, shape: KVShape = SHAPE) -> int:
    return choose_num_blocks(config, shape, max_model_len, None, config.max_num_seqs or 64)


def test_a_block_is_one_run_of_bytes() -> None:
    cache = KVCache(SHAPE, 5, CPU)
    assert cache.pages.values.shape == (5, 3, 2, 2, 4, 8)
    assert cache.block_nbytes == 3 * 2 * 2 * 4 * 8 * 2
    assert not cache.slab.any()
    assert cache.device_id == -1
    cache.pages.values[3] = torch.randn(3, 2, 2, 4, 8)
    raw = ctypes.string_at(cache.base_address + 3 * cache.block_nbytes, cache.block_nbytes)
    assert cache.read_block(3) == raw


def test_a_latent_is_one_vector_of_one_head() -> None:
    shape = dataclasses.replace(SHAPE, num_kv_heads=1, num_vectors=1)
    cache = KVCache(shape, 5, CPU)
    assert cache.pages.values.shape == (5, 3, 1, 1, 4, 8)
    assert cache.block_nbytes == 3 * 4 * 8 * 2
    assert cache.layout != KVCache(dataclasses.replace(shape, num_vectors=2), 5, CPU).layout
    of_rank = dataclasses.replace(shape, share=Share(1, 2))
    assert of_rank.block_nbytes == shape.block_nbytes  # a copy


def test_blocks_move_as_bytes() -> None:
    source, target = KVCache(SHAPE, 5, CPU), KVCache(SHAPE, 4, CPU)
    assert source.layout == target.layout
    source.slab.copy_(torch.randn(source.slab.shape))
    target.write_block(1, source.read_block(4))
    assert torch.equal(target.slab[1], source.slab[4])
    assert not target.slab[0].any() and not target.slab[2:].any()
    with pytest.raises(ValueError, match="7 bytes for a block of 768"):
        target.write_block(1, bytes(7))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 4},
        {"num_kv_heads": 1},
        {"block_size": 8},
        {"head_dim": 16},
        {"format": FORMATS["float16"]},
        {"format": FORMATS["int8"]},
        {"format": FORMATS["fp8"]},
        {"format": FORMATS["int4"]},
        {"fingerprint": "other"},
    ],
)
def test_layout_tells_everything_that_must_match(change: dict[str, object]) -> None:
    assert dataclasses.replace(SHAPE, **change).layout != SHAPE.layout  # type: ignore[arg-type]


def test_settings_decide_the_number_of_blocks() -> None:
    assert choose(EngineConfig(num_gpu_blocks_override=25)) == 25
    nbytes = 40 * SHAPE.block_nbytes + 1
    assert choose(EngineConfig(kv_cache_memory_bytes=nbytes)) == 40
    both = EngineConfig(num_gpu_blocks_override=30, kv_cache_memory_bytes=nbytes)
    assert choose(both) == 30


def test_a_cpu_gets_what_it_can_use_up_to_a_limit() -> None:
    assert choose(EngineConfig(max_num_seqs=2)) == 2 * 25
    many = EngineConfig(max_num_seqs=4096)
    assert choose(many, 4096) == CPU_CACHE_NBYTES // SHAPE.block_nbytes


def test_a_cpu_makes_room_for_one_full_sequence_where_there_is_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In its container, if it has one."""
    max_model_len = 4 * (CPU_CACHE_NBYTES // SHAPE.block_nbytes + 100)
    memory = sys.modules["disagg.engine.device.kv_shape"]
    monkeypatch.setattr(memory, "read_memory", lambda: (1 << 40, 0))
    num_blocks = choose(EngineConfig(), max_model_len)
    assert num_blocks == max_model_len // 4
    monkeypatch.setattr(memory, "read_memory", lambda: (1 << 30, 0))
    with pytest.raises(NotEnoughMemory, match="raise kv_cache_memory_bytes"):
        choose(EngineConfig(), max_model_len)


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (EngineConfig(num_gpu_blocks_override=24), "num_gpu_blocks_override"),
        (EngineConfig(kv_cache_memory_bytes=24 * 768), "kv_cache_memory_bytes"),
    ],
)
def test_too_little_memory_is_refused_with_the_arithmetic(config: EngineConfig, flag: str) -> None:
    with pytest.raises(NotEnoughMemory) as caught:
        choose(config)
    message = caught.value.message
    assert caught.value.param == flag
    for part in ("100 tokens", "25 KV blocks", "768 bytes", "19200", "24 blocks", "to 96 or less"):
        assert part in message
    assert flag in message


def test_a_gpu_gets_what_is_left_of_its_memory() -> None:
    config = EngineConfig(gpu_memory_utilization=0.4)
    room_nbytes = 30 * SHAPE.block_nbytes + 1
    assert choose_num_blocks(config, SHAPE, 100, room_nbytes, max_num_seqs=1) == 30
    for too_little in (24 * SHAPE.block_nbytes, -1):
        with pytest.raises(NotEnoughMemory, match=r"gpu_memory_utilization = 0\.4") as caught:
            choose_num_blocks(config, SHAPE, 100, too_little, max_num_seqs=1)
        assert caught.value.param == "gpu_memory_utilization"
