"""The last step of every arrival: into the engine, or out with the reason."""

from __future__ import annotations

import logging
from collections.abc import Callable

from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.errors import DisaggError, EngineFailed

log = logging.getLogger(__name__)


def enter_or_end(engine: Engine, sequence: Sequence, enter: Callable[[Sequence], None]) -> None:
    """Let a sequence in by `engine.submit` or `engine.join`; a refusal is its only event.

    So is any other failure, unless it left the sequence half inside: then the engine is broken.
    """
    try:
        enter(sequence)
    except Exception as error:
        if sequence in engine.scheduler:
            raise
        if not isinstance(error, DisaggError):
            log.exception("A sequence could not enter the engine.")
            error = EngineFailed(f"The worker failed on this request: {error}.")
        engine.pool.release(sequence.block_ids)
        sequence.block_ids, sequence.num_computed = [], 0
        engine.end(sequence, error)
