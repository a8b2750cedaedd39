"""How gates of `bench.faults` judge what they measured."""

from __future__ import annotations

import json

import pytest

from bench import faults
from bench.faults import property_steps
from bench.faults_gates import Sizes, row
from bench.faults_memory import MB_PER_MIN, judge, kind_of, slope
from tests.worker import rehearsal

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
    agent = "python -I -S /opt/disagg/app/raylet_agent.py dashboard_agent --raylet-name=/x/raylet"
    assert kind_of(f"/opt/ray/raylet/raylet --dashboard_agent_command={agent}") == "raylet"
    assert kind_of(agent) == "an agent's stand-in"
    assert kind_of("/usr/bin/haproxy -f x.cfg") == "HAProxy"
    assert kind_of("/usr/bin/strange --flag") == "strange"


def test_the_property_test_says_what_it_played(capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = property_steps(Sizes(num_steps=8000), seed=7)
    assert found["held"] == "yes", found
    steps, plays = (int(words.split()[0]) for words in found["measured"].split(", ")[:2])
    assert 8000 <= steps < 8300 and plays >= 40
    assert "worker died" in capsys.readouterr().out


def test_it_fails_where_a_fault_never_took_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rehearsal.LEAST_PER_100_000_STEPS, "meteorite", 5000)
    (found,) = property_steps(Sizes(num_steps=2000), seed=0)
    assert found["held"] == "NO" and "too seldom: meteorite" in found["measured"]


def test_a_gate_that_breaks_does_not_hide_the_others(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> faults.Rows:
        raise RuntimeError("no worker came")

    monkeypatch.setitem(faults.IN_PROCESS, "property_steps", broken)
    monkeypatch.setitem(faults.IN_PROCESS, "churn", lambda *_: [row("churn", "0", "0", True)])
    monkeypatch.setattr("sys.argv", ["faults", "property_steps", "churn"])
    assert faults.main() == 1
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [each["held"] for each in rows] == ["NO", "yes"]
    assert "no worker came" in rows[0]["measured"]
