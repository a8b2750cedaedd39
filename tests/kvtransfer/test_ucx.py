"""UCX listens where the configuration says, and says which lane carries what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from disagg.errors import StartupError
from disagg.kvtransfer import nixl_transport
from disagg.kvtransfer.nixl_transport import NixlTransport
from disagg.kvtransfer.ucx import (
    Listener,
    Tables,
    in_environment,
    interface_of,
    listeners,
    ucx_settings,
)
from tests.kvtransfer.memory import Memory
from tests.kvtransfer.sides import finish

WORKER = """
import json, sys, time
from disagg.kvtransfer.ucx import listeners
from disagg.kvtransfer.nixl_transport import NixlTransport
from tests.kvtransfer.memory import Memory

memory = Memory("worker")
interface = sys.argv[1] or None
side = NixlTransport(memory.slab, memory.stamps, clock=time.monotonic, interface=interface)
print(json.dumps(sorted(each.address for each in listeners())))
side.close()
"""


def addresses_of_a_worker(interface: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, interface], capture_output=True, text=True, check=True
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_on_the_loopback_nothing_else_listens() -> None:
    everywhere = addresses_of_a_worker("")
    assert set(everywhere) != {"127.0.0.1"}, "UCX's own choice: every interface"
    assert set(addresses_of_a_worker("lo")) == {"127.0.0.1"}


def test_an_interface_that_is_not_there_is_refused_in_words() -> None:
    memory = Memory("worker")
    with pytest.raises(StartupError, match=r"'eth77', and this machine has .* lo") as refused:
        NixlTransport(memory.slab, memory.stamps, clock=time.monotonic, interface="eth77")
    assert refused.value.param == "transfer_interface"


def test_own_settings_win_and_leave_the_environment_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "off")
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    settings = ucx_settings("lo", {"TLS": "tcp,self", "UCX_RNDV_THRESH": "8k"}, device_id=0)
    assert settings == {
        "UCX_TLS": "tcp,self",
        "UCX_RNDV_THRESH": "8k",
        "UCX_NET_DEVICES": "lo",
    }, "the environment's choice for CUDA IPC stays"
    with in_environment(settings):
        assert os.environ["UCX_NET_DEVICES"] == "lo" and os.environ["UCX_TLS"] == "tcp,self"
    assert os.environ["UCX_NET_DEVICES"] == "eth0" and "UCX_TLS" not in os.environ
    monkeypatch.delenv("UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
    assert ucx_settings(None, {}, device_id=0) == {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
    assert ucx_settings(None, {}) == {}, "no CUDA, no setting of it"


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == interface_of("localhost") == "lo"
    assert interface_of("198.51.100.77") is None


def test_a_public_listener_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    places = ["127.0.0.1", "10.1.2.3", "fd00::1", "100.64.0.1", "8.8.8.8", "0.0.0.0", "::"]
    nixl_transport._warn_of_strangers(Listener(place, 4000) for place in places)
    warned = [place for place in places if f"listens on {place}:4000" in caplog.text]
    assert warned == ["8.8.8.8", "0.0.0.0", "::"]


def test_own_listeners_are_found_in_both_families() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as four:
        here = Listener("127.0.0.1", four.getsockname()[1])
        assert here in listeners()
    assert here not in listeners()
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as six:
        assert Listener("::1", six.getsockname()[1]) in listeners()


TABLE = """
[1.5] [vm:1:1]   +--------+-------------+------------------+
[1.5] [vm:1:1]   | d#1 intra-node cfg#2                    |
[1.5] [vm:1:1]   | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0] |
[1.5] [vm:1:1]   +--------+-------------+------------------+
[1.5] [vm:1:1]   | Range  | Description |      Config      |
[1.5] [vm:1:1]   +--------+-------------+------------------+
[1.5] [vm:1:1]   | 0..8184   | software emulation | tcp/eth0  |
[1.5] [vm:1:1]   | 8185..inf | zero-copy          | cuda_ipc/cuda |
[1.5] [vm:1:1]   +--------+-------------+------------------+
[1.5] [vm:1:1]   | d#1 inter-node cfg#3                    |
[1.5] [vm:1:1]   | remote memory read by ucp_get* into host memory from host |
[1.5] [vm:1:1]   | 0..64K | copy-in | rc_mlx5/mlx5_0:1 |
[1.5] [vm:1:1]   | 65537..inf | zero-copy | 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1 |
[1.5] [vm:1:1]   | d#1 intra-node cfg#2                    |
[1.5] [vm:1:1]   | active message by ucp_am_send* from host memory |
[1.5] [vm:1:1]   | 0..inf | short | tcp/eth0 |
"""


def test_lanes_are_those_of_reads_by_size_and_distance() -> None:
    tables = Tables()
    assert all(tables.take(line) for line in TABLE.splitlines())
    assert not tables.take("[1.5] [vm:1:1]  tcp_ep.c:42  UCX  ERROR  connection reset")
    assert tables.lane("d#1", is_near=True, nbytes=100) == "tcp"
    assert tables.lane("d#1", is_near=True, nbytes=1 << 20) == "cuda_ipc"
    assert tables.lane("d#1", is_near=False, nbytes=65536) == "rc_mlx5"
    assert tables.lane("d#1", is_near=False, nbytes=1 << 30) == "rc_mlx5"
    assert tables.lane("another", is_near=True, nbytes=100) == ""


PULL = """
import json, sys, time
from disagg.kvtransfer.nixl_transport import NixlTransport
from tests.kvtransfer.memory import Memory
from tests.kvtransfer.sides import finish

ucx, progress_thread = json.loads(sys.argv[1]), json.loads(sys.argv[2])
memories = [
    Memory("source", block_nbytes=65536),
    Memory("small-decode-reader-with-a-long-name", block_nbytes=65536),
]
source, reader = (
    NixlTransport(
        each.slab, each.stamps, clock=time.monotonic, interface="lo", ucx=ucx,
        progress_thread=progress_thread,
    )
    for each in memories
)
reader.add_peer(source.peer)
for turn in range(3):
    reader.pull(memories[0].ticket(f"t{turn}", range(8)), 0, [*range(8)])
    done = finish(reader)
    assert done.error is None and memories[1].read(5) == memories[0].read(5)
print(json.dumps(done.lane))
source.close(), reader.close()
"""


@pytest.mark.parametrize("progress_thread", [True, False])
@pytest.mark.parametrize(("tls", "lane"), [("all", "cma"), ("tcp,self", "tcp")])
def test_a_pull_says_what_carried_it(tls: str, lane: str, progress_thread: bool) -> None:
    """Without NIXL's progress thread, as on a GPU, the movers' threads keep both sides going."""
    done = subprocess.run(
        [sys.executable, "-c", PULL, json.dumps({"TLS": tls}), json.dumps(progress_thread)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == lane


def test_the_thread_that_uses_nixl_has_the_device_before_the_agent_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, int]] = []
    make = nixl_transport._agent

    def make_noted(name: str, progress_thread: bool) -> object:
        told.append(("agent", threading.get_ident()))
        return make(name, progress_thread)

    monkeypatch.setattr(nixl_transport, "_agent", make_noted)
    memory, other = Memory("worker"), Memory("other")
    sides = [
        NixlTransport(
            each.slab,
            each.stamps,
            clock=time.monotonic,
            interface="lo",
            begin_thread=lambda: told.append(("device", threading.get_ident())),
        )
        for each in (memory, other)
    ]
    assert [what for what, _ in told] == ["device", "agent"] * 2
    threads = [thread for _, thread in told]
    assert (
        threads[0] == threads[1] != threads[2] == threads[3]
        and threading.get_ident() not in threads
    )
    sides[0].add_peer(sides[1].peer)
    sides[0].pull(other.ticket("t", [3]), 0, [4])
    assert finish(sides[0]).error is None
    for side in sides:
        side.close()
