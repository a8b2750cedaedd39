"""Which blocks of ended sequences stay in host memory."""

from __future__ import annotations

from types import SimpleNamespace

from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import DeadlineExceeded, InvalidLogits
from disagg.worker.tiers import KVOffload
from tests.engine.device.test_sampler import new_sequence, params
from tests.store.test_host_tier import Tier, names


def test_blocks_of_a_request_with_invalid_logits_are_forgotten() -> None:
    """They may be the reason, and the next request with this prefix would load them."""
    fixture = Tier(8)
    fixture.save(b"abcxy")
    engine = SimpleNamespace(pool=SimpleNamespace(match=lambda hashes: []))
    offload = KVOffload(engine, fixture.tier, None, lambda block_ids: [])  # type: ignore[arg-type]

    def with_blocks(text: bytes) -> Sequence:
        sequence = new_sequence(params())
        sequence.block_hashes = names(text)
        return sequence

    broken = TokenEvent(with_blocks(b"abc"), error=InvalidLogits("NaN"))
    offload.save((), [broken, TokenEvent(with_blocks(b"xy"), error=DeadlineExceeded("late"))])
    assert fixture.tier.match(names(b"abc")) == 0 and fixture.tier.match(names(b"xy")) == 2
