"""The last step of every arrival: into the engine, or out with the reason."""

from __future__ import annotations

from collections.abc import Callable

from disagg.engine.engine import Engine
from disagg.engine.sequence import Sequence
from disagg.errors import DisaggError


def enter_or_end(engine: Engine, sequence: Sequence, enter: Callable[[Sequence], None]) -> None:
    """Let a sequence in by `engine.submit` or `engine.join`; a refusal is its only event."""
    try:
        enter(sequence)
    except DisaggError as error:
        engine.pool.release(sequence.block_ids)
        sequence.block_ids, sequence.num_computed = [], 0
        engine.end(sequence, error)
