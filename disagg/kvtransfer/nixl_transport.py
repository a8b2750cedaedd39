"""The NIXL transport (UCX): RDMA, NVLink, shared memory or TCP, whatever connects two workers.

A pull is one-sided: READ the blocks, then READ their generations, compare, notify the source.
`NixlTransport` is the engine's side, `mover` executes the pulls, `_NixlWire` has all calls to NIXL.

One transfer per pull, with one descriptor per run of blocks. Lists prepared once per peer fix a
descriptor to a block, so runs could not be merged: posting 1,024 neighbours takes 0.1 ms from
prepared lists, 0.5 ms unmerged without, 0.06 ms as the one run that they are.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from disagg.errors import StartupError, TransferFailed
from disagg.kvtransfer.mover import (
    Close,
    Connect,
    Job,
    Look,
    Mover,
    Notice,
    Notify,
    PullEnded,
    agent_name,
)
from disagg.kvtransfer.nixl import _bindings, nixl_agent, nixl_agent_config, nixl_xfer_handle
from disagg.kvtransfer.pulls import ByteRange, PullBook, describe
from disagg.kvtransfer.slab import HOST, Slab, Stamps
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.kvtransfer.ucx import Listener, UcxLog, in_environment, listeners, ucx_settings

TRANSPORT = "nixl"
# UCX wakes the progress thread; this is for transports of UCX that cannot.
PROGRESS_DELAY_US = 5_000
IDLE_LOOK_S = 0.001  # without a progress thread: seconds between polls for messages of peers
EMPTY: Mapping[str, str] = {}
# Without these UCX loads no module for CUDA, and takes a GPU's memory for the host's.
NEEDED_ON_GPU = (
    "For GPU memory UCX needs libcuda.so.1 and libnvidia-ml.so.1 (in a container"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility); UCX_TLS, if set, needs cuda_copy and cuda_ipc"
)

_log = logging.getLogger(__name__)


class NixlTransport:
    """One worker's side. See `transport.Transport`; a failed handshake ends pulls with an error.

    One thread makes all calls to NIXL. On a GPU this is necessary: UCX calls CUDA, which needs a
    context in the calling thread. NIXL's own progress thread has none and crashes
    (ai-dynamo/nixl#2102), so it is off, and the mover's thread polls often instead.

    Args:
        stamps: the generations of `slab`, bumped by its owner.
        clock: seconds, monotonic; called from both threads.
        pull_timeout_s, settle_s, before_pull: see `Mover`.
        interface, ucx: see `ucx.ucx_settings`.
        begin_thread: called first in the thread that uses NIXL; it makes the slab's device that
            thread's.
        progress_thread: NIXL has one; by default where the slab is in host memory.

    Raises:
        StartupError: NIXL cannot be started here or refuses the memory.
    """

    def __init__(
        self,
        slab: Slab,
        stamps: Stamps,
        *,
        clock: Callable[[], float],
        pull_timeout_s: float = 30.0,
        settle_s: float = 0.5,
        interface: str | None = None,
        ucx: Mapping[str, str] = EMPTY,
        begin_thread: Callable[[], None] = lambda: None,
        before_pull: Callable[[], None] = lambda: None,
        progress_thread: bool | None = None,
    ) -> None:
        self._peer = describe(TRANSPORT, slab, stamps)
        self._clock = clock
        self._slab = slab
        self._book = PullBook(slab, TRANSPORT)
        self._jobs: SimpleQueue[Job] = SimpleQueue()
        self._notices: SimpleQueue[Notice] = SimpleQueue()
        self._ucx_log = UcxLog.of_process()
        scratch = array("Q", bytes(stamps.nbytes))
        name = agent_name(self._peer)
        settings = self._ucx_log.settings | ucx_settings(interface, ucx, slab.device_id)
        if progress_thread is None:
            progress_thread = slab.device_id == HOST
        made: SimpleQueue[bytes | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                begin_thread()
                before = listeners()
                with in_environment(settings):
                    wire = _NixlWire(name, slab, stamps, scratch, progress_thread)
                _warn_of_strangers(listeners() - before)
            except BaseException as error:
                made.put(error)
                return
            mover = Mover(
                wire,
                slab,
                scratch,
                self._jobs,
                self._notices,
                clock=clock,
                pull_timeout_s=pull_timeout_s,
                settle_s=settle_s,
                idle_look_s=None if progress_thread else IDLE_LOOK_S,
                before_pull=before_pull,
            )
            made.put(wire.record)
            mover.run()

        self._thread = threading.Thread(target=run, name=f"nixl {name}", daemon=True)
        self._thread.start()
        record = made.get()
        if isinstance(record, BaseException):
            raise record
        self._peer = replace(self._peer, agent=record)

    @property
    def peer(self) -> Peer:
        return self._peer

    def add_peer(self, peer: Peer) -> bool:
        if peer.worker_id == self._peer.worker_id:
            return False  # membership lists all workers; a worker does not pull from itself
        ranks, gone, is_new = self._book.add_peer(peer)
        self._jobs.put(Connect(ranks, gone))
        return is_new

    def forget_peer(self, worker_id: str) -> None:
        self._jobs.put(Connect((), self._book.forget_peer(worker_id)))

    def pull(
        self, ticket: KVTicket, first_block: int, into: list[int], *, releases: bool = True
    ) -> int:
        pull = self._book.begin(ticket, first_block, into, self._clock(), releases)
        self._jobs.put(pull)
        return pull.pull_id

    def release(self, ticket: KVTicket) -> None:
        self._book.mark_used(ticket)
        peer = self._book.peer_of(ticket)
        if peer is not None:
            self._jobs.put(Notify(peer, ticket.ticket_id))

    def poll(self) -> list[PullDone | TicketReleased]:
        events: list[PullDone | TicketReleased] = []
        for _ in range(self._notices.qsize()):
            notice = self._notices.get_nowait()
            if isinstance(notice, TicketReleased):
                events.append(notice)
                continue
            self._book.end(notice.pull)
            events.append(self._done(notice))
        if self._jobs.empty():
            self._jobs.put(Look())
        return events

    def close(self) -> None:
        """Release everything that NIXL holds. Afterwards nothing writes to the slab any more."""
        self._jobs.put(Close())
        self._thread.join()

    def _done(self, ended: PullEnded) -> PullDone:
        pull = ended.pull
        lane = ""
        if ended.error is None:
            is_near = all(each.rank.node == self._peer.node for each in pull.sources)
            nbytes = pull.largest_nbytes(self._slab)
            lane = self._ucx_log.lane(agent_name(self._peer), is_near=is_near, nbytes=nbytes)
        return PullDone(
            pull.pull_id,
            ended.error,
            pull.num_blocks,
            pull.nbytes,
            ended.seconds,
            lane,
            ended.is_torn,
        )


class _NixlWire:
    """A NIXL agent with the slab, the stamps and the scratch table registered.

    Attributes:
        record: the connection record that peers need.
    """

    def __init__(
        self, name: str, slab: Slab, stamps: Stamps, scratch: array[int], progress_thread: bool
    ) -> None:
        self._kept_alive = (slab, stamps, scratch)
        self._memory = _memory_of(slab.device_id)
        self._peers: set[str] = set()
        try:
            self._agent = _agent(name, progress_thread)
            self._agent.create_backend("UCX", {})
            self._registered = [
                self._register(slab.base_address, slab.nbytes, self._memory),
                self._register(stamps.address, stamps.nbytes, _memory_of(HOST)),
                self._register(scratch.buffer_info()[0], stamps.nbytes, _memory_of(HOST)),
            ]
            self.record: bytes = self._agent.get_agent_metadata()
        except Exception as error:  # NIXL's errors have no root of their own
            on_gpu = "" if slab.device_id == HOST else f". {NEEDED_ON_GPU}"
            raise StartupError(
                f"NIXL could not be started for a slab of {slab.nbytes} bytes ({error!r});"
                " `disagg doctor` shows what this machine offers; check also UCX's own settings"
                f" (UCX_TLS, UCX_NET_DEVICES){on_gpu}"
            ) from error

    def connect(self, record: bytes) -> str:
        name: str = self._agent.add_remote_agent(record).decode()
        self._peers.add(name)
        return name

    def forget(self, name: str) -> None:
        self._peers.discard(name)
        self._agent.remove_remote_agent(name)

    def read_blocks(self, peer: Peer, pieces: Sequence[ByteRange]) -> nixl_xfer_handle:
        return self._read(peer, pieces, self._memory, _memory_of(peer.device_id))

    def read_stamps(self, peer: Peer, pieces: Sequence[ByteRange]) -> nixl_xfer_handle:
        return self._read(peer, pieces, _memory_of(HOST), _memory_of(HOST))

    def post(self, transfer: nixl_xfer_handle) -> None:
        if self._agent.transfer(transfer) == "ERR":
            raise TransferFailed("NIXL could not post a transfer")

    def is_done(self, transfer: nixl_xfer_handle) -> bool:
        state = self._agent.check_xfer_state(transfer)
        if state == "ERR":
            raise TransferFailed("NIXL reports a failed transfer")
        return bool(state == "DONE")

    def release(self, transfer: nixl_xfer_handle) -> None:
        transfer.release()

    def notify(self, name: str, message: bytes) -> None:
        self._agent.send_notif(name, message)

    def messages(self) -> list[bytes]:
        by_agent: dict[str, list[bytes]] = self._agent.get_new_notifs()
        return [message for messages in by_agent.values() for message in messages]

    def close(self) -> None:
        for name in list(self._peers):
            self.forget(name)
        for registered in self._registered:
            self._agent.deregister_memory(registered)
        del self._agent  # the last reference: UCX closes its connections

    def _read(
        self,
        peer: Peer,
        pieces: Sequence[ByteRange],
        local: tuple[str, int],
        remote: tuple[str, int],
    ) -> nixl_xfer_handle:
        agent, (memory, device), (peer_memory, peer_device) = self._agent, local, remote
        here = [(piece.local_address, piece.nbytes, device) for piece in pieces]
        there = [(piece.remote_address, piece.nbytes, peer_device) for piece in pieces]
        return agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(here, memory),
            agent.get_xfer_descs(there, peer_memory),
            agent_name(peer),
        )

    def _register(self, address: int, nbytes: int, memory: tuple[str, int]) -> Any:
        kind, device = memory
        return self._agent.register_memory([(address, nbytes, device, "")], kind)


def _agent(name: str, progress_thread: bool) -> nixl_agent:
    """Create an agent. Its progress thread, if it has one, sleeps until UCX wakes it.

    NIXL's Python API fixes the thread's delay at 0, with which it polls without a pause and takes a
    core for each idle worker. So the agent below the API is replaced before it has a backend.
    """
    config = _bindings.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.pthrDelay = PROGRESS_DELAY_US
    agent = nixl_agent(name, nixl_agent_config(backends=[]))
    agent.agent = _bindings.nixlAgent(name, config)
    return agent


def _warn_of_strangers(opened: Iterable[Listener]) -> None:
    for listener in opened:
        if listener.is_public:
            _log.warning(
                "UCX listens on %s:%d, which other networks may reach. It checks no key: any host"
                " that connects can write into this worker's memory. Set transfer_interface to a"
                " private network (docs/security.md).",
                *listener,
            )


def _memory_of(device_id: int) -> tuple[str, int]:
    """NIXL's name for the memory of a device, and the device's number in it."""
    return ("DRAM", 0) if device_id == HOST else ("VRAM", device_id)
