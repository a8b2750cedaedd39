"""The bound of the bench of admission is the best of all choices of whom to serve."""

from __future__ import annotations

import random
from itertools import compress, product

import msgspec

from bench.admission import NUM_WORKERS, most_in_time
from disagg.time_model import StepTimeModel
from disagg.tools.sim.config import SimConfig
from disagg.tools.sim.trace import TraceRequest

SECOND_A_TOKEN = StepTimeModel(0.0, 1.0 * NUM_WORKERS, 0.0, 0.0, 0.0, 0.0)
CONFIG = SimConfig(times=SECOND_A_TOKEN, ttft_slo_s=6.0)


def most_of_all_choices(requests: list[TraceRequest]) -> int:
    def is_in_time(chosen: list[TraceRequest]) -> bool:
        now = 0.0
        for each in chosen:
            now = max(now, each.arrival_s) + each.num_prompt_tokens
            if now > each.arrival_s + CONFIG.ttft_slo_s:
                return False
        return True

    choices = product((False, True), repeat=len(requests))
    return max(sum(kept) for kept in choices if is_in_time(list(compress(requests, kept))))


def test_the_bound_is_the_best_choice() -> None:
    rng = random.Random(0)
    for _ in range(60):
        arrivals = sorted(float(rng.randrange(25)) for _ in range(9))
        requests = [TraceRequest(each, rng.randint(1, 7), 1) for each in arrivals]
        assert most_in_time(requests, CONFIG) == most_of_all_choices(requests)


def test_what_was_computed_once_takes_no_time_again() -> None:
    config = msgspec.structs.replace(CONFIG, ttft_slo_s=1024.0)
    requests = [TraceRequest(float(n), 1025, 1, (0, 1)) for n in range(4)]
    assert most_in_time(requests, config) == 3  # the first one is late by one token
