"""Membership: the list of running workers that Serve has sent to this process.

Serve pickles the class of a request router and its module by value, so the module's globals would
be copied for each deployment. The router imports this module inside a method instead, so there is
one list per process.

While Serve's controller is down, the last list stays valid. `from_metadata` and `replace` must not
raise, because an exception would stop Serve's updates to this process for ever.
"""

from __future__ import annotations

import base64
import binascii
import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from disagg.messages import WorkerRecord, decode_worker_record, encode

logger = logging.getLogger(__name__)

Listener = Callable[[list[WorkerRecord]], None]

_METADATA_KEY = "disagg_worker"

# Serve calls from its router's thread, the ingress from its event loop. The lock is held while
# listeners are called; otherwise they might get the older of two lists last.
_lock = threading.Lock()
_records: dict[str, list[WorkerRecord]] = {}  # by deployment
_listeners: list[Listener] = []


def to_metadata(record: WorkerRecord) -> dict[str, str]:
    """Encode a worker's record for `record_replica_metadata`, which needs plain JSON values."""
    return {_METADATA_KEY: base64.b64encode(encode(record)).decode()}


def from_metadata(metadata: dict[str, Any] | None) -> WorkerRecord | None:
    """Decode a worker's record; None if there is none yet, or it is of another release."""
    if not metadata or _METADATA_KEY not in metadata:
        return None
    try:
        return decode_worker_record(base64.b64decode(metadata[_METADATA_KEY]))
    except (msgspec.DecodeError, binascii.Error, TypeError) as error:
        logger.warning(
            "Ignoring a worker whose record cannot be read; is it of another version? %s", error
        )
        return None


def replace(deployment: str, records: Iterable[WorkerRecord]) -> None:
    """Replace the list of workers in `deployment`, and call the listeners."""
    with _lock:
        _records[deployment] = list(records)
        everyone = _everyone()
        for listener in _listeners:
            listener(everyone)


def subscribe(listener: Listener) -> None:
    """Call `listener` with all workers now and after each change, from any thread.

    It must not wait, raise or call this module.
    """
    with _lock:
        _listeners.append(listener)
        listener(_everyone())


def unsubscribe(listener: Listener) -> None:
    with _lock:
        _listeners.remove(listener)


def _everyone() -> list[WorkerRecord]:
    return [record for group in _records.values() for record in group]
