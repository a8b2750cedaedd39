"""A worker with a fake model that only keeps time; everything around the model is real.

Scheduler, block pool, KV import, streams and links are real. A step takes `STEP_S` whatever it has,
and gives every sequence the same token.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from pathlib import Path

from disagg.config import ServeConfig, TierConfig
from disagg.engine.engine import Engine
from disagg.engine.sched.block_pool import BlockPool
from disagg.engine.sched.scheduler import Scheduler
from disagg.engine.sched.step import StepPlan
from disagg.kvtransfer.local_transport import LocalFleet, LocalTransport
from disagg.kvtransfer.slab import Slab, Stamps
from disagg.worker.parts import Parts

STEP_S = 0.02  # 50 tokens/s for each stream
MARKER = " the"  # the text of every token: one token of the demo models
NUM_BLOCKS, BLOCK_SIZE, BLOCK_NBYTES = 1 << 16, 16, 16
MAX_MODEL_LEN = 1 << 14
ENGINE_THREAD = "engine"


class PacedRunner:
    """Steps on a beat."""

    def __init__(
        self, token_id: int, timer: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self._token_id = token_id
        self._timer = timer
        self._sleep = sleep
        self._next_s = 0.0
        self._is_named = False

    def run(self, plan: StepPlan) -> list[int | None]:
        if not self._is_named:
            name_thread(ENGINE_THREAD)
            self._is_named = True
        now = self._timer()
        # What is done between steps does not make them fewer; behind a pause a new beat begins, so
        # that each step takes its time.
        is_next = now < self._next_s + STEP_S / 2
        self._next_s = (self._next_s if is_next else now) + STEP_S
        self._sleep(self._next_s - now)
        num_decodes = plan.num_decodes
        chunks = zip(plan.sequences[num_decodes:], plan.query_lens[num_decodes:], strict=True)
        return [self._token_id] * num_decodes + [
            self._token_id if num_tokens == sequence.num_uncomputed else None
            for sequence, num_tokens in chunks
        ]


def name_thread(name: str) -> None:
    """Show the calling thread under `name` in /proc, for whoever measures from outside."""
    Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


def paced_parts(
    config: ServeConfig, tier: TierConfig, worker_id: str, epoch: int, progress: object = None
) -> Parts:
    """In the place of `worker.parts.build_parts`. Nothing takes long enough for `progress`."""
    from disagg.models.description import describe_model
    from disagg.text.tokenizer import Tokenizer

    model = describe_model(tier.directory)
    tokenizer = Tokenizer.from_json(model.read_tokenizer(), model.source)
    (token_id,) = tokenizer.encode(MARKER, add_special_tokens=False)
    memory = (ctypes.c_ubyte * (NUM_BLOCKS * BLOCK_NBYTES))()
    slab = Slab(ctypes.addressof(memory), NUM_BLOCKS, BLOCK_NBYTES, "paced", owner=memory)
    stamps = Stamps(NUM_BLOCKS, worker_id, epoch)
    scheduler = Scheduler(
        BlockPool(NUM_BLOCKS, BLOCK_SIZE, stamps.generations),
        max_num_seqs=1024,
        max_num_batched_tokens=1 << 16,
        max_model_len=MAX_MODEL_LEN,
    )
    return Parts(
        Engine(scheduler, PacedRunner(token_id, time.monotonic, time.sleep)),
        stamps,
        LocalTransport(LocalFleet(), slab, stamps, clock=time.monotonic),
        None,
        lambda block_ids: [bytes(BLOCK_NBYTES)] * len(block_ids),
        lambda block_id, raw: None,
    )
