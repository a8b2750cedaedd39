"""A sequence that breaks the host code of a step ends alone, and the others do not notice."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import Tensor

from disagg.engine.device import runner as runner_module
from disagg.engine.device import sampling_state
from disagg.engine.device.batching import Batching, StepInputs
from disagg.engine.device.followers import Followers
from disagg.engine.device.logit_edits import LogitEdits
from disagg.engine.device.sampler import Sampler
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.engine.sched.step import StepPlan
from disagg.errors import RequestError, RequestFailed
from disagg.models.communicator import Communicator
from disagg.models.decoder import Decoder
from tests.engine.test_launching import (
    DRAWN,
    GREEDY,
    LateRunner,
    build,
    play_at_once,
    sequences,
)

UNLUCKY_SEED = 666
SAMPLINGS: list[dict[str, object]] = [
    {**DRAWN, "seed": UNLUCKY_SEED, "logit_bias": ((5, 1.0),)},
    {**GREEDY, "repetition_penalty": 1.3, "logprobs": 1},
    DRAWN,
    GREEDY,
]


# Its tokens are chosen when the step before is applied.
NEEDS_HOST: list[dict[str, object]] = [
    {**SAMPLINGS[0], "bad_words_token_ids": ((1, 2),)},
    *SAMPLINGS[1:],
]


def engine_of(directory: Path, *, is_ahead: bool = False) -> Engine:
    engine = build(directory, num_blocks=60, max_num_seqs=4)
    assert isinstance(engine.runner, LateRunner)
    engine.runner.is_late = False  # a failure of the host is not late
    engine.launcher = engine.runner if is_ahead else None
    return engine


@cache
def said_alone(directory: Path, *, needs_host: bool = False) -> dict[str, list[Any]]:
    """By an engine of one rank that nothing breaks, in order."""
    return play_at_once(engine_of(directory), sequences(6, NEEDS_HOST if needs_host else SAMPLINGS))


def break_numbers(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """When it gets a slot, which is with its first step."""
    numbers = sampling_state._numbers

    def breaks(sequence: Sequence) -> Any:
        if sequence.sampling.seed == UNLUCKY_SEED:
            return numbers(sequence)._replace(top_k=1 << 64)
        return numbers(sequence)

    monkeypatch.setattr(sampling_state, "_numbers", breaks)


def break_edits(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """When the step has been computed by the model, and others have entered with it."""
    apply_ = LogitEdits.apply_

    def breaks(self: LogitEdits, logits: Tensor, sequences: SequenceOf[Continued]) -> None:
        for each in sequences:
            if each.sampling.seed == UNLUCKY_SEED and each.num_output_tokens >= num_before:
                raise IndexError("planted")
        apply_(self, logits, sequences)

    monkeypatch.setattr(LogitEdits, "apply_", breaks)


def break_inputs(monkeypatch: pytest.MonkeyPatch, num_before: int) -> None:
    """When the host has written half of what the device gets."""
    inputs = Batching.inputs

    def breaks(self: Batching, plan: StepPlan, entered: SequenceOf[Sequence]) -> StepInputs:
        made = inputs(self, plan, entered)
        for each in plan.sequences:
            if each.sampling.seed == UNLUCKY_SEED and each.num_output_tokens >= num_before:
                raise OverflowError("planted")
        return made

    monkeypatch.setattr(Batching, "inputs", breaks)


@pytest.mark.parametrize(
    ("is_ahead", "needs_host"),
    [(False, False), (True, False), (True, True)],
    ids=["in order", "ahead", "chosen later"],
)
@pytest.mark.parametrize("num_before", [0, 4])
@pytest.mark.parametrize("break_", [break_numbers, break_edits, break_inputs])
def test_others_go_on(
    break_: Any,
    num_before: int,
    is_ahead: bool,
    needs_host: bool,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = said_alone(directory, needs_host=needs_host)
    samplings = NEEDS_HOST if needs_host else SAMPLINGS
    engine = engine_of(directory, is_ahead=is_ahead)
    with monkeypatch.context() as patch:
        break_(patch, num_before)
        found = play_at_once(engine, sequences(6, samplings))
    *tokens, error = found.pop("0")
    assert isinstance(error, RequestFailed) and not error.retryable
    assert tokens == expected["0"][: len(tokens)] and len(tokens) < len(expected["0"])
    assert len(tokens) >= num_before or break_ is break_numbers
    assert found == {name: told for name, told in expected.items() if name != "0"}
    again = play_at_once(engine, sequences(6, samplings))
    assert again == expected, "nothing of the failed step is left"


@pytest.mark.parametrize(
    ("samplings", "num_known"), [(SAMPLINGS, 4), (NEEDS_HOST, 5)], ids=["ahead", "chosen later"]
)
def test_one_that_ends_before_it_is_blamed(
    samplings: list[dict[str, object]],
    num_known: int,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step after its last token fails, which is launched before that token is read."""
    expected = said_alone(directory)["0"]
    stop_id = expected[4]
    assert stop_id not in expected[:4]
    break_edits(monkeypatch, num_known)
    stopping = [{**samplings[0], "stop_token_ids": (stop_id,)}]
    found = play_at_once(engine_of(directory, is_ahead=True), sequences(6, stopping))
    assert found == {"0": expected[:5]}


def test_a_step_that_failed_teaches_no_time(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    break_edits(monkeypatch, 0)
    engine.submit(sequences(6, SAMPLINGS)[0])
    assert engine.step() == [] and not engine.last_plan.sequences
    (event,) = engine.step()
    assert isinstance(event.error, RequestFailed) and not engine.has_work


def test_a_failure_of_no_sequence_is_the_engines(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(directory)
    engine.submit(sequences(6, SAMPLINGS)[0])

    def breaks(*args: object) -> Tensor:
        raise RuntimeError("CUDA error: planted")

    monkeypatch.setattr(Decoder, "forward", breaks)
    with pytest.raises(RuntimeError, match="CUDA error"):
        engine.step()


def test_in_the_middle_of_a_step_of_other_ranks_the_engine_fails(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would take the next one for the rest of it."""
    engine = engine_of(directory)
    assert isinstance(engine.runner, LateRunner)
    engine.runner.followers = Mock(Followers)
    sampling_enter = Sampler.enter

    def breaks(self: Sampler, entered: SequenceOf[int]) -> None:
        sampling_enter(self, entered)
        raise IndexError("planted")

    monkeypatch.setattr(Sampler, "enter", breaks)
    engine.submit(sequences(6, SAMPLINGS)[0])
    with pytest.raises(IndexError, match="planted"):
        engine.step()


@pytest.mark.parametrize("is_device", [False, True], ids=["of the host", "of the device"])
def test_other_ranks_get_no_tokens_from_a_failed_device(
    is_device: bool, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broadcast would fail too, or wait forever, and hide the device's error."""
    engine, ranks = engine_of(directory, is_ahead=True), Mock(Communicator)
    assert isinstance(engine.runner, LateRunner)
    decoder = engine.runner.decoder

    def breaks(*args: object) -> None:
        monkeypatch.setattr(decoder, "ranks", ranks)
        raise IndexError("planted")

    def synchronize(device: object) -> None:
        if is_device:
            raise RuntimeError("CUDA error: planted")

    monkeypatch.setattr(Sampler, "sample", breaks)
    monkeypatch.setattr(runner_module, "_synchronize", synchronize)
    engine.submit(sequences(6, SAMPLINGS)[0])
    with pytest.raises(RuntimeError, match="CUDA") if is_device else nullcontext():
        (event,) = engine.step() or engine.step()
        assert isinstance(event.error, RequestFailed)
    assert ranks.broadcast_.called is not is_device


@pytest.mark.parametrize("token_id", [-1, 260])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", lambda token_id: ((5, 1.0), (token_id, 1.0))),
        ("allowed_token_ids", lambda token_id: (5, token_id)),
        ("bad_words_token_ids", lambda token_id: ((5,), (5, token_id))),
    ],
)
def test_no_request_changes_the_logits_of_others(
    name: str, value: Any, token_id: int, directory: Path
) -> None:
    """In the tensor of a step's logits, the token after a row's last one is of the next row."""
    engine = engine_of(directory)
    for inside in (0, 259):
        engine.submit(sequences(6, [{name: value(inside)}])[0])
        engine.abort("0")
    with pytest.raises(RequestError, match="between 0 and 259"):
        engine.submit(sequences(6, [{name: value(token_id)}])[0])
