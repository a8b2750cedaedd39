"""The loads of `bench.autoscale`: three synthetic ones, and traces of real services."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from disagg.tools.sim.trace import TraceRequest, read_trace

# Lengths of prompts are log-normal, those of answers exponential.
MEAN_PROMPT_TOKENS, PROMPT_SIGMA, MOST_PROMPT_TOKENS = 2500, 0.8, 8000
MEAN_ANSWER_TOKENS, MOST_ANSWER_TOKENS = 60, 1000


class Load(msgspec.Struct, frozen=True):
    """Requests, how much faster than written they arrive, and whether pools may be empty."""

    name: str
    requests: list[TraceRequest]
    speed: float = 1.0
    from_zero: bool = False

    def repeated(self, times: int) -> list[TraceRequest]:
        """The requests, so many times one after the other."""
        lasts_s = self.requests[-1].arrival_s - self.requests[0].arrival_s + 1.0
        return [
            msgspec.structs.replace(each, arrival_s=each.arrival_s + number * lasts_s)
            for number in range(times)
            for each in self.requests
        ]


def made_up(speed: float) -> list[Load]:
    """A flash crowd, a day of 20 minutes, and load that comes and goes.

    Args:
        speed: by which all durations are shortened; rates stay.
    """

    def crowd(now: float) -> float:
        """For two minutes ten times the usual rate."""
        return 20.0 if 240 <= now * speed < 360 else 2.0

    def diurnal(now: float) -> float:
        return 0.5 + 7.25 * (1.0 - math.cos(2.0 * math.pi * now * speed / 1200))

    def comes_and_goes(now: float) -> float:
        return 10.0 if 300 <= now * speed < 600 or 1200 <= now * speed < 1500 else 0.0

    first = TraceRequest(0.0, 500, 20)  # it shows how long steps take
    return [
        Load("flash crowd", _poisson(crowd, 780 / speed, 20.0)),
        Load("diurnal", _poisson(diurnal, 1200 / speed, 15.0)),
        Load("from zero", [first, *_poisson(comes_and_goes, 1800 / speed, 10.0)], from_zero=True),
    ]


def of_trace(path: Path, speed: float, num_requests: int | None) -> Load:
    """The first requests of a trace. Raises `RequestError`."""
    return Load(path.stem, read_trace(path)[:num_requests], speed)


def _poisson(rate: Callable[[float], float], duration_s: float, most: float) -> list[TraceRequest]:
    """A Poisson process whose rate changes, by thinning one of the rate `most`."""
    rng = random.Random(0)
    mu = math.log(MEAN_PROMPT_TOKENS) - 0.5 * PROMPT_SIGMA**2
    now = 0.0
    requests: list[TraceRequest] = []
    while (now := now + rng.expovariate(most)) < duration_s:
        if rng.random() * most < rate(now):
            num_prompt = int(rng.lognormvariate(mu, PROMPT_SIGMA))
            num_output = int(rng.expovariate(1.0 / MEAN_ANSWER_TOKENS))
            num_prompt = min(max(16, num_prompt), MOST_PROMPT_TOKENS)
            num_output = min(max(2, num_output), MOST_ANSWER_TOKENS)
            requests.append(TraceRequest(now, num_prompt, num_output))
    return requests
