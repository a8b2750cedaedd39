"""Queueing formulas: how long requests wait, and how many are in progress at once.

Two textbook approximations for many independent clients (Poisson arrivals). Burstier loads need
more workers than these say.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

QUANTILE = 0.95  # what an SLO is about, in the planner and in the autoscaler

# A queue that needs more is taken for one that cannot be served.
MAX_WORKERS = 1 << 20


def wait_s(num_servers: float, offered: float, service_s: float, variability: float) -> float:
    """The `QUANTILE` of the wait in one queue before `num_servers`, first come, first served.

    A router that sends each request where its wait is shortest makes one such queue of many
    workers. Sakasegawa's approximation (1977) of the probability to wait, Allen and Cunneen's
    (1978) factor for services of unequal length, and an exponential tail: exact for one server
    and exponential services, as for Erlang C.

    Args:
        offered: arrivals/s times mean seconds of service: servers busy on average.
        variability: variance of the service over its squared mean.
    """
    utilisation = offered / num_servers
    if utilisation >= 1.0:
        return math.inf
    waiting_share = utilisation ** (math.sqrt(2.0 * (num_servers + 1)) - 1.0)
    if waiting_share <= 1.0 - QUANTILE:
        return 0.0
    mean_of_waiting_s = service_s * (1.0 + variability) / 2.0 / (num_servers - offered)
    return mean_of_waiting_s * math.log(waiting_share / (1.0 - QUANTILE))


def under_way(mean: float) -> float:
    """The `QUANTILE` of how many are under way at once, of `mean` on average.

    With nobody turned away this is Poisson whatever the lengths are (M/G/infinity); its quantile
    by the normal approximation.
    """
    return mean + NormalDist().inv_cdf(QUANTILE) * math.sqrt(mean)


def smallest(at_least: int, suffices: Callable[[int], bool]) -> int | None:
    """The least number of workers >= `at_least` that suffices, where more always do as well.

    None where even `MAX_WORKERS` do not.
    """
    low, high = at_least, max(1, at_least)
    while not suffices(high):
        low, high = high + 1, high * 2
        if high > MAX_WORKERS:
            return None
    while low < high:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle + 1
    return high
