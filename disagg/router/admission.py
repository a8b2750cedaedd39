"""Admission control: admits a request if its chance to be in time is worth what it costs others.

Its first token comes after its own computing time, which is known well, and its wait, which is not:
later requests decode beside it, and predictions are wrong. The chance that the token is in time
follows from the prediction and the errors of earlier ones.

While a request is computed, others wait. If the queue then fills up to the length at which requests
are refused, as much work of others is refused as this one takes; if it empties first, none. At
critical load a queue fills before it empties with a chance of how full it is (the gambler's ruin),
under more load with a higher one. So the longer the queue, the shorter must a request be; one of
usual length may wait nearly as long as its SLO leaves time.

If no request waits, nothing is refused. Otherwise a prompt too long for the SLO would never be
served, and a time model that predicts too much would never see the step that corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.errors import Overloaded
from disagg.router.route import Candidate

MEMORY = 100.0  # number of requests over which means are learned
LEAST_CHANCE = 0.9  # with less, a request is refused whatever it costs others

# The price of a wait is its share of the limit to a power: 1 at critical load, and less the more
# requests are refused.
POWER_PER_REFUSED, LEAST_POWER = 3.0, 0.5

# Errors of predictions below this share of the limit teach nothing: other prompts of a step double
# a short wait, but hardly change a long one.
LEAST_SHARE = 0.3
USUAL_ERROR = 0.1  # standard deviation of errors as a share of the limit, until some are known


class FirstTokens:
    """What was learned of the first tokens of one model: means over the last `MEMORY` requests.

    own_s: computing time of a request alone.
    refused_share: of requests that arrived.
    error_s, squared_error: of predictions; positive if tokens come later.
    """

    def __init__(self) -> None:
        self.own_s = self.refused_share = self.error_s = self.squared_error = 0.0
        self._num_arrived = self._num_errors = 0

    def arrive(self, own_s: float) -> None:
        """A request arrives that takes `own_s` on an idle worker."""
        self._num_arrived += 1
        self.own_s += (own_s - self.own_s) / min(self._num_arrived, MEMORY)
        self.refused_share -= self.refused_share / MEMORY

    def refuse(self) -> None:
        """A request that has arrived is refused."""
        self.refused_share += 1.0 / MEMORY

    def observe(self, predicted_s: float, seconds: float, limit_s: float) -> None:
        """A first token came after `seconds`."""
        if predicted_s < LEAST_SHARE * limit_s:
            return
        self._num_errors += 1
        error_s, weight = seconds - predicted_s, 1.0 / min(self._num_errors, MEMORY)
        self.error_s += weight * (error_s - self.error_s)
        self.squared_error += weight * (error_s * error_s - self.squared_error)

    def chance(self, own_s: float, wait_s: float, limit_s: float) -> float:
        """The chance that a first token comes within `limit_s`, with normal errors."""
        if math.isinf(limit_s):
            return 1.0
        variance = self.squared_error - self.error_s * self.error_s
        if self._num_errors < 2:
            variance = (USUAL_ERROR * limit_s) ** 2
        spare_s = limit_s - own_s - wait_s - self.error_s
        return 0.5 * math.erfc(-spare_s / math.sqrt(2.0 * max(variance, 1e-12)))

    def price(self, own_s: float, wait_s: float, limit_s: float) -> float:
        """How many requests of usual length are expected to be refused because of this one."""
        power = max(LEAST_POWER, 1.0 - POWER_PER_REFUSED * self.refused_share)
        return (wait_s / limit_s) ** power * own_s / self.own_s if self.own_s else 0.0

    def admits(self, own_s: float, wait_s: float, limit_s: float) -> bool:
        if wait_s <= 0.0:
            return True
        least = max(LEAST_CHANCE, self.price(own_s, wait_s, limit_s))
        return self.chance(own_s, wait_s, limit_s) >= least

    def longest_wait_s(self, own_s: float, limit_s: float) -> float:
        """The longest wait with which a request is admitted, within a thousandth of the limit."""
        low_s, high_s = 0.0, limit_s
        while high_s - low_s > 1e-3 * limit_s:
            middle_s = 0.5 * (low_s + high_s)
            if self.admits(own_s, middle_s, limit_s):
                low_s = middle_s
            else:
                high_s = middle_s
        return low_s


def admits(each: Candidate, ttft_slo_s: float, left_s: float, learned: FirstTokens) -> bool:
    """Whether a request is admitted on this route. Arguments as of `admit`."""
    return learned.admits(each.own_s, each.wait_s, limit_s(each, ttft_slo_s, left_s))


def admit(
    candidates: Sequence[Candidate], ttft_slo_s: float, left_s: float, learned: FirstTokens
) -> list[Candidate]:
    """The `candidates` on which the request is admitted.

    Args:
        ttft_slo_s: the latest time for a first token; see `limit_s`.
        left_s: until the request's deadline.

    Raises:
        Overloaded: there is none. `retry_after_s` is when there may be one.
    """
    admitted = [each for each in candidates if admits(each, ttft_slo_s, left_s, learned)]
    if admitted:
        return admitted
    learned.refuse()
    soonest = min(candidates, key=lambda each: each.own_s + each.wait_s)
    limit = limit_s(soonest, ttft_slo_s, left_s)
    later_s = soonest.wait_s - learned.longest_wait_s(soonest.own_s, limit)
    raise Overloaded(
        f"All workers are busy: the first token would come after about"
        f" {soonest.own_s + soonest.wait_s:.1f} s, and {limit:.1f} s are allowed. So it is likely"
        f" to be late, or keeps too many others waiting. Try again in {math.ceil(later_s)} s.",
        retry_after_s=later_s,
        reason="predicted_late",
    )


def limit_s(candidate: Candidate, ttft_slo_s: float, left_s: float) -> float:
    """How late the first token may come. A prompt that alone takes more than half of the SLO may
    wait as long as it takes itself."""
    return min(max(ttft_slo_s, 2.0 * candidate.own_s), left_s)
