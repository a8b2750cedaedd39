"""Who is there: the running workers that Serve pushed into this process.

Serve pickles a request router's class together with its module by value, so module globals next
to the router would be private copies (and one per deployment). This module is imported by name
from inside the router's method, which makes it the one place in the process.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Iterable
from typing import Any

from disagg.messages import WorkerRecord, decode_worker_record, encode

Listener = Callable[[list[WorkerRecord]], None]

_METADATA_KEY = "disagg_worker"

_lock = threading.Lock()  # Serve calls from its router thread, the ingress from its event loop
_records: dict[str, list[WorkerRecord]] = {}  # by deployment
_listeners: list[Listener] = []


def to_metadata(record: WorkerRecord) -> dict[str, str]:
    """A worker's record as `record_replica_metadata` must return it: plain JSON values."""
    return {_METADATA_KEY: base64.b64encode(encode(record)).decode()}


def from_metadata(metadata: dict[str, Any] | None) -> WorkerRecord | None:
    """None for a replica that has not published itself yet."""
    if not metadata or _METADATA_KEY not in metadata:
        return None
    return decode_worker_record(base64.b64decode(metadata[_METADATA_KEY]))


def replace(deployment: str, records: Iterable[WorkerRecord]) -> None:
    """Serve's word on who runs in `deployment`, complete each time."""
    with _lock:
        _records[deployment] = list(records)
        everyone = [record for group in _records.values() for record in group]
        listeners = list(_listeners)
    for listener in listeners:
        listener(everyone)


def subscribe(listener: Listener) -> None:
    """Call `listener` with all workers now and at each change, from any thread."""
    with _lock:
        _listeners.append(listener)
        everyone = [record for group in _records.values() for record in group]
    listener(everyone)


def unsubscribe(listener: Listener) -> None:
    with _lock:
        _listeners.remove(listener)
