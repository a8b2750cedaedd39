from __future__ import annotations

from disagg.store.breaker import Breaker


def test_pauses_double_up_to_a_limit_and_a_success_ends_them() -> None:
    breaker, now_s, pauses = Breaker(), 100.0, []
    assert breaker.left_s(now_s) == 0
    for _ in range(8):
        breaker.failed(now_s)
        pauses.append(breaker.left_s(now_s))
        now_s += pauses[-1]
        assert breaker.left_s(now_s) == 0
    assert pauses == [0.25, 0.5, 1, 2, 4, 8, 10, 10]
    breaker.succeeded()
    breaker.failed(now_s)
    assert breaker.left_s(now_s) == 0.25
    assert 0.1 < breaker.left_s(now_s + 0.1) < 0.2
