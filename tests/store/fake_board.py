"""A board in this process instead of Redis."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class FakeBoard:
    """A board for the ingresses of one process, instead of `RedisBoard`."""

    def __init__(self) -> None:
        self._entries: dict[str, bytes] = {}

    def exchange(
        self, ingress_id: str, entry: bytes, gone: Collection[str] = ()
    ) -> Mapping[str, bytes]:
        for each in gone:
            self._entries.pop(each, None)
        self._entries[ingress_id] = entry
        return dict(self._entries)

    def close(self) -> None:
        """Close nothing: other ingresses still use the board."""
