"""What Serve pushes reaches the ingress whole, in order, and whatever else is in it."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from disagg.app import membership
from disagg.app.membership import from_metadata, replace, subscribe, to_metadata, unsubscribe
from disagg.messages import WorkerRecord
from tests.links.fakes import make_record


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(membership, "_records", {})
    yield
    assert membership._listeners == []


def names(records: list[WorkerRecord]) -> list[str]:
    return [record.worker_id for record in records]


def test_a_record_travels_as_metadata() -> None:
    record = make_record("a", epoch=7)
    assert from_metadata(to_metadata(record)) == record


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {},
        {"other": "thing"},
        {"disagg_worker": "not base 64"},
        {"disagg_worker": ""},
        {"disagg_worker": None},
        {"disagg_worker": 5},
        {"disagg_worker": base64.b64encode(b"not a record").decode()},
        {"disagg_worker": base64.b64encode(b"\x81\xa1a\x01").decode()},
    ],
)
def test_what_is_no_record_of_ours_is_nobody(metadata: dict[str, Any] | None) -> None:
    """An error here would end Serve's updates to this process for good."""
    assert from_metadata(metadata) is None


def test_listeners_hear_everyone_at_once_and_at_each_change() -> None:
    received: list[list[str]] = []

    def listener(records: list[WorkerRecord]) -> None:
        received.append(names(records))

    replace("prefill", [make_record("p")])
    subscribe(listener)
    replace("decode", [make_record("d"), make_record("e")])
    replace("decode", [make_record("e")])
    replace("decode", [])
    unsubscribe(listener)
    replace("prefill", [])
    assert received == [["p"], ["p", "d", "e"], ["p", "e"], ["p"]]


def test_the_last_word_is_heard_last() -> None:
    """Two deployments change at once; no listener is left with the older of two lists."""
    received: list[list[str]] = []
    other = threading.Thread(target=replace, args=("decode", [make_record("d")]))

    def listener(records: list[WorkerRecord]) -> None:
        if names(records) == ["p"]:
            other.start()
            other.join(0.2)  # it gets as far as it can
        received.append(names(records))

    subscribe(listener)
    replace("prefill", [make_record("p")])
    other.join()
    unsubscribe(listener)
    assert received == [[], ["p"], ["p", "d"]]
