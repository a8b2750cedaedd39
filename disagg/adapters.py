"""LoRA adapters as all processes name them, and how processes agree on which are served.

An adapter is identified by the digest of its files, not by its name: a request carries both, and
where to read the files. So any worker can load what it lacks, and KV of a name whose files were
replaced is never used again. Ingresses and workers each keep an `AdapterBoard` and exchange its
entries; of two entries of one name the later wins, so all boards become equal in any order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """A LoRA adapter.

    name: by which clients ask for it.
    model: the served name of its base model.
    path: its directory, which all nodes have.
    digest: of its files.
    """

    name: str
    model: str
    path: str
    digest: str


class AdapterEntry(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an adapter's name since `changed_unix_s`.

    changed_unix_s: 0: the configuration says so.
    is_served: False: it was unloaded.
    """

    adapter: Adapter
    changed_unix_s: float = 0.0
    is_served: bool = True

    @property
    def _order(self) -> tuple[float, str, bool]:
        # The digest decides between two of the same moment, on all boards alike.
        return self.changed_unix_s, self.adapter.digest, self.is_served

    def replaces(self, other: AdapterEntry | None) -> bool:
        return other is None or self._order > other._order


class AdapterReport(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of adapters.

    entries: its board.
    on_device: digests of those that it can compute with at once.
    load_s: measured seconds to load another one, without a queue.
    """

    entries: tuple[AdapterEntry, ...] = ()
    on_device: tuple[str, ...] = ()
    load_s: float = 0.0


class AdapterBoard:
    """The entries of all names that a process knows, by model and name."""

    def __init__(self, entries: Iterable[AdapterEntry] = ()) -> None:
        self._entries: dict[tuple[str, str], AdapterEntry] = {}
        self.merge(entries)

    @property
    def entries(self) -> tuple[AdapterEntry, ...]:
        return tuple(self._entries.values())

    def served(self) -> list[Adapter]:
        return [each.adapter for each in self._entries.values() if each.is_served]

    def of_model(self, model: str) -> tuple[AdapterEntry, ...]:
        return tuple(each for (of, _), each in self._entries.items() if of == model)

    def merge(self, entries: Iterable[AdapterEntry]) -> list[AdapterEntry]:
        """Take the entries that are later than those here. Returns them."""
        taken = []
        for entry in entries:
            key = entry.adapter.model, entry.adapter.name
            if entry.replaces(self._entries.get(key)):
                self._entries[key] = entry
                taken.append(entry)
        return taken

    def lacks(self, others: Iterable[AdapterEntry]) -> bool:
        """Whether some of `others` is later than what is here."""
        found = self._entries.get
        return any(each.replaces(found((each.adapter.model, each.adapter.name))) for each in others)
