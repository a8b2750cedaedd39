"""Sampling by the defaults of known families has few calls and waits for nothing; by any parameters
it draws what transformers' warpers define."""

from __future__ import annotations

import pytest

from bench import sampler_law
from bench.sampler import FAMILIES, device_calls, new_sequences

# What of torch reads a tensor's values on the host, or makes a result of as many rows as they say:
# an index may be a mask.
WAITING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
WAITING |= {"index", "index_put_", "repeat_interleave", "unique", "_unique2"}


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("num_rows", [1, 32])
def test_default_sampling_is_few_calls_and_none_that_waits(family: str, num_rows: int) -> None:
    sequences = new_sequences(num_rows, 1000, 50, FAMILIES[family][1])
    num_calls, _, names = device_calls(sequences, 1000)
    assert num_calls <= 30
    assert not WAITING & set(names), names
    assert {"_score", "_pick", "_floors"} <= set(names)


@pytest.mark.parametrize("case", [*sampler_law.grid(tiny=True)], ids=lambda case: str(case.params))
def test_tokens_are_drawn_from_what_the_warpers_define(case: sampler_law.Case) -> None:
    row = sampler_law.check(case, 2000)
    assert row["holds"], row
