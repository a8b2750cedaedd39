"""Workers come and go while requests run, in one process: every request ends once, and rightly.

`python -m bench.faults churn` is the long form: 1,536 requests, 250 joins, 150 leaves.
"""

from __future__ import annotations

import pytest

from bench import faults_churn
from bench.faults_churn import churn


def test_requests_end_once_and_rightly_while_workers_come_and_go() -> None:
    figures = churn(num_requests=200, num_joins=25, num_leaves=20, seed=1)
    assert figures["is_held"], figures
    assert figures["requests"] >= 200 and figures["joins"] >= 25 and figures["leaves"] >= 20
    faults = figures["faults"]
    for what in ("drain", "crash", "cut", "move", "pulled"):
        assert faults[what] > 0, faults
    assert figures["ends"]["ok"] > 100 and figures["ends"]["client left"] > 0, figures


def test_a_lost_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that leaves without a word to the streams that it had."""
    monkeypatch.setattr(faults_churn, "TIME_S", 3.0)
    monkeypatch.setattr(faults_churn, "GRACE_S", 1.0)
    monkeypatch.setattr("disagg.links.client._WorkerConnection._fail_streams", _say_nothing)
    figures = churn(num_requests=60, num_joins=8, num_leaves=8, seed=1)
    assert not figures["is_held"]
    assert figures["without_terminal_event"] or figures["failed"], figures


def test_a_wrong_token_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.kvtransfer.pulls.Pull.is_unchanged", lambda *_: True)
    monkeypatch.setattr("disagg.kvtransfer.local_transport.LocalTransport._copy_blocks", _copy_none)
    figures = churn(num_requests=60, num_joins=4, num_leaves=4, seed=1)
    assert figures["wrong_text"] > 0, figures


def _say_nothing(connection: object, what: str) -> None:
    pass


def _copy_none(transport: object, pull: object, source: object, side: object) -> None:
    pass
