"""Rows to sample, as tables by slot, and checks that any `SamplingOps` must pass."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch

from disagg.kernels.sampling_rows import (
    FIRST_FLOAT,
    Numbers,
    SampledRows,
    SamplingOps,
    SamplingTables,
)
from disagg.kernels.torch.sampling import TorchSampling

STRANGE = (math.nan, math.inf, math.nan)
OFF = 1 << 31
PLAIN = Numbers(7, OFF, 0, 1.0, math.inf, math.inf, 1.0, 0.0, 0.0)
VOCAB_SIZE = 5 * 256 + 77
# Of top-k and top-p, each off, narrow and wide.
CUTS = [(OFF, 0.9), (20, 0.8), (20, 0.95), (1, 0.5), (3, math.inf), (6, math.inf)]
CUTS += [(7, math.inf), (300, 0.7), (1000, math.inf), (VOCAB_SIZE - 1, 0.3), (OFF, 1e-9)]
CUTS += [(OFF, math.inf), (OFF, 0.9999)]


def logits_of(num_rows: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, VOCAB_SIZE, generator=generator) * scale


def random_numbers(rng: random.Random) -> Numbers:
    return Numbers(
        seed=rng.getrandbits(64) - (1 << 63),
        top_k=rng.choice([OFF, OFF, 1, 2, 5, 20, 300, VOCAB_SIZE - 1, VOCAB_SIZE]),
        min_tokens=rng.choice([0, 0, 9]),
        temperature=rng.choice([0.0, 0.6, 1.0, 1.7]),
        top_p=rng.choice([math.inf, math.inf, 0.95, 0.5, 1e-9]),
        reach=rng.choice([math.inf, math.inf, 0.0, 3.0]),
        repetition_penalty=rng.choice([1.0, 1.3, 0.8]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
    )


def copy_of(tables: SamplingTables) -> SamplingTables:
    return SamplingTables(
        tables.numbers,
        tables.stop_ids,
        tables.seen_ids.clone(),
        tables.num_seen.clone(),
        tables.counts.clone(),
    )


def tables_of(numbers: Sequence[Numbers], vocab_size: int, num_ids: int = 1) -> SamplingTables:
    """Slot i has numbers[i], and has seen nothing."""
    whole = torch.tensor([each[:FIRST_FLOAT] for each in numbers], dtype=torch.int64)
    floats = torch.tensor([each[FIRST_FLOAT:] for each in numbers], dtype=torch.float64)
    return SamplingTables(
        numbers=torch.cat((whole, floats.view(torch.int64)), dim=1),
        stop_ids=torch.full((len(numbers), 1), -1, dtype=torch.int32),
        seen_ids=torch.zeros(len(numbers), num_ids, dtype=torch.int32),
        num_seen=torch.zeros(len(numbers), dtype=torch.int32),
        counts=torch.zeros(len(numbers), vocab_size, dtype=torch.int32),
    )


def rows_of(numbers: Sequence[Numbers], slots: Sequence[int] | None = None) -> SampledRows:
    """Row i is of slots[i], by default of slot i."""
    slots = range(len(numbers)) if slots is None else slots
    own = [numbers[slot] for slot in slots]
    drawn = [row for row, each in enumerate(own) if each.temperature > 0]
    cut = [own[row].top_k < OFF or own[row].top_p < 1 for row in drawn]
    penalised = [
        row
        for row, each in enumerate(own)
        if (each.repetition_penalty, each.presence_penalty, each.frequency_penalty)
        != (1.0, 0.0, 0.0)
    ]
    adjusted = [row for row, each in enumerate(own) if row in penalised or each.min_tokens]

    def rows(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64)

    return SampledRows(
        slots=rows(list(slots)),
        drawn=rows(drawn),
        narrowed=rows([place for place, is_cut in enumerate(cut) if is_cut]),
        adjusted=rows(adjusted),
        remembered=rows(penalised),
        has_min_p=any(own[row].reach < math.inf for row in drawn),
    )


def check_step_after_step(ops: SamplingOps, seed: int) -> None:
    """Penalties count what was chosen before, by `ops` and by torch, in tables of their own."""
    rng = random.Random(seed)
    numbers = [random_numbers(rng) for _ in range(7)]
    slots = rng.sample(range(7), 5)
    rows = rows_of(numbers, slots)
    ours = tables_of(numbers, VOCAB_SIZE, num_ids=30)
    ours.stop_ids = torch.randint(-1, VOCAB_SIZE + 3, (7, 3), dtype=torch.int32)
    theirs = copy_of(ours)
    plain = TorchSampling()
    for token_id in (3, 9, 3, 1000):
        before = torch.arange(7), torch.full((7,), token_id), torch.arange(7)
        ops.remember(ours, *before)
        plain.remember(theirs, *before)
    for position in range(7, 10):
        logits = logits_of(5, 2.0, seed=position)
        positions, expected = torch.full((5,), position), logits.clone()
        if rows.adjusted.shape[0]:
            ops.adjust_(logits, ours, rows, positions)
            plain.adjust_(expected, theirs, rows, positions)
        assert torch.equal(logits, expected)
        chosen = ops.choose(logits, ours, rows, positions)
        assert torch.equal(chosen, plain.choose(expected, theirs, rows, positions))
        ops.remember(ours, rows.slots, chosen[0], rows.remembered)
        plain.remember(theirs, rows.slots, chosen[0], rows.remembered)
        assert torch.equal(ours.counts, theirs.counts)
        assert torch.equal(ours.num_seen, theirs.num_seen)
        for slot, num_seen in enumerate(ours.num_seen.tolist()):
            assert torch.equal(ours.seen_ids[slot, :num_seen], theirs.seen_ids[slot, :num_seen])


def check_greedy_and_unlikely_rows(ops: SamplingOps) -> None:
    """The first of equal logits; rows in which a grammar or `min_tokens` leaves one token."""
    numbers = [PLAIN._replace(temperature=0.0), PLAIN, PLAIN._replace(top_p=0.5, top_k=4)]
    logits = torch.full((3, VOCAB_SIZE), -math.inf)
    logits[0, [70, 900]] = 2.0
    logits[1, 1280] = logits[2, 1300] = -5.0
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    found = ops.choose(logits, tables, rows, torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [[70, 1280, 1300], [0, 0, 0]]


def check_rows_without_a_token(ops: SamplingOps) -> None:
    """Every other row of a broken model has none, whatever its parameters; the rest do not care.

    A token that may not end the answer yet hides nothing.
    """
    kinds = [PLAIN, PLAIN._replace(temperature=0.0), PLAIN._replace(temperature=1e-3, reach=2.0)]
    kinds += [PLAIN._replace(top_k=5), PLAIN._replace(top_p=0.9), PLAIN._replace(min_tokens=9)]
    kinds += [PLAIN._replace(top_k=300, top_p=0.7, repetition_penalty=1.3)]
    numbers = [kind for kind in kinds for _ in ("broken", "sound")]
    tables, rows = tables_of(numbers, VOCAB_SIZE), rows_of(numbers)
    tables.stop_ids[:] = 700
    positions = torch.zeros(len(numbers), dtype=torch.int64)
    sound = logits_of(len(numbers), 1.0)
    sound[1::2, [3, 500, 501, VOCAB_SIZE - 1]] = -math.inf  # of single tokens, which is allowed
    some_groups = sound[1::2, 256:512]
    some_groups[:] = -math.inf

    def choose(logits: torch.Tensor) -> list[list[int]]:
        ops.adjust_(logits, tables, rows, positions)
        chosen: list[list[int]] = ops.choose(logits, tables, rows, positions).tolist()
        return chosen

    expected, has_none = choose(sound.clone())
    assert not any(has_none)
    for strange, places in (
        *(
            (strange, [place])
            for strange, place in zip(STRANGE, (0, 700, VOCAB_SIZE - 1), strict=True)
        ),
        *((strange, range(VOCAB_SIZE)) for strange in (math.nan, math.inf, -math.inf)),
    ):
        logits = sound.clone()
        logits[::2, list(places)] = strange
        token_ids, has_none = choose(logits)
        assert has_none == [1, 0] * len(kinds), (strange, places)
        assert token_ids[1::2] == expected[1::2]
        assert not any(token_ids[::2])
