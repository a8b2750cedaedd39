"""Planted models are found under noise, never turn negative, and are found again after a change."""

from __future__ import annotations

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.messages import StepCosts
from disagg.time_model import (
    CHANGE_S,
    MAX_FIGURES,
    StepFeatures,
    StepTimeFit,
    StepTimeModel,
    TransferTimeModel,
    attended,
)
from tests.grids import examples

GPU = StepTimeModel(4e-3, 2e-5, 1e-9, 5e-5, 3e-8, 2e-3)
SCALES = st.floats(min_value=0.05, max_value=20.0)


def random_step(rng: random.Random, prefill: bool) -> StepFeatures:
    num_new = rng.randrange(1, 1024) if prefill else 0
    num_decoding = rng.randrange(1, 64)
    return StepFeatures(
        num_new_tokens=num_new,
        num_attended=attended(num_new, rng.randrange(8000)),
        num_decoding=num_decoding,
        num_decode_context=num_decoding * rng.randrange(1, 4000),
    )


def observe(
    fit: StepTimeFit, truth: StepTimeModel, rng: random.Random, num_steps: int, noise: float
) -> None:
    for turn in range(num_steps):
        features = random_step(rng, prefill=turn % 3 == 0)
        fit.observe(features, truth.step_s(features) * rng.lognormvariate(0, noise))


def experienced(rng: random.Random) -> StepTimeFit:
    """It knows `GPU`."""
    fit = StepTimeFit()
    observe(fit, GPU, rng, 1500, noise=0.05)
    return fit


def error_of(fit: StepTimeFit, truth: StepTimeModel, prefill: bool) -> float:
    rng = random.Random(99)
    steps = [random_step(rng, prefill) for _ in range(200)]
    model = fit.model
    return median(abs(model.step_s(step) / truth.step_s(step) - 1) for step in steps)


@examples(10)
@given(scales=st.tuples(*[SCALES] * 6), seed=st.integers(0, 1000))
def test_a_planted_model_is_found_under_noise(scales: tuple[float, ...], seed: int) -> None:
    prior = StepTimeModel()
    *units, _ = prior.coefficients
    units = [*units, units[0]]  # the prior knows no cost of steps with prompts
    truth = StepTimeModel.of(a * scale for a, scale in zip(units, scales, strict=True))
    fit = StepTimeFit(prior)
    observe(fit, truth, random.Random(seed), 1500, noise=0.1)
    assert error_of(fit, truth, prefill=True) < 0.08
    assert error_of(fit, truth, prefill=False) < 0.08
    assert 0.03 < fit.median_error < 0.15


@examples(16)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4096),
            st.integers(0, 64),
            st.integers(0, 100_000),
            st.floats(min_value=1e-6, max_value=1e3),
        ),
        max_size=60,
    )
)
def test_nothing_observed_makes_a_prediction_negative(
    steps: list[tuple[int, int, int, float]],
) -> None:
    fit = StepTimeFit()
    for num_new, num_decoding, num_context, seconds in steps:
        features = StepFeatures(num_new, attended(num_new, 0), num_decoding, num_context)
        fit.observe(features, seconds)
        assert min(fit.model.coefficients) >= 0.0
        assert fit.median_error >= 0.0


def test_it_follows_a_machine_that_changes() -> None:
    rng = random.Random(5)
    fit = experienced(rng)
    slower = StepTimeModel.of(3 * a for a in GPU.coefficients)
    assert error_of(fit, slower, prefill=True) > 0.5
    observe(fit, slower, rng, 1500, noise=0.05)
    assert error_of(fit, slower, prefill=True) < 0.08
    assert error_of(fit, slower, prefill=False) < 0.08


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
@pytest.mark.parametrize("prefill", [True, False])
def test_another_speed_is_believed_after_some_steps(factor: float, prefill: bool) -> None:
    """All that is known keeps its shape: steps of one kind tell the speed of the other too."""
    rng = random.Random(5)
    fit = experienced(rng)
    other = StepTimeModel.of(factor * a for a in GPU.coefficients)
    num_steps = took_s = 0.0
    while num_steps < 3 or took_s < CHANGE_S:
        assert error_of(fit, other, prefill=not prefill) > 0.4
        features = random_step(rng, prefill=prefill)
        seconds = other.step_s(features) * rng.lognormvariate(0, 0.05)
        fit.observe(features, seconds)
        num_steps, took_s = num_steps + 1, took_s + seconds
    assert error_of(fit, other, prefill=True) < 0.12
    assert error_of(fit, other, prefill=False) < 0.12


@pytest.mark.parametrize("num_usual", [1, 2, 18])
def test_two_slow_steps_are_not_another_speed(num_usual: int) -> None:
    """However soon the next two come: most steps between them need not be learned from."""
    rng = random.Random(5)
    fit = experienced(rng)
    for _ in range(20):
        for factor in (3.0, 3.0, *[1.0] * num_usual):
            features = random_step(rng, prefill=False)
            fit.observe(features, factor * GPU.step_s(features))
            assert error_of(fit, GPU, prefill=True) < 0.1
    slow = StepTimeModel.of(3.0 * a for a in GPU.coefficients)
    assert error_of(fit, slow, prefill=True) > 0.5


def test_some_slow_milliseconds_are_not_another_speed() -> None:
    """What else runs on a CPU slows some decode steps in a row, and no prompt for long."""
    rng = random.Random(5)
    fit = experienced(rng)
    step = StepFeatures(num_decoding=2, num_decode_context=200)
    for _ in range(20):
        for factor in (*[2.0] * 5, *[1.0] * 20):
            fit.observe(step, factor * GPU.step_s(step))
            assert error_of(fit, GPU, prefill=True) < 0.1


def test_hours_of_decoding_do_not_erase_what_is_known_about_prefill() -> None:
    rng = random.Random(6)
    fit = experienced(rng)
    for _ in range(10_000):
        features = random_step(rng, prefill=False)
        fit.observe(features, GPU.step_s(features))
    assert error_of(fit, GPU, prefill=True) < 0.1


@examples(20)
@given(
    scales=st.tuples(*[st.floats(min_value=0.3, max_value=3.0)] * 6),
    prompt_steps=st.floats(min_value=0.0, max_value=10.0),
    is_constant_known=st.booleans(),
    num_short=st.sampled_from([1, 3, 30, 300]),
    longest=st.sampled_from([3, 19, 60]),
    noise=st.floats(min_value=0.0, max_value=0.15),
    seed=st.integers(0, 1000),
)
def test_short_prompts_do_not_change_what_is_known_of_long_ones(
    scales: tuple[float, ...],
    prompt_steps: float,
    is_constant_known: bool,
    num_short: int,
    longest: int,
    noise: float,
    seed: int,
) -> None:
    """Before the first long prompt, the prior holds; then it is what that one showed.

    Args:
        scales: of the truth, in units of the prior.
        prompt_steps: decode steps that a step with prompts takes in addition.
    """
    rng = random.Random(seed)
    *others, _ = GPU.coefficients
    per_prompt_step_s = prompt_steps * others[0]
    prior = StepTimeModel.of((*others, per_prompt_step_s if is_constant_known else 0.0))
    known = (*others, per_prompt_step_s)
    truth = StepTimeModel.of(a * scale for a, scale in zip(known, scales, strict=True))
    fit = StepTimeFit(prior)

    def serve(number: int) -> None:
        for _ in range(number):
            num_new = rng.randrange(1, longest + 1)
            features = StepFeatures(num_new, attended(num_new, rng.randrange(500)))
            fit.observe(features, truth.step_s(features) * rng.lognormvariate(0, noise))
            for num_decoding in range(1, 4):
                features = StepFeatures(0, 0, num_decoding, 50 * num_decoding)
                fit.observe(features, truth.step_s(features) * rng.lognormvariate(0, noise))

    serve(num_short)
    for num_tokens in (512, 1024, 4096):
        both_s = prior.prefill_s(num_tokens), truth.prefill_s(num_tokens)
        assert 0.7 * min(both_s) < fit.model.prefill_s(num_tokens) < 1.4 * max(both_s)
    for _ in range(2):
        long = StepFeatures(1024, attended(1024, 0))
        fit.observe(long, truth.step_s(long))
        serve(num_short)
        assert fit.model.step_s(long) == pytest.approx(truth.step_s(long), rel=0.25)


def test_the_first_long_prompt_is_learned_from_at_once() -> None:
    """It is no sign of another speed of the machine, however often the like come."""
    fit = StepTimeFit(GPU)
    short, long = StepFeatures(8, attended(8, 0)), StepFeatures(1024, attended(1024, 0))
    for _ in range(100):
        fit.observe(short, GPU.step_s(short))
    for _ in range(3):
        fit.observe(long, 4.0 * GPU.step_s(long))
        assert fit.model.step_s(long) == pytest.approx(4.0 * GPU.step_s(long), rel=0.1)
        assert fit.model.step_s(short) == pytest.approx(GPU.step_s(short), rel=0.1)


def test_a_stall_hardly_moves_it() -> None:
    rng = random.Random(7)
    fit = StepTimeFit()
    observe(fit, GPU, rng, 600, noise=0.05)
    fit.observe(random_step(rng, prefill=False), 100.0)
    assert error_of(fit, GPU, prefill=False) < 0.08


def test_before_the_first_step_the_prior_holds() -> None:
    fit = StepTimeFit(GPU)
    assert fit.model.coefficients == pytest.approx(GPU.coefficients)
    assert fit.median_error == 0.0
    fit.observe(StepFeatures(num_decoding=1, num_decode_context=10), 0.0)
    assert fit.to_costs() == StepCosts(fit.model.coefficients, 0, 0.0)


def test_costs_cross_the_wire_and_back() -> None:
    fit = StepTimeFit()
    observe(fit, GPU, random.Random(8), 50, noise=0.05)
    costs = fit.to_costs()
    assert costs.num_observed == 50
    assert StepTimeModel.from_costs(costs) == fit.model
    assert StepTimeModel.from_costs(None) == StepTimeModel()


def test_prefill_is_the_sum_of_its_chunks() -> None:
    whole = GPU.prefill_s(4096, 1000, chunk_tokens=1024)
    steps = [StepFeatures(1024, attended(1024, 1000 + done)) for done in range(0, 4096, 1024)]
    assert whole == pytest.approx(sum(GPU.step_s(step) for step in steps))


def test_prefill_of_several_prompts_is_the_sum_of_them() -> None:
    together = GPU.prefill_s(6000, num_sequences=3, chunk_tokens=1000)
    assert together == pytest.approx(3 * GPU.prefill_s(2000, chunk_tokens=1000))


def test_decode_is_the_step_it_predicts() -> None:
    step = StepFeatures(num_decoding=8, num_decode_context=9000)
    assert GPU.decode_step_s(8, 9000) == pytest.approx(GPU.step_s(step))


def test_no_work_takes_no_time() -> None:
    assert GPU.prefill_s(0, 500) == 0.0
    assert GPU.decode_step_s(0, 0) == 0.0


@pytest.mark.parametrize(
    "coefficients",
    [(1.0,) * 5, *((1.0, 1.0, each, 1.0, 1.0, 1.0) for each in (-1e-9, math.nan, math.inf))],
)
def test_a_model_that_is_no_time_is_refused(coefficients: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="coefficients >= 0"):
        StepTimeModel.of(coefficients)


def test_a_prior_that_rules_something_out_is_refused() -> None:
    with pytest.raises(ValueError, match="must be > 0"):
        StepTimeFit(StepTimeModel(1.0, 0.0, 1.0, 1.0, 1.0, 1.0))


@examples(10)
@given(
    latency_s=st.floats(min_value=1e-5, max_value=1e-2),
    bytes_per_s=st.floats(min_value=1e7, max_value=4e11),
    seed=st.integers(0, 1000),
)
def test_transfers_are_learned_per_source(latency_s: float, bytes_per_s: float, seed: int) -> None:
    rng = random.Random(seed)
    model = TransferTimeModel()
    before = model.transfer_s("other", 1 << 20)
    for _ in range(300):
        nbytes = int(2 ** rng.uniform(12, 28))
        seconds = (latency_s + nbytes / bytes_per_s) * rng.lognormvariate(0, 0.05)
        model.observe("source", nbytes, seconds)
    for nbytes in (1 << 16, 1 << 22, 1 << 27):
        truth = latency_s + nbytes / bytes_per_s
        assert model.transfer_s("source", nbytes) == pytest.approx(truth, rel=0.15)
    assert model.transfer_s("other", 1 << 20) == before
    (figure,) = model.figures()
    assert figure.source_id == "source"
    assert figure.latency_s >= 0.0
    assert figure.latency_s + (1 << 27) / figure.bytes_per_s == pytest.approx(
        model.transfer_s("source", 1 << 27)
    )


def test_a_source_that_left_is_forgotten() -> None:
    model = TransferTimeModel(latency_s=1.0, bytes_per_s=1.0)
    model.observe("source", 100, 1e-3)
    model.forget("source")
    model.observe("source", 100, 0.0)
    assert model.transfer_s("source", 3) == 4.0
    assert model.figures() == ()


def test_a_transfer_that_looks_free_per_byte_has_a_finite_bandwidth() -> None:
    model = TransferTimeModel()
    for turn in range(200):
        nbytes = 1 << (10 + turn % 18)
        model.observe("source", nbytes, 1e-3 / (1 + turn % 18))
    (figure,) = model.figures()
    assert 0.0 < figure.bytes_per_s < float("inf")


def test_a_report_has_the_sources_that_were_pulled_from_last() -> None:
    """With a thousand sources, all of them would be 70 kB in each report."""
    model = TransferTimeModel()
    for number in (*range(100), 3):
        model.observe(f"source-{number}", 1 << 20, 1e-3)
    named = [figure.source_id for figure in model.figures()]
    assert len(named) == MAX_FIGURES
    assert named[-2:] == ["source-99", "source-3"]
