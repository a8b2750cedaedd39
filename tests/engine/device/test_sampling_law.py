"""Sampling by the defaults of known families has few calls and waits for nothing; by any parameters
it draws what transformers' warpers define."""

from __future__ import annotations

import pytest

from bench.sampler import FAMILIES, device_calls, new_sequences
from tests.engine.device import sampling_law

# What of torch reads a tensor's values on the host, or makes a result of as many rows as they say:
# an index may be a mask.
WAITING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
WAITING |= {"index", "index_put_", "repeat_interleave", "unique", "_unique2"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("num_rows", [1, 32])
def test_default_sampling_is_few_calls_and_none_that_waits(family: str, num_rows: int) -> None:
    sequences = new_sequences(num_rows, 1000, 50, FAMILIES[family][1])
    names = device_calls(sequences, 1000)
    assert names.total() <= 30
    assert not WAITING & set(names), names
    assert {"_score", "_pick", "_floors"} <= set(names)


@pytest.mark.parametrize("case", [*sampling_law.grid()], ids=lambda case: str(case.params))
def test_tokens_are_drawn_from_what_the_warpers_define(case: sampling_law.Case) -> None:
    sampling_law.check(case, 2000)


def test_rows_that_share_a_floor_draw_as_those_that_find_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in sampling_law.grid() if case.params.get("top_k") == 1025)
    counts = []
    for num_alone in (1, 100):
        monkeypatch.setattr(sampling_law, "NUM_AS_IN_A_STEP", num_alone)
        counts.append(sampling_law.drawn(case, 100))
    assert counts[0].equal(counts[1]) and counts[0].sum() == 100
