"""One side of a measured transfer.

`python -m disagg.tools.doctor.transfer_probe NAME DEVICE INTERFACE`

It runs in a separate process, because a broken transport may crash its process. It writes one line
of JSON, a `Peer` to pull from. For each `Peer` of another probe that it reads, it pulls from that
probe and writes `Figures`. It ends when its input ends.
"""

from __future__ import annotations

import ctypes
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from disagg.errors import DisaggError
from disagg.kvtransfer.slab import HOST, Slab, Stamps, allocate_host, first_generation
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.kvtransfer.transport import PullDone

if TYPE_CHECKING:
    from disagg.kvtransfer.nixl_transport import NixlTransport

BLOCK_NBYTES = 64 << 10
NUM_BLOCKS = 1024
NUM_LATENCIES, NUM_BANDWIDTHS = 50, 5
PULL_TIMEOUT_S = 20.0
LAYOUT = "disagg-doctor"


class Figures(msgspec.Struct, frozen=True):
    """The measurements of one probe that pulls from another, or the error.

    Attributes:
        latency_s: median time of a pull of one block.
        bytes_per_s: median rate of a pull of all blocks.
        copy_bytes_per_s: rate of a plain copy of as many bytes in this process; None on a GPU.
        lane: the UCX transport of these reads.
        ucx: version of UCX, and the transport modules that it could load.
        error: the error; if it is not "", no other field is valid.
    """

    latency_s: float = 0.0
    bytes_per_s: float = 0.0
    copy_bytes_per_s: float | None = None
    lane: str = ""
    ucx: str = ""
    error: str = ""


class Probe:
    """A slab behind a NIXL agent.

    Args:
        interface: network interface for UCX; see `kvtransfer.ucx.ucx_settings`.
    """

    def __init__(self, name: str, device_id: int, interface: str | None) -> None:
        from disagg.kvtransfer.nixl_transport import NixlTransport

        self._name = name
        self.slab, self._fill = _memory(device_id)
        self._fill(1)
        self._num_pulls = 0
        stamps = Stamps(NUM_BLOCKS, name, 1)
        self.side: NixlTransport = NixlTransport(
            self.slab,
            stamps,
            clock=time.perf_counter,
            pull_timeout_s=PULL_TIMEOUT_S,
            begin_thread=lambda: self._fill(1),  # gives the thread a CUDA context on a GPU
            interface=interface,
        )

    def measure(self, peer: Peer) -> Figures:
        try:
            self.side.add_peer(peer)
            self._pull(peer, 1)  # the first pull includes the handshake, so it is not measured
            small = [self._pull(peer, 1).seconds for _ in range(NUM_LATENCIES)]
            self._pull(peer, NUM_BLOCKS)
            large = [self._pull(peer, NUM_BLOCKS) for _ in range(NUM_BANDWIDTHS)]
        except DisaggError as error:
            return Figures(error=error.message)
        return Figures(
            statistics.median(small),
            self.slab.nbytes / statistics.median(each.seconds for each in large),
            self._copy_speed(),
            large[-1].lane,
            _ucx(),
        )

    def _pull(self, peer: Peer, num_blocks: int) -> PullDone:
        """Pull blocks and wait for the end. Raises `DisaggError` if the pull fails."""
        self._num_pulls += 1
        ticket = KVTicket(
            ticket_id=f"{self._name}-{self._num_pulls}",
            source_id=peer.worker_id,
            epoch=peer.epoch,
            layout=LAYOUT,
            num_tokens=1,
            block_ids=tuple(range(num_blocks)),
            generations=(first_generation(peer.worker_id, peer.epoch),) * num_blocks,
        )
        self.side.pull(ticket, 0, list(range(num_blocks)))
        deadline = time.perf_counter() + 2 * PULL_TIMEOUT_S
        while time.perf_counter() < deadline:
            for event in self.side.poll():
                if isinstance(event, PullDone):
                    if event.error is not None:
                        raise DisaggError(event.error)
                    return event
            time.sleep(10e-6)
        raise DisaggError(f"the pull did not end within {2 * PULL_TIMEOUT_S:.0f} s")

    def _copy_speed(self) -> float | None:
        if self.slab.device_id != HOST:
            return None
        other = allocate_host(self.slab.nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(other))
        seconds = []
        for _ in range(NUM_BANDWIDTHS + 1):  # the first copy allocates pages and does not count
            began_s = time.perf_counter()
            ctypes.memmove(address, self.slab.base_address, self.slab.nbytes)
            seconds.append(time.perf_counter() - began_s)
        return self.slab.nbytes / statistics.median(seconds[1:])


def _memory(device_id: int) -> tuple[Slab, Callable[[int], None]]:
    """A slab on a device, and a function that fills it with a value."""
    owner: Any
    if device_id == HOST:
        owner = allocate_host(NUM_BLOCKS * BLOCK_NBYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(owner))

        def fill(value: int) -> None:
            ctypes.memset(address, value, NUM_BLOCKS * BLOCK_NBYTES)
    else:
        import torch

        owner = torch.zeros(
            NUM_BLOCKS * BLOCK_NBYTES, dtype=torch.uint8, device=f"cuda:{device_id}"
        )
        address = owner.data_ptr()

        def fill(value: int) -> None:
            owner.fill_(value)
            torch.cuda.synchronize(device_id)

    return Slab(address, NUM_BLOCKS, BLOCK_NBYTES, LAYOUT, device_id, owner=owner), fill


def _ucx() -> str:
    """Version and modules of UCX, as "1.20.0: cma, cuda". Shared memory and TCP are built in."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    modules = {match[1] for path in mapped if (match := re.search(r"/libuct_([a-z]+)[._]", path))}
    library = next((path for path in mapped if re.search(r"/libucp[-.]", path)), None)
    if library is None:
        return ""
    version = ctypes.CDLL(library).ucp_get_version_string
    version.restype = ctypes.c_char_p
    return f"{version().decode()}: {', '.join(sorted(modules))}"


def main(name: str, device: str, interface: str) -> None:
    try:
        probe = Probe(name, int(device), interface or None)
    except Exception as error:  # any error is reported to the reader of the output
        print(msgspec.json.encode(Figures(error=f"{error}")).decode(), flush=True)
        return
    print(msgspec.json.encode(probe.side.peer).decode(), flush=True)
    for line in sys.stdin:
        figures = probe.measure(msgspec.json.decode(line, type=Peer))
        print(msgspec.json.encode(figures).decode(), flush=True)
    probe.side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
