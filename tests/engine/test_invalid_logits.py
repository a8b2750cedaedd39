"""A model that gives NaN or infinity to one sequence ends that sequence, at that token, alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from disagg.engine.device.runner import ModelRunner
from disagg.engine.device.sampler import Chosen, Sampler
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.speculation import Continued
from disagg.errors import InvalidLogits, ModelError
from tests.engine.test_launching import (
    DRAWN,
    GREEDY,
    LateRunner,
    build,
    play_at_once,
    sequences,
)

NUM_SOUND = 4  # tokens of the answer before the broken ones
MIXTURES: dict[str, list[dict[str, object]]] = {
    "greedy": [GREEDY, GREEDY, DRAWN],
    "drawn": [DRAWN, {**DRAWN, "top_k": 30, "seed": 8}, GREEDY],
    "penalised": [{**GREEDY, "repetition_penalty": 1.3, "logprobs": 2}, DRAWN, GREEDY],
}


def break_logits(
    monkeypatch: pytest.MonkeyPatch, request_id: str, from_position: int, strange: float
) -> None:
    """One sequence's logits are no numbers from this position on."""
    sample = Sampler.sample

    def broken(
        self: Sampler,
        logits: Tensor,
        sequences: SequenceOf[Continued],
        positions: Tensor,
        *args: Any,
        **named: Any,
    ) -> Chosen:
        for row, (each, position) in enumerate(zip(sequences, positions.tolist(), strict=True)):
            sequence = each if isinstance(each, Sequence) else each.sequence
            if sequence.request_id == request_id and position >= from_position:
                logits[row, 77] = strange
        return sample(self, logits, sequences, positions, *args, **named)

    monkeypatch.setattr(Sampler, "sample", broken)


@pytest.mark.parametrize("strange", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("mixture", "how"),
    [
        *itertools.product(sorted(MIXTURES), ("in order", "ahead")),
        *itertools.product(("drawn", "greedy"), ("drafted",)),  # with penalties there are no drafts
    ],
)
def test_one_sequence_ends_at_its_token(
    mixture: str, how: str, strange: float, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build(directory, num_blocks=60, max_num_seqs=4)
    expected = play_at_once(engine, sequences(5, MIXTURES[mixture]))
    assert len(expected["0"]) > NUM_SOUND + 1
    engine = build(directory, num_blocks=60, max_num_seqs=4)
    if how == "ahead":
        assert isinstance(engine.runner, LateRunner)
        engine.launcher = engine.runner
    broken, *others = sequences(5, MIXTURES[mixture])
    break_logits(monkeypatch, "0", broken.num_prompt_tokens + NUM_SOUND - 1, strange)
    broken.draft = tuple(expected["0"][: NUM_SOUND + 3]) if how == "drafted" else ()
    found = play_at_once(engine, [broken, *others])
    *tokens, error = found.pop("0")
    assert tokens == expected.pop("0")[:NUM_SOUND]
    assert isinstance(error, InvalidLogits) and "NaN" in error.message and not error.retryable
    assert found == expected
    assert engine.status().num_corrupted == 1
    assert not engine.pool.match(broken.block_hashes), "its KV may be why"


@pytest.mark.parametrize("strange", [math.nan, -math.inf])
def test_a_model_that_cannot_answer_does_not_start(
    strange: float, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward: Callable[..., tuple[Tensor, Tensor]] = ModelRunner._forward

    def broken(self: ModelRunner, *args: Any) -> tuple[Tensor, Tensor]:
        logits, positions = forward(self, *args)
        return logits.fill_(strange), positions

    monkeypatch.setattr(ModelRunner, "_forward", broken)
    with pytest.raises(ModelError, match=r"cannot be served.*no token can be chosen"):
        build(directory, num_blocks=60, max_num_seqs=4)
