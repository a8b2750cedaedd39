"""A circuit breaker with growing pauses. The caller passes the time."""

from __future__ import annotations

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0


class Breaker:
    """Is closed (calls go through) until a failure, then open for a pause that doubles each time.

    After a pause one call goes through as a trial: its success closes the breaker, its failure
    opens it for longer.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._open_until_s = 0.0

    def left_s(self, now_s: float) -> float:
        """Seconds until the next call may go through; 0 if it may go now."""
        return max(0.0, self._open_until_s - now_s) if self._pause_s else 0.0

    def succeeded(self) -> None:
        self._pause_s = 0.0

    def failed(self, now_s: float) -> None:
        self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        self._open_until_s = now_s + self._pause_s
