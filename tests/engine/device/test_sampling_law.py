"""Sampling by the defaults of known families has few calls and waits for nothing; by any parameters
it draws what transformers' warpers define."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.host_step import kernels_that_do_nothing
from bench.requests import FAMILIES, new_sequences
from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.kernels.gpu.sampling import TritonSampling
from tests.engine.device import sampling_law

# What of torch reads a tensor's values on the host, or makes a result of as many rows as they say:
# an index may be a mask.
WAITING = {"item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select"}
WAITING |= {"index", "index_put_", "repeat_interleave", "unique", "_unique2"}

VIEWS = {"view", "slice", "select", "unsqueeze", "squeeze", "t", "split", "split_with_sizes"}
VIEWS |= {"unbind", "expand", "as_strided", "detach", "alias", "_unsafe_view", "lift_fresh"}


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what torch dispatches, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def device_calls(sequences: list[Sequence], vocab_size: int) -> Counter[str]:
    """What a step calls and launches on a GPU's path, views left out; how often, by name."""
    slots, cpu = Slots(), torch.device("cpu")
    logits = torch.empty(len(sequences), vocab_size)
    positions = torch.tensor([len(each.tokens) - 1 for each in sequences])
    with kernels_that_do_nothing() as launched:
        sampler = Sampler(slots, vocab_size, cpu, TritonSampling())
        sampler.enter([sequence.slot for sequence in slots.enter(sequences)])
        for token in sampler.sample(logits, sequences, positions).read():
            assert token.token_id == 0
        for sequence in sequences:
            sequence.tokens.append(0)
        launched.clear()
        with Calls() as calls:
            sampler.sample(logits, sequences, positions).read()
    calls.names["zero_"] -= launched.count("_pick")  # by the kernels that do nothing
    named = {name: num for name, num in calls.names.items() if name not in VIEWS}
    return Counter(named) + Counter(launched)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("num_rows", [1, 32])
def test_default_sampling_is_few_calls_and_none_that_waits(family: str, num_rows: int) -> None:
    sequences = new_sequences(num_rows, 1000, 50, FAMILIES[family][1])
    names = device_calls(sequences, 1000)
    assert names.total() <= 30
    assert not WAITING & set(names), names
    assert {"_score_kernel", "_pick_kernel", "_floors_kernel"} <= set(names)


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
