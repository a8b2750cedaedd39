"""How the soak judges what it measured."""

from __future__ import annotations

from bench.faults_memory import MB_PER_MIN, judge, kind_of, slope

MINUTES = [60.0 * minute for minute in range(31)]


def test_the_first_minutes_do_not_count() -> None:
    grows_at_first = [400.0 + 40 * min(minute, 5) for minute in range(31)]
    assert abs(slope(MINUTES, grows_at_first, 300.0)) < 1e-6
    assert slope(MINUTES, grows_at_first, 0.0) > MB_PER_MIN


def test_one_process_that_leaks_fails_the_gate_and_is_named() -> None:
    flat = [170.0] * 31
    leak = [400.0 + 1.5 * minute for minute in range(31)]
    rows = judge(MINUTES, {"ingress 1": flat, "worker 3": leak, "store 1": leak}, 300.0)
    assert rows[0]["held"] == "NO" and "worker 3" in rows[0]["measured"]
    held = {each["gate"].strip(): each["held"] for each in rows[1:]}
    assert held == {"ingress 1": "yes", "worker 3": "NO", "store 1": "yes"}
    assert "+1.50 MB/min, 400 to 445 MB" in rows[2]["measured"]
    assert judge(MINUTES, {"ingress 1": flat, "store 1": leak}, 300.0)[0]["held"] == "yes"


def test_processes_have_names() -> None:
    assert kind_of("ray::ServeReplica:disagg:Ingress") == "ingress"
    assert kind_of("ray::ServeReplica:disagg:crew-decode") == "worker"
    assert kind_of("/opt/ray/core/src/ray/raylet/raylet --store=x") == "raylet"
    assert kind_of("/usr/bin/haproxy -f x.cfg") == "HAProxy"
    assert kind_of("/usr/bin/strange --flag") == "strange"
