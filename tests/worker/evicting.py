"""What tests of evicted prefixes share: an engine, and a tier behind it that obeys `fates`."""

from __future__ import annotations

from tests.engine.workload import new_engine
from tests.worker.fates import Fates

BLOCK_SIZE = 4
PROMPT = tuple(range(4, 22))  # four full blocks and a half
SLOW_S = 5.0  # to compute one token


class Rig:
    def __init__(self, num_blocks: int) -> None:
        self.engine, self.kv = new_engine(num_blocks, BLOCK_SIZE)
        self.fates = Fates(b"\x01")  # when not calm, no copy ends and no store answers
        self.fates.calm = True
        self.now = 0.0

    def evict_all(self) -> None:
        """Give every block to somebody else, who writes over it and leaves."""
        blocks = self.engine.reserve(self.engine.pool.num_blocks)
        assert blocks is not None
        for block_id in blocks:
            self.kv.write_block(block_id, b"\xdd" * self.kv.block_nbytes)
        self.engine.pool.release(blocks)

    @property
    def num_computed(self) -> int:
        count: int = self.engine.runner.num_computed  # type: ignore[attr-defined]
        return count

    def forget_num_computed(self) -> None:
        self.engine.runner.num_computed = 0  # type: ignore[attr-defined]
