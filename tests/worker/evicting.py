"""What tests of evicted prefixes share: an engine, and a tier behind it that obeys `fates`."""

from __future__ import annotations

from disagg.engine.sched.sequence import Sequence
from disagg.worker.kv_import import KVImport, KVTier
from tests.engine.fake_runner import expected_tokens
from tests.engine.workload import new_engine, new_sequence
from tests.worker.fates import Fates
from tests.worker.test_kv_import import FakeTransport

BLOCK_SIZE = 4
PROMPT = tuple(range(4, 22))  # four full blocks and a half
NUM_TOKENS = 5  # of an answer
SLOW_S = 5.0  # to compute one token


class Rig:
    def __init__(self, num_blocks: int) -> None:
        self.engine, self.kv = new_engine(num_blocks, BLOCK_SIZE)
        self.fates = Fates(b"\x01")  # when not calm, no copy ends and no store answers
        self.fates.calm = True
        self.now = 0.0

    def import_from(self, tier: KVTier, token_s: float) -> None:
        """Make the KV import whose only tier it is. `token_s`: to compute a token."""
        self.kv_import = KVImport(
            self.engine,
            FakeTransport(),
            lambda source_id, num_blocks: 0.0,
            [tier],
            lambda: lambda num_new, num_before: token_s * num_new,
        )

    def admit(self, prompt: tuple[int, ...] = PROMPT, max_tokens: int = NUM_TOKENS) -> Sequence:
        sequence = new_sequence(prompt, BLOCK_SIZE, max_tokens, stop_ids=frozenset())
        self.kv_import.admit(sequence, None, self.now)
        self.check()
        return sequence

    def check(self) -> None:
        self.engine.check(self.kv_import.holders())

    def run(self) -> None:
        raise NotImplementedError

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


def is_answered(sequence: Sequence, prompt: tuple[int, ...] = PROMPT) -> bool:
    return sequence.tokens[len(prompt) :] == expected_tokens(prompt, NUM_TOKENS)


def check_an_evicted_prefix_is_loaded_and_not_computed(rig: Rig) -> None:
    """Its `PROMPT` was computed, and evicted to the tier."""
    sequence = rig.admit()
    assert rig.kv_import.num_arriving == 1 and not rig.engine.has_work
    rig.run()
    assert is_answered(sequence) and sequence.num_cached_tokens == 16
    assert rig.num_computed == len(PROMPT) - 16 + 4
    assert rig.engine.pool.num_free == rig.engine.pool.num_blocks
