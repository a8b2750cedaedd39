"""Every block that an engine hands out for new content is NaN until somebody writes it.

So what is read without having been written, values or scales, cannot pass for zeros or for what an
earlier sequence left: it makes the logits NaN, and the test fails. For engines with a real model in
the process of the tests.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import pytest
import torch

from disagg.engine.device.runner import ModelRunner
from disagg.engine.engine import Engine
from disagg.models.decoder import Decoder

NAN_BYTE = 0xFF  # repeated, a NaN in every format and in its scales


class PoisonCount:
    """How many blocks were poisoned so far."""

    num_blocks = 0


def poison_new_blocks(monkeypatch: pytest.MonkeyPatch) -> PoisonCount:
    """Until `monkeypatch` is undone."""
    count = PoisonCount()
    seen: WeakKeyDictionary[Engine, npt.NDArray[np.uint64]] = WeakKeyDictionary()
    give_up, forward = Engine._give_up_evicted, Decoder.forward

    def give_up_and_poison(engine: Engine) -> None:
        """After the last use of the old content, and before the first of the new one."""
        give_up(engine)
        if not isinstance(engine.runner, ModelRunner):
            return
        # A copy: the pool counts on in place.
        generations = np.array(engine.pool.generations, np.uint64)
        (new,) = np.nonzero(generations != seen.get(engine, 0))
        if len(new):
            engine.runner.kv_cache.slab.view(torch.uint8)[new] = NAN_BYTE
            count.num_blocks += len(new)
            seen[engine] = generations

    def checked(decoder: Decoder, *args: object, **options: object) -> torch.Tensor:
        logits = forward(decoder, *args, **options)  # type: ignore[arg-type]
        assert not logits.isnan().any(), "a step read KV that nobody had written"
        return logits

    monkeypatch.setattr(Engine, "_give_up_evicted", give_up_and_poison)
    monkeypatch.setattr(Decoder, "forward", checked)
    return count
