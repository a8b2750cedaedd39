"""The approximations agree with what is exact, and with a simulated queue."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.queueing import MAX_WORKERS, smallest, under_way, wait_s
from tests.grids import examples


def simulated_wait_s(num_servers: int, rate: float, services: list[float], seed: int) -> float:
    """The 95 % quantile of the wait of 200,000 requests, first come, first served."""
    rng = random.Random(seed)
    free = [0.0] * num_servers
    now = 0.0
    waits = []
    for _ in range(200_000):
        now += rng.expovariate(rate)
        start = max(now, heapq.heappop(free))
        waits.append(start - now)
        heapq.heappush(free, start + rng.choice(services))
    waits.sort()
    return waits[int(0.95 * len(waits))]


def test_one_server_with_exponential_services_is_exact() -> None:
    """M/M/1: P(wait > t) = u exp(-(1 - u) t / s)."""
    for utilisation in (0.3, 0.6, 0.9, 0.99):
        exact = math.log(utilisation / 0.05) / (1 - utilisation)
        assert wait_s(1, utilisation, 1.0, 1.0) == pytest.approx(exact)


@pytest.mark.parametrize(("num_servers", "utilisation"), [(2, 0.8), (8, 0.85), (32, 0.95)])
@pytest.mark.parametrize("services", [[1.0], [0.2, 0.2, 0.2, 3.4]])
def test_near_a_simulated_queue(
    num_servers: int, utilisation: float, services: list[float]
) -> None:
    mean = sum(services) / len(services)
    variability = sum((each / mean - 1) ** 2 for each in services) / len(services)
    predicted = wait_s(num_servers, num_servers * utilisation, mean, variability)
    real = simulated_wait_s(num_servers, num_servers * utilisation / mean, services, seed=3)
    assert predicted == pytest.approx(real, rel=0.35)


@given(
    num_servers=st.integers(1, 500),
    utilisation=st.floats(0.01, 0.98),
    variability=st.floats(0, 20),
    more=st.floats(1.0, 2.0),
)
def test_waiting_grows_with_load_and_shrinks_with_servers(
    num_servers: int, utilisation: float, variability: float, more: float
) -> None:
    offered = num_servers * utilisation
    wait = wait_s(num_servers, offered, 1.0, variability)
    assert 0 <= wait < math.inf
    assert wait_s(num_servers, offered * more, 1.0, variability) >= wait
    assert wait_s(num_servers + 1, offered, 1.0, variability) <= wait
    assert wait_s(num_servers, offered, 1.0, variability * more) >= wait


def test_a_queue_that_cannot_keep_up_waits_for_ever() -> None:
    assert wait_s(4, 4.0, 1.0, 1.0) == math.inf


def test_under_way_is_near_the_quantile_of_poisson() -> None:
    for mean in (4.0, 30.0, 250.0):
        term, total, count = math.exp(-mean), math.exp(-mean), 0
        while total < 0.95:
            count += 1
            term *= mean / count
            total += term
        assert under_way(mean) == pytest.approx(count, abs=1.0)


@examples(66)
@given(at_least=st.integers(1, 1000), needed=st.integers(1, MAX_WORKERS // 4))
def test_smallest_is_found_in_few_trials(at_least: int, needed: int) -> None:
    trials = []

    def suffices(num: int) -> bool:
        trials.append(num)
        return num >= needed

    assert smallest(at_least, suffices) == max(at_least, needed)
    assert len(trials) <= 45


def test_smallest_gives_up() -> None:
    assert smallest(1, lambda num: False) is None
