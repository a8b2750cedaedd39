"""Sampling: right order of operations, independent of company. That the distribution is right is in
`test_sampling_law.py`."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import SampledToken
from disagg.kernels.torch.sampling import gumbel, mix, noise_keys, signed
from disagg.messages import SamplingParams
from tests import generate_requests

VOCAB_SIZE = 50


def new_sequence(
    sampling: SamplingParams, prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = ()
) -> Sequence:
    return generate_requests.new_sequence(prompt, output, sampling=sampling)


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=8, **changes)  # type: ignore[arg-type]


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, scale: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows * vocab_size)
    return torch.randn(num_rows, vocab_size, generator=generator) * scale


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """By a sampler that has seen none of them before."""
    slots = Slots()
    sampler = Sampler(slots, logits.shape[1], logits.device)
    sampler.enter([new.slot for new in slots.enter(sequences)])
    positions = torch.tensor([each.num_tokens - 1 for each in sequences])
    tokens = sampler.sample(logits, sequences, positions).read()
    for each in sequences:
        each.slot = -1
    return tokens


def noise_key(seed: int, position: int) -> Tensor:
    return noise_keys(torch.tensor([signed(mix(seed))]), torch.tensor([position]))


def draw_many(logits: Tensor, num_draws: int, **changes: object) -> list[int]:
    """Tokens for seeds 0, 1, ... from the same row of logits."""
    sequences = [new_sequence(params(seed=seed, **changes)) for seed in range(num_draws)]
    drawn = sample(logits.expand(num_draws, -1).clone(), sequences)
    return [token.token_id for token in drawn]


def test_seed_and_position_decide() -> None:
    row = random_logits(1)[0]
    drawn = draw_many(row, 200)
    assert drawn == draw_many(row, 200)
    assert len(set(drawn)) > 5
    later = [new_sequence(params(seed=3), output=tuple(range(n))) for n in range(60)]
    tokens = [token.token_id for token in sample(row.expand(60, -1).clone(), later)]
    assert len(set(tokens)) > 5


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_unrelated() -> None:
    """Uniform and uncorrelated."""
    ids = torch.arange(512)
    rows = [
        gumbel(noise_key(seed, position), ids)
        for seed in (0, 1, 2**63, 2**64 - 1)
        for position in range(16)
    ]
    noise = torch.stack(rows)
    uniform = torch.exp(-torch.exp(-noise))
    assert abs(float(uniform.mean()) - 0.5) < 0.01
    assert abs(float(uniform.var()) - 1 / 12) < 0.005
    correlation = torch.corrcoef(uniform) - torch.eye(len(rows))
    assert float(correlation.abs().max()) < 5 / math.sqrt(512)


def test_the_noise_is_the_documented_one() -> None:
    """Moved requests go on on other machines and versions, so the noise is part of the wire."""
    noise = gumbel(noise_key(7, 9), torch.tensor([0, 49]))
    x = reference_bits(7, 9, 0), reference_bits(7, 9, 49)
    expected = [-math.log(-math.log((bits + 0.5) / 2**32)) for bits in x]
    assert noise.tolist() == pytest.approx(expected, abs=1e-12)


def reference_bits(seed: int, position: int, token_id: int) -> int:
    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    golden = 0x9E3779B97F4A7C15
    key = mix((mix(seed) + position * golden) % 2**64)
    return mix((key + (token_id + 1) * golden) % 2**64) >> 32


def test_greedy_is_the_largest_logit() -> None:
    logits = random_logits(6)
    sequences = [new_sequence(params(temperature=0.0, seed=i)) for i in range(6)]
    expected = logits.argmax(dim=-1).tolist()
    assert [token.token_id for token in sample(logits.clone(), sequences)] == expected
    assert draw_many(logits[0], 20, temperature=1e-6) == [expected[0]] * 20
    assert draw_many(logits[0], 20, top_k=1, temperature=5.0) == [expected[0]] * 20
    assert draw_many(logits[0], 20, top_p=1e-9) == [expected[0]] * 20
    assert draw_many(logits[0], 20, min_p=1.0) == [expected[0]] * 20


def test_edges_of_the_filters() -> None:
    row = torch.tensor([2.0, 1.0, 1.0, 0.0, -math.inf])
    assert set(draw_many(row, 300, top_k=2)) == {0, 1, 2}, "a tie with the last one stays"
    assert set(draw_many(row, 300, top_k=5)) == {0, 1, 2, 3}
    assert set(draw_many(row, 300, top_k=500)) == {0, 1, 2, 3}
    probs = torch.softmax(row, dim=-1)
    just_two = float(probs[0] + probs[1] / 2)
    assert 0 in set(draw_many(row, 300, top_p=float(probs[0]) * 0.99)) == {0}
    assert set(draw_many(row, 300, top_p=just_two)) == {0, 1, 2}, "ties are not told apart"
    ratio = float(probs[3] / probs[0])
    assert set(draw_many(row, 300, min_p=ratio * 0.999)) == {0, 1, 2, 3}
    assert set(draw_many(row, 300, min_p=ratio * 1.001)) == {0, 1, 2}


def test_penalties_follow_their_formulas() -> None:
    logits = random_logits(1)
    p = params(temperature=0.0, repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3)
    prompt, output = (3, 4, 4), (4, 7, 7, 9)
    expected = logits[0].double().clone()
    for token_id in range(VOCAB_SIZE):
        if token_id in prompt + output:
            factor = 1 / 1.5 if expected[token_id] > 0 else 1.5
            expected[token_id] *= factor
        count = output.count(token_id)
        expected[token_id] -= 0.3 * count + (0.4 if count else 0.0)
    given = logits.clone()
    token = sample(given, [new_sequence(p, prompt, output)])[0]
    assert token.token_id == int(expected.argmax())
    assert given[0].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_alone_turns_away_from_what_was_said(name: str) -> None:
    row = torch.full((VOCAB_SIZE,), 1.0)
    row[7], row[8] = 3.0, 2.9
    plain = new_sequence(params(temperature=0.0), output=(7, 7))
    penalised = new_sequence(params(temperature=0.0, **{name: 1.2}), output=(7, 7))
    tokens = sample(torch.stack([row, row]), [plain, penalised])
    assert [token.token_id for token in tokens] == [7, 8]


def test_no_end_before_min_tokens() -> None:
    row = torch.zeros(VOCAB_SIZE)
    row[9] = 50.0
    stops = params(temperature=0.0, min_tokens=2, stop_token_ids=(9, VOCAB_SIZE, -1))
    row[VOCAB_SIZE - 1] = 40.0
    early = new_sequence(stops, output=(1,))
    late = new_sequence(stops, output=(1, 1))
    tokens = sample(torch.stack([row, row]), [early, late])
    assert tokens[0].token_id == VOCAB_SIZE - 1, "not what -1 would mean as an index"
    assert tokens[1].token_id == 9


def test_logprobs_are_the_models_own() -> None:
    """Of the raw distribution: temperature, penalties and filters do not show in them."""
    logits = random_logits(3)
    expected = torch.log_softmax(logits, dim=-1)
    sequences = [
        new_sequence(
            params(seed=1, temperature=0.3, logprobs=3, presence_penalty=1.0), output=(4,)
        ),
        new_sequence(params(temperature=0.0)),
        new_sequence(params(seed=2, top_k=2, logprobs=0)),
    ]
    first, second, third = sample(logits.clone(), sequences)
    assert first.logprobs is not None and third.logprobs is not None
    assert second.logprobs is None
    assert first.logprobs.logprob == pytest.approx(float(expected[0, first.token_id]), abs=1e-6)
    values, ids = expected[0].topk(3)
    assert [token_id for token_id, _ in first.logprobs.top] == ids.tolist()
    assert [value for _, value in first.logprobs.top] == pytest.approx(values.tolist(), abs=1e-6)
    assert third.logprobs.top == ()
    assert third.logprobs.logprob == pytest.approx(float(expected[2, third.token_id]), abs=1e-6)


def test_logprobs_can_be_asked_for_of_the_first_tokens_only() -> None:
    asked = params(temperature=0.0, logprobs=1, logprobs_until=2)
    sequences = [new_sequence(asked, output=(4,) * length) for length in range(4)]
    tokens = sample(random_logits(4), sequences)
    assert [token.logprobs is not None for token in tokens] == [True, True, False, False]


def test_more_logprobs_than_tokens_gives_all_of_them() -> None:
    token = sample(torch.zeros(1, 4), [new_sequence(params(temperature=0.0, logprobs=20))])[0]
    assert token.logprobs is not None and len(token.logprobs.top) == 4
