"""In how few runs a long prompt lies, in pools that have long been full of cached prefixes."""

from __future__ import annotations

import random
from itertools import count

from disagg.engine.sched.block_pool import BlockPool
from disagg.kvtransfer.slab import merge_runs

BLOCK_SIZE, NUM_BLOCKS = 16, 1400
LONG = 4096 // BLOCK_SIZE
SIZES = (4, 8, 16, 32, 64, 128, LONG)  # of prompts, in blocks
MAX_DESCRIPTORS = 64


def long_prompts(seed: int, num_prompts: int = 900) -> list[list[int]]:
    """The blocks of the long ones among many prompts, from where no block is fresh any more.

    Half of the pool is held, everything is cached, and who decodes takes one block at a time.
    """
    rng, names = random.Random(seed), count()
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, [0] * NUM_BLOCKS)
    running: list[list[int]] = []
    found: list[list[int]] = []
    for turn in range(num_prompts):
        size = rng.choice(SIZES)
        while sum(map(len, running)) + size > NUM_BLOCKS // 2:
            pool.release(running.pop(rng.randrange(len(running))))
        for block_ids in running[-3:]:
            block_ids += pool.allocate(1) or []
            pool.publish(block_ids[-1], b"%d" % next(names))
        prompt = pool.allocate(size)
        assert prompt is not None, "half of the pool is not held"
        if size == LONG and turn > num_prompts // 2:
            found.append(list(prompt))
        for block_id in prompt:
            pool.publish(block_id, b"%d" % next(names))
        running.append(prompt)
    return found


def most_descriptors() -> int:
    """Of all pulls of such a prompt from one such pool into another."""
    pairs = zip(long_prompts(1), long_prompts(2), strict=False)
    numbers = [len(merge_runs(zip(*pair, strict=True))) for pair in pairs]
    assert len(numbers) > 20
    return max(numbers)


def test_a_prompt_of_4096_tokens_moves_with_few_descriptors() -> None:
    assert most_descriptors() <= MAX_DESCRIPTORS
