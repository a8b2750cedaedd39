"""A token of a draft stands where the model finds it nearly as likely as its likeliest; else the
model chooses as without a deferral rule."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from disagg.engine.device.deferral import Deferral
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.speculation import rows
from disagg.engine.sched.step import SampledToken
from disagg.errors import InvalidLogits
from disagg.kernels.sampling_rows import SamplingOps
from disagg.kernels.torch.sampling import TorchSampling
from tests.engine.device.test_sampler import VOCAB_SIZE, new_sequence, params, random_logits

CPU = torch.device("cpu")
SHARE, BANNED = 0.6, 7
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 1e-4},
    "warm": {"temperature": 1.5, "logprobs": 1},
    "top-k": {"temperature": 1.5, "top_k": 1},
    "top-p": {"temperature": 1.5, "top_p": 0.3},
    "min-p": {"temperature": 1.5, "min_p": 0.9},
    "limited": {"allowed_token_ids": [each for each in range(VOCAB_SIZE) if each != BANNED]},
    "at least": {"stop_token_ids": (BANNED,), "min_tokens": 50},
}


@pytest.mark.parametrize("ops", [None, TorchSampling()], ids=["", "torch"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_stands(name: str, ops: SamplingOps | None) -> None:
    """Sequences with drafts of 0 to 3 tokens, whose first one is forbidden for some."""
    sequences, wanted = [], list[int | None]()
    for seed in range(24):
        one = new_sequence(params(seed=seed, **SAMPLINGS[name]))
        one.draft = tuple((BANNED + 11 * seed + i * seed) % VOCAB_SIZE for i in range(seed % 4))
        wanted += [*one.draft, None]
        sequences.append(one)
    logits = random_logits(len(wanted), scale=0.8)
    found = []
    for deferral in (None, Deferral(SHARE)):
        slots = Slots()
        sampler = Sampler(slots, VOCAB_SIZE, CPU, ops, deferral=deferral)
        sampler.enter([new.slot for new in slots.enter(sequences)])
        of_step = [row for each in sequences for row in rows(each, 2 + len(each.draft))]
        positions = torch.tensor([each.num_tokens - 1 for each in of_step])
        found.append(sampler.sample(logits.clone(), of_step, positions).read())
        for each in sequences:
            each.slot = -1
    probabilities = torch.softmax(logits.double(), -1)
    num_standing = 0
    for row, (draft, plain, chosen) in enumerate(zip(wanted, *found, strict=True)):
        of_row = probabilities[row]
        if name in ("limited", "at least"):
            of_row[BANNED] = 0.0
        stands = draft is not None and bool(of_row[draft] >= (1 - SHARE) * of_row.max())
        assert chosen.token_id == (draft if stands else plain.token_id)
        if chosen.logprobs is not None:  # of the model, whatever stands
            expected = torch.log_softmax(logits[row], -1)[chosen.token_id]
            assert chosen.logprobs.logprob == pytest.approx(float(expected), abs=1e-5)
        num_standing += stands and chosen.token_id != plain.token_id
    assert num_standing > 2


def test_logits_that_are_broken_are_noticed() -> None:
    one = new_sequence(params(temperature=0.0))
    one.draft = (3, 3)
    logits = random_logits(3)
    logits[0, 3], logits[1, 5] = torch.inf, torch.nan
    slots = Slots()
    sampler = Sampler(slots, VOCAB_SIZE, CPU, deferral=Deferral(SHARE))
    sampler.enter([new.slot for new in slots.enter([one])])
    found = sampler.sample(logits, [*rows(one, 4)], torch.tensor([1, 2, 3])).sampled()
    kinds = [type(each) for each in found]
    assert kinds == [InvalidLogits, InvalidLogits, int] and SampledToken not in kinds
