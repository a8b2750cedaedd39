"""How fast a queue moves: what is assumed, what is learned, and what says nothing about workers."""

from __future__ import annotations

import pytest

from disagg.ingress.admission_queue import ModelQueue
from disagg.router.fair_queue import FairQueue, Waiter

COST_S = 0.05
NUM_WORKERS = 2


class Waiting:
    """A queue that never ends. Its requests leave when the test says so."""

    def __init__(self) -> None:
        self.line = ModelQueue(lambda tenant: 1.0)
        self.now = 1000.0
        queue: FairQueue[Waiter] = self.line  # type: ignore[assignment]
        self.line.starts_waiting()
        queue.push(Waiter("", COST_S, 1))
        self.line.record_departure(COST_S, self.now, NUM_WORKERS)

    def leave(self, number: int, each_s: float, paused_s: float = 0.0) -> None:
        for _ in range(number):
            self.now += each_s
            self.line.pause(paused_s)
            self.line.record_departure(COST_S, self.now, NUM_WORKERS)

    def of_model(self, cost_s: float = 14.0, num_workers: int = NUM_WORKERS) -> float:
        """The predicted seconds, as a multiple of what the time model says."""
        return self.line.seconds(cost_s, num_workers) / (cost_s / num_workers)


def test_before_any_has_left_workers_take_as_long_as_the_time_model_says() -> None:
    assert Waiting().of_model() == 1.0


def test_the_few_that_leave_while_a_burst_is_read_say_little_of_all_others() -> None:
    waiting = Waiting()
    waiting.leave(9, 0.25)  # ten times as long as predicted, while a client sends 200 requests
    assert 1.0 < waiting.of_model() < 1.5


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_speed_is_learned(factor: float) -> None:
    waiting = Waiting()
    waiting.leave(3000, factor * COST_S / NUM_WORKERS)
    assert waiting.of_model() == pytest.approx(factor, rel=0.02)


def test_seconds_in_which_the_ingress_does_nothing_are_not_those_of_workers() -> None:
    waiting = Waiting()
    waiting.leave(100, 0.5 + COST_S / NUM_WORKERS, paused_s=0.5)
    assert waiting.of_model() == pytest.approx(1.0)


def test_more_workers_are_faster_at_once() -> None:
    waiting = Waiting()
    waiting.leave(3000, 3.0 * COST_S / NUM_WORKERS)
    assert waiting.line.seconds(14.0, 4) == pytest.approx(0.5 * waiting.line.seconds(14.0, 2))
