"""The long form of the property test says what it did, and fails when that proves too little."""

from __future__ import annotations

import json

import pytest

from bench import property_steps
from tests.worker import rehearsal


def test_it_counts_what_it_played(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["property_steps", "--steps", "8000", "--seed", "7"])
    assert property_steps.main() == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 8000 <= found["steps"] < 8300 and found["plays"] >= 40
    gates = ("wrong_tokens", "leaked_blocks", "never_ended", "other_failures")
    assert [found[gate] for gate in gates] == [0, 0, 0, 0]
    assert found["faults"]["worker died"] > 0


def test_it_fails_where_a_fault_never_took_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["property_steps", "--steps", "2000"])
    monkeypatch.setitem(rehearsal.LEAST_PER_100_000_STEPS, "meteorite", 5000)
    assert property_steps.main() == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["too_seldom"]["meteorite"] == 0
