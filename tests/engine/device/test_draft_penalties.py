"""Rows of a draft with penalties are adjusted on the device, in few calls and without a wait. (That
the tokens are right is in `tests/engine/test_sampling_parity.py`.)"""

from __future__ import annotations

import torch

from bench.sampler import Calls, kernels_that_do_nothing
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.speculation import Continued, DraftedSequence
from disagg.kernels.gpu.sampling import TritonSampling
from tests.engine.device.test_sampler import VOCAB_SIZE, new_sequence, params, random_logits, sample
from tests.engine.device.test_sampling_law import WAITING


def test_a_step_of_drafts_with_penalties_is_few_calls_and_none_that_waits() -> None:
    """As many with eight drafts as with one."""
    nums_calls = []
    for num_seqs in (1, 8):
        sampling = params(repetition_penalty=1.05, top_p=0.8, min_tokens=3, stop_token_ids=(9,))
        sequences = [new_sequence(sampling) for _ in range(num_seqs)]
        slots, rows = Slots(num_seqs), list[Continued]()
        with kernels_that_do_nothing() as launched:
            sampler = Sampler(slots, VOCAB_SIZE, torch.device("cpu"), TritonSampling())
            sampler.enter([each.slot for each in slots.enter(sequences)])
            for sequence in sequences:
                sequence.draft = (5, 6, 5, 7)
                rows += [sequence, *(DraftedSequence(sequence, n + 1) for n in range(4))]
            positions = torch.tensor([row.num_tokens - 1 for row in rows])
            logits = torch.empty(len(rows), VOCAB_SIZE)
            sampler.sample(logits, rows, positions)
            launched.clear()
            with Calls() as calls:
                sampler.sample(logits, rows, positions)
        assert not WAITING & set(calls.names), calls.names
        assert launched.count("_adjust") == 1
        calls.names["zero_"] -= launched.count("_pick")  # of the stand-in
        nums_calls.append(calls.num_calls + len(launched))
    assert nums_calls[0] == nums_calls[1] <= 30


def test_a_draft_is_penalised_for_what_it_repeats_and_may_not_end_early() -> None:
    logits = random_logits(4)
    p = params(
        temperature=0.0,
        repetition_penalty=1.5,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        min_tokens=3,
        stop_token_ids=(7,),
    )
    sequence = new_sequence(p, (3, 4), (4,))
    sequence.draft = (7, 7, 3)
    given, slots = logits.clone(), Slots()
    sampler = Sampler(slots, VOCAB_SIZE, logits.device)
    sampler.enter([each.slot for each in slots.enter([sequence])])
    rows: list[Continued] = [sequence, *(DraftedSequence(sequence, n + 1) for n in range(3))]
    positions = torch.tensor([row.num_tokens - 1 for row in rows])
    found = sampler.sample(given, rows, positions).read()
    for n, row in enumerate(rows):
        alone = logits[n : n + 1].clone()
        same = new_sequence(p, (3, 4), tuple(row.tokens[2:]))
        assert sample(alone, [same])[0].token_id == found[n].token_id
        torch.testing.assert_close(given[n], alone[0])
    assert given[1, 7] == -torch.inf and given[2, 7] > -torch.inf
