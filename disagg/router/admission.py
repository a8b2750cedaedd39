"""Whether a request is taken in: only if its first token is predicted to come in time.

A request that would wait too long is refused before any worker hears of it, with the seconds after
which the queue will have drained far enough. Decides from predicted seconds alone; knows neither
workers nor queues.

Nothing is refused where nobody waits: a prompt that no worker can compute in time would be refused
for ever, and a time model that is wrong would never meet the step that corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.errors import Overloaded
from disagg.router.route import Candidate


def in_time(
    candidates: Sequence[Candidate], ttft_slo_s: float, left_s: float, delay: float
) -> list[Candidate]:
    """Those of `candidates` whose first token is predicted to come early enough.

    Args:
        ttft_slo_s: how late a first token may come. A prompt that alone takes more than half of it
            may wait as long as it takes itself.
        left_s: until the request's deadline.
        delay: by what factor first tokens may come later than predicted (`experience.Delays`).

    Raises:
        Overloaded: there is none. `retry_after_s` is when there may be one.
    """
    late_s = [lateness_s(candidate, ttft_slo_s, left_s, delay) for candidate in candidates]
    least_s = min(late_s)
    if least_s <= 0.0:
        return [each for each, late in zip(candidates, late_s, strict=True) if late <= 0.0]
    first_s = delay * min(each.own_s + each.wait_s for each in candidates)
    raise Overloaded(
        f"All workers are busy: the first token would come after up to {first_s:.1f} s, and"
        f" {min(ttft_slo_s, left_s):.1f} s are allowed. Try again in {math.ceil(least_s)} s.",
        retry_after_s=least_s,
        reason="predicted_late",
    )


def lateness_s(candidate: Candidate, ttft_slo_s: float, left_s: float, delay: float) -> float:
    """By how much the queue before `candidate` is too long; 0 or less: it is not."""
    if candidate.wait_s <= 0.0:
        return 0.0
    predicted_s = delay * (candidate.own_s + candidate.wait_s)
    return predicted_s - allowed_s(candidate, ttft_slo_s, left_s)


def allowed_s(candidate: Candidate, ttft_slo_s: float, left_s: float) -> float:
    """How late the first token may come."""
    return min(max(ttft_slo_s, 2.0 * candidate.own_s), left_s)
