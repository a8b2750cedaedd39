"""The transfer thread: executes pulls and checks their stamps. Only this thread uses the wire.

A pull succeeds only if the stamps of its blocks did not change (`Mover._advance`). What happens to
the blocks then is decided by the KV import (`worker/kv_import.py`).

Between processes of one machine, posting a READ performs the whole copy at the speed of memcpy, so
it must not run in the engine's thread. The two threads exchange messages through two queues and
share nothing else.

This file decides when a pull has ended and its blocks may be reused. NIXL 1.5.1 over UCX does not
guarantee this, so:

- Releasing a transfer in progress, or removing its peer, does not stop it: a stopped peer that
  wakes up later still writes all bytes (seen over TCP), though both calls report success. So an
  unfinished transfer is never released and its peer never removed; its blocks stay with the
  transport until the wire reports the end. A pull whose source hangs is reported when the source
  wakes up or dies: late, but safe.
- After an error the wire does not say whether every part of the transfer has ended. The connection
  is closed by then; the blocks still wait for `settle_s` before they are returned.

Must not know NIXL, so that tests can put any fault on the wire.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal, Protocol, TypeAlias

from disagg.errors import TransferFailed
from disagg.kvtransfer.pulls import MAX_TICKET_ID_NBYTES, ByteRange, Pull
from disagg.kvtransfer.slab import Slab
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.transport import TicketReleased

MAX_UNREAD_NOTICES = 65_536
MAX_WAIT_S = 0.001  # between two checks of running transfers
CLOSE_PATIENCE_S = 2.0

_log = logging.getLogger(__name__)


class Wire(Protocol):
    """The network under a transport (`nixl_transport`). Used by one thread; any method may raise
    anything."""

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


@dataclass(frozen=True, slots=True)
class Connect:
    peers: tuple[Peer, ...]  # the ranks of one worker
    gone: tuple[Peer, ...]  # peers that these replace, or that have left


@dataclass(frozen=True, slots=True)
class Notify:
    peer: Peer
    ticket_id: str


class Look:
    """Look for notifications."""


class Close:
    """Wind up."""


@dataclass(frozen=True, slots=True)
class PullEnded:
    pull: Pull
    error: str | None
    seconds: float
    is_torn: bool = False


@dataclass(slots=True)
class _RunningPull:
    """A running pull, in one transfer for each source, and then one for stamps.

    transfers: those that run, with their peers.
    broken: those that failed. They may still write until `settled_at`.
    """

    pull: Pull
    deadline: float
    stage: Literal["blocks", "stamps"] = "blocks"
    transfers: list[tuple[Peer, Any]] = field(default_factory=list)
    broken: list[Any] = field(default_factory=list)
    error: str | None = None
    is_torn: bool = False
    settled_at: float = 0.0


Job: TypeAlias = Pull | Connect | Notify | Look | Close
Notice: TypeAlias = PullEnded | TicketReleased


class Mover:
    """Runs pulls in a thread of its own. Jobs come in through one queue, notices go out through
    another.

    Args:
        scratch: one generation per local block. Running pulls have disjoint blocks, so each
            generation that is read is stored at the index of its block.
        jobs: from the engine's thread.
        notices: to the engine's thread.
        pull_timeout_s: a pull that runs longer fails, once its blocks are safe.
        settle_s: how long blocks must not be reused after a broken transfer.
        idle_look_s: seconds between polls while idle, for a wire that answers its peers only when
            it is called from here. None: no polls are needed.
        before_pull: called before the wire writes to blocks of the slab, whose earlier content may
            still be on its way to the store. It may wait for a device.
    """

    def __init__(
        self,
        wire: Wire,
        slab: Slab,
        scratch: array[int],
        jobs: SimpleQueue[Job],
        notices: SimpleQueue[Notice],
        *,
        clock: Callable[[], float],
        pull_timeout_s: float,
        settle_s: float,
        idle_look_s: float | None = None,
        before_pull: Callable[[], None] = lambda: None,
    ) -> None:
        self._wire = wire
        self._slab = slab
        self._scratch = scratch
        self._jobs = jobs
        self._notices = notices
        self._clock = clock
        self._pull_timeout_s = pull_timeout_s
        self._settle_s = settle_s
        self._idle_look_s = idle_look_s
        self._before_pull = before_pull
        self._copies: list[_RunningPull] = []
        self._connected: set[str] = set()
        self._broken: set[str] = set()  # to be forgotten as soon as no copy is running
        self._gone: set[str] = set()  # broken peers that get no more notifications
        self._unsaid: list[tuple[Peer, str]] = []  # notifications that broken peers did not get
        self._closing = False

    def run(self) -> None:
        while not self._closing:
            self._work(self._wait_s())
        give_up_at = self._clock() + CLOSE_PATIENCE_S
        while self._copies and self._clock() < give_up_at:
            self._work(MAX_WAIT_S)
        self._shut_down()

    def _work(self, wait_s: float | None) -> None:
        try:
            self._take(self._jobs.get(timeout=wait_s))
        except Empty:
            if self._idle_look_s is not None:
                self._read_notices()
        now = self._clock()
        self._copies = [copy for copy in self._copies if not self._try_advance(copy, now)]
        if self._broken:
            self._drop_broken()

    def _wait_s(self) -> float | None:
        """Seconds until the next check: short for a young copy, at most an eighth of its age."""
        if not self._copies:
            return self._idle_look_s
        age = self._clock() - max(copy.pull.started_at for copy in self._copies)
        return min(MAX_WAIT_S, max(age / 8, 20e-6))

    # Jobs

    def _take(self, job: Job) -> None:
        match job:
            case Pull():
                self._copies.append(self._start(job))
            case Connect(peers, gone):
                self._broken.update(self._connected.intersection(map(agent_name, gone)))
                self._gone.update(self._broken.intersection(map(agent_name, gone)))
                for peer in peers:
                    self._try_connect(peer)
            case Notify(peer, ticket_id):
                self._notify(peer, ticket_id)
            case Look():
                self._read_notices()
            case Close():
                self._closing = True

    def _start(self, pull: Pull) -> _RunningPull:
        copy = _RunningPull(pull, deadline=self._clock() + self._pull_timeout_s)
        try:
            for rank in pull.agents:
                self._connect(rank)
            self._before_pull()
            self._post(copy)
        except Exception as error:
            self._fail(copy, error)
        return copy

    def _connect(self, peer: Peer) -> None:
        name = agent_name(peer)
        if name in self._broken:
            raise TransferFailed(f"the connection to {name} broke and is being taken down")
        if name in self._connected:
            return
        loaded = self._wire.connect(peer.agent)
        if loaded != name:
            if loaded not in self._connected:
                self._wire.forget(loaded)
            raise TransferFailed(f"the connection record of {name} belongs to {loaded}")
        self._connected.add(name)
        # The first message sets the connection up (8 ms with UCX): an empty one, before the first
        # pull has to wait for it.
        self._notify(peer, "")

    def _try_connect(self, peer: Peer) -> None:
        try:
            self._connect(peer)
        except Exception as error:
            _log.warning("no connection to %s: %r", agent_name(peer), error)

    def _notify(self, peer: Peer, ticket_id: str) -> None:
        name = agent_name(peer)
        if name in self._broken:
            self._unsaid.append((peer, ticket_id))
            return
        if name not in self._connected:
            return
        try:
            self._wire.notify(name, ticket_id.encode())
        except Exception as error:
            self._broken.add(name)
            if ticket_id:
                self._unsaid.append((peer, ticket_id))
            _log.warning("%s could not be notified of ticket %r: %r", name, ticket_id, error)

    def _say_again(self, unsaid: list[tuple[Peer, str]]) -> None:
        """Send the notification once more over a new connection, so that a live source frees its
        blocks."""
        for peer, ticket_id in unsaid:
            try:
                self._connect(peer)
                self._wire.notify(agent_name(peer), ticket_id.encode())
            except Exception as error:
                self._broken.update(self._connected & {agent_name(peer)})
                _log.warning("%s cannot be notified any more: %r", agent_name(peer), error)
                return

    def _read_notices(self) -> None:
        try:
            messages = self._wire.messages()
        except Exception as error:
            _log.warning("notifications could not be read: %r", error)
            return
        for message in messages:
            if self._notices.qsize() >= MAX_UNREAD_NOTICES:
                return
            if 0 < len(message) <= MAX_TICKET_ID_NBYTES:
                self._notices.put(TicketReleased(message.decode(errors="replace")))

    # Copies

    def _post(self, copy: _RunningPull) -> None:
        """Start reading the blocks, or in the second stage their generations."""
        pull = copy.pull
        if copy.stage == "stamps":
            first, table = pull.peer, self._scratch.buffer_info()[0]
            self._begin(copy, first, self._wire.read_stamps(first, pull.stamp_ranges(table)))
            return
        for source in pull.sources:
            pieces = pull.block_ranges(self._slab, source)
            self._begin(copy, source.rank, self._wire.read_blocks(source.rank, pieces))

    def _begin(self, copy: _RunningPull, peer: Peer, transfer: Any) -> None:
        try:
            self._wire.post(transfer)
        except Exception as error:
            self._lose(copy, peer, transfer, error)
        else:
            copy.transfers.append((peer, transfer))

    def _try_advance(self, copy: _RunningPull, now: float) -> bool:
        try:
            ended = self._advance(copy, now)
        except Exception as error:
            self._fail(copy, error)
            ended = False
        if ended:
            self._end(copy)
        return ended

    def _advance(self, copy: _RunningPull, now: float) -> bool:
        """Advance a pull: read the blocks, then the stamps, then compare these with the ticket's.
        True once the wire does not use its blocks any more."""
        while True:
            running = copy.transfers
            copy.transfers = [each for each in running if not self._has_ended(copy, *each)]
            if copy.transfers:
                if copy.error is None and now > copy.deadline:
                    copy.error = f"blocks did not arrive within {self._pull_timeout_s} s"
                return False
            if copy.error is not None:
                return now >= copy.settled_at
            if copy.stage == "stamps":
                if not copy.pull.is_unchanged(self._scratch):
                    copy.error = "the source used the blocks again while they were copied"
                    copy.is_torn = True
                return True
            copy.stage = "stamps"
            self._post(copy)

    def _has_ended(self, copy: _RunningPull, peer: Peer, transfer: Any) -> bool:
        try:
            if not self._wire.is_done(transfer):
                return False
            self._wire.release(transfer)
        except Exception as error:
            self._lose(copy, peer, transfer, error)
        return True

    def _lose(self, copy: _RunningPull, peer: Peer, transfer: Any, error: Exception) -> None:
        """A transfer failed; the others of its pull run on, and are waited for."""
        self._fail(copy, error)
        copy.broken.append(transfer)
        copy.settled_at = self._clock() + self._settle_s
        self._broken.add(agent_name(peer))

    def _fail(self, copy: _RunningPull, error: Exception) -> None:
        if copy.error is None:
            copy.error = f"transfer from {agent_name(copy.pull.peer)} failed: {error!r}"

    def _end(self, copy: _RunningPull) -> None:
        for transfer in copy.broken:
            self._try_release(transfer)
        pull = copy.pull
        seconds = self._clock() - pull.started_at
        self._notices.put(PullEnded(pull, copy.error, seconds, copy.is_torn))
        if pull.releases:
            self._notify(pull.peer, pull.ticket.ticket_id)
        elif agent_name(pull.peer) in self._broken:
            # Connect again: the source is told once the other ranks have ended, too.
            self._unsaid.append((pull.peer, ""))

    def _try_release(self, transfer: Any) -> None:
        try:
            self._wire.release(transfer)
        except Exception as error:
            _log.warning("a broken transfer could not be released: %r", error)

    # Ends

    def _drop_broken(self) -> None:
        """Forget broken peers, except those with a running copy."""
        pulls = (copy.pull for copy in self._copies)
        busy = {agent_name(rank) for pull in pulls for rank in pull.agents}
        for name in self._broken - busy:
            self._broken.discard(name)
            self._connected.discard(name)
            try:
                self._wire.forget(name)
            except Exception as error:  # the disconnect has done it already
                _log.debug("%s was forgotten already: %r", name, error)
            unsaid = [each for each in self._unsaid if agent_name(each[0]) == name]
            self._unsaid = [each for each in self._unsaid if agent_name(each[0]) != name]
            if name not in self._gone:
                self._say_again(unsaid)
            self._gone.discard(name)

    def _shut_down(self) -> None:
        """Close the wire with all its connections, which also ends transfers that hang."""
        for copy in self._copies:
            for transfer in (*copy.broken, *(each for _, each in copy.transfers)):
                self._try_release(transfer)
        self._copies.clear()
        try:
            self._wire.close()
        except Exception as error:
            _log.warning("the wire did not close cleanly: %r", error)


def agent_name(peer: Peer) -> str:
    """A peer's name on the wire. A restarted worker has another name."""
    return f"{peer.worker_id}#{peer.epoch}"
