"""The network under a transport, as the mover sees it: NIXL in production (`nixl_transport.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from disagg.kvtransfer.ticket import Peer


class ByteRange(NamedTuple):
    """One run of bytes to copy."""

    local_address: int
    remote_address: int
    nbytes: int


class Wire(Protocol):
    """The network under a transport. Used by one thread; any method may raise anything."""

    def connect(self, record: bytes) -> str:
        """Load a peer's connection record; returns the name it belongs to."""
        ...

    def forget(self, name: str) -> None: ...

    def read_blocks(self, peer: Peer, pieces: Sequence[ByteRange]) -> Any:
        """Prepare a READ from the peer's slab into the slab here."""
        ...

    def read_stamps(self, peer: Peer, pieces: Sequence[ByteRange]) -> Any:
        """Prepare a READ from the peer's stamp table into the scratch table here."""
        ...

    def post(self, transfer: Any) -> None: ...

    def is_done(self, transfer: Any) -> bool:
        """False while it is running."""
        ...

    def release(self, transfer: Any) -> None: ...

    def notify(self, name: str, message: bytes) -> None: ...

    def messages(self) -> list[bytes]:
        """Notifications that came since the last call."""
        ...

    def close(self) -> None:
        """Close every connection; nothing is read or written afterwards."""
        ...
