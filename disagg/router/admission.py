"""Admission control: admit a request only if its first token is predicted to be in time.

A request that would wait too long is refused before it reaches a worker, with the predicted
seconds until the queue is short enough (`Retry-After`). Decides from predicted seconds alone.

If no request waits, nothing is refused. Otherwise a prompt too long for the SLO would never be
served, and a time model that predicts too much would never see the step that corrects it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.errors import Overloaded
from disagg.router.route import Candidate


def in_time(
    candidates: Sequence[Candidate], ttft_slo_s: float, left_s: float, delay: float
) -> list[Candidate]:
    """The `candidates` whose first token is predicted to come early enough.

    Args:
        ttft_slo_s: the latest time for a first token. A prompt that alone takes more than half of
            it may wait as long as it takes itself.
        left_s: until the request's deadline.
        delay: factor by which first tokens may be later than predicted
            (`output_length.LatenessFactors`).

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
    """Seconds by which `candidate` would miss its limit because of its queue; 0 or less: none."""
    if candidate.wait_s <= 0.0:
        return 0.0
    predicted_s = delay * (candidate.own_s + candidate.wait_s)
    return predicted_s - allowed_s(candidate, ttft_slo_s, left_s)


def allowed_s(candidate: Candidate, ttft_slo_s: float, left_s: float) -> float:
    """How late the first token may come."""
    return min(max(ttft_slo_s, 2.0 * candidate.own_s), left_s)
