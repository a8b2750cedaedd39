"""Finds the sequences that made a step fail in host code, by building each one's rows alone.

A step has rows of many sequences. If one has a number that no tensor can hold, or a grammar that
raises, the exception does not say whose it is. Runs only after a failure, and on the CPU whatever
the engine's device is, because a device that has failed may answer nothing any more.
"""

from __future__ import annotations

import torch

from disagg.engine.device.batching import Batching
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.device.token_masks import bound_rows, token_masks
from disagg.engine.sched.grammar import Grammars
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.kernels.torch.sampling import TorchSampling
from disagg.time_model import StepFeatures

_CPU = torch.device("cpu")


def find_broken(
    plan: StepPlan, block_size: int, max_num_blocks: int, vocab_size: int, grammars: Grammars | None
) -> dict[Sequence, Exception]:
    """The sequences of a plan whose rows cannot be built alone either, and why.

    The sequences have no slots before and afterwards.
    """
    broken: dict[Sequence, Exception] = {}
    for sequence in plan.sequences:
        slots = Slots()
        slots.enter([sequence])
        try:
            _build(sequence, slots, block_size, max_num_blocks, vocab_size, grammars)
        except Exception as error:
            broken[sequence] = error
        slots.leave([sequence])
    return broken


def _build(
    sequence: Sequence,
    slots: Slots,
    block_size: int,
    max_num_blocks: int,
    vocab_size: int,
    grammars: Grammars | None,
) -> None:
    """All that a step does for a sequence, except for the model."""
    alone = StepPlan((sequence,), (sequence.num_uncomputed,), 0, StepFeatures())
    batching = Batching(slots, block_size, max_num_blocks, _CPU)
    batch, _ = batching.batch(batching.inputs(alone, [sequence]))
    masks, _ = token_masks([sequence], bound_rows([sequence]), grammars, _CPU)
    sampler = Sampler(slots, vocab_size, _CPU, TorchSampling())
    sampler.enter([sequence.slot])
    sampler.sample(torch.zeros(1, vocab_size), [sequence], batch.positions[-1:], masks).sampled()
