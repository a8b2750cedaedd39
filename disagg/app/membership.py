"""Membership: the running workers that Serve has pushed into this process.

Serve pickles a request router's class together with its module by value, so globals of that module
would be private copies, one per deployment. This module is imported by name from inside the
router's method, so there is one of it per process.

While Serve's controller is away, the last membership stays valid. `from_metadata` and `replace`
must not raise: an exception would end Serve's updates to this process for good.
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

# Serve calls from its router's thread, the ingress from its event loop. Held while listeners are
# called, or the older of two lists might reach them last.
_lock = threading.Lock()
_records: dict[str, list[WorkerRecord]] = {}  # by deployment
_listeners: list[Listener] = []


def to_metadata(record: WorkerRecord) -> dict[str, str]:
    """A worker's record as `record_replica_metadata` must return it: plain JSON values."""
    return {_METADATA_KEY: base64.b64encode(encode(record)).decode()}


def from_metadata(metadata: dict[str, Any] | None) -> WorkerRecord | None:
    """None for a replica that has no record yet, or one of another release."""
    if not metadata or _METADATA_KEY not in metadata:
        return None
    try:
        return decode_worker_record(base64.b64decode(metadata[_METADATA_KEY]))
    except (msgspec.DecodeError, binascii.Error, TypeError) as error:
        logger.warning("A worker published a record that cannot be read; ignoring it: %s", error)
        return None


def replace(deployment: str, records: Iterable[WorkerRecord]) -> None:
    """Store Serve's complete list of the workers that run in `deployment`."""
    with _lock:
        _records[deployment] = list(records)
        everyone = _everyone()
        for listener in _listeners:
            listener(everyone)


def subscribe(listener: Listener) -> None:
    """Call `listener` with all workers now and at each change, from any thread.

    It must neither wait nor fail, nor call back into this module.
    """
    with _lock:
        _listeners.append(listener)
        listener(_everyone())


def unsubscribe(listener: Listener) -> None:
    with _lock:
        _listeners.remove(listener)


def _everyone() -> list[WorkerRecord]:
    return [record for group in _records.values() for record in group]
