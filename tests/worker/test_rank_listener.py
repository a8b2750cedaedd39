"""The listener for ranks of other nodes: which connections it takes, and what happens to others."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from disagg.errors import StartupError
from disagg.worker import rank_listener
from disagg.worker.rank_listener import (
    CONTROL,
    VISITOR,
    RankListener,
    _proof,
    connect_rank,
    is_over,
)

KEY = b"the cluster's key"


@pytest.fixture
def listener() -> Iterator[RankListener]:
    listener = RankListener("127.0.0.2", KEY, "worker")
    yield listener
    listener.close()


def test_ranks_come_in_any_order_and_messages_go_both_ways(listener: RankListener) -> None:
    assert listener.address[0] == "127.0.0.2"  # and not on all addresses
    with ThreadPoolExecutor(2) as threads:
        came = {
            rank: threads.submit(connect_rank, listener.address, KEY, "worker", rank)
            for rank in (2, 1)
        }
        for rank, coming in came.items():
            found = listener.take(rank, 60)
            assert found is not None
            for channel, (own, its) in enumerate(zip(found, coming.result(), strict=True)):
                own.send_bytes(b"to %d on %d" % (rank, channel))
                its.send_bytes(b"from %d on %d" % (rank, channel))
                assert its.recv_bytes() == b"to %d on %d" % (rank, channel)
                assert own.recv_bytes() == b"from %d on %d" % (rank, channel)
            assert not is_over(found[CONTROL])
            waiting = threading.Thread(target=is_over, args=(found[CONTROL], None))
            waiting.start()
            for its in coming.result():
                its.close()
            waiting.join(60)
            assert not waiting.is_alive() and is_over(found[CONTROL])


@pytest.mark.parametrize(
    ("key", "worker_id"), [(b"another key", "worker"), (KEY, "another worker")]
)
def test_who_does_not_belong_here_gets_no_message(
    listener: RankListener, key: bytes, worker_id: str
) -> None:
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect_rank, listener.address, key, worker_id, 1)
        while not coming.done():
            assert listener.take(1, 0.1) is None
        with pytest.raises(StartupError, match="closed the connection"):
            coming.result()


def test_a_first_rank_that_does_not_know_the_key_gets_none_either() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as threads:
        coming = threads.submit(connect_rank, listener.getsockname()[:2], KEY, "worker", 1)
        connection, _ = listener.accept()
        with connection:
            connection.sendall(bytes(32))
            received = b""
            while len(received) < VISITOR.size:
                received += connection.recv(VISITOR.size)
            *_, proof = VISITOR.unpack(received)
            connection.sendall(proof)  # what it has just heard
            with pytest.raises(StartupError, match="does not know this cluster's key"):
                coming.result()


def test_a_proof_that_was_overheard_opens_no_other_connection(listener: RankListener) -> None:
    """The first rank's nonce is new each time."""
    with socket.create_connection(listener.address) as connection:
        overheard = VISITOR.pack(
            1, CONTROL, bytes(32), _proof(KEY, b"rank", "worker", 1, 0, bytes(32), bytes(32))
        )
        connection.sendall(overheard)
        assert listener.take(1, 0.2) is None
        connection.settimeout(60)
        received = connection.recv(1024)
        assert len(received) == 32 and connection.recv(1024) == b""


def test_who_says_too_little_has_a_time_in_all(
    listener: RankListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However steadily its bytes come."""
    monkeypatch.setattr(rank_listener, "SHAKE_TIMEOUT_S", 0.3)
    is_over = threading.Event()

    def drip() -> int:
        with socket.create_connection(listener.address) as connection:
            for num_sent in range(VISITOR.size - 1):
                if is_over.wait(0.05):
                    return num_sent
                connection.sendall(b"x")
        return VISITOR.size

    with ThreadPoolExecutor(1) as threads:
        dripping = threads.submit(drip)
        assert listener.take(1, 0.1) is None
        is_over.set()
        with contextlib.suppress(OSError):  # it is closed
            assert dripping.result() < VISITOR.size


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()[:2]
    with pytest.raises(StartupError, match=f"Cannot reach .*{address[1]}"):
        connect_rank(address, KEY, "worker", 1)
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1"):
        RankListener("192.0.2.1", KEY, "worker")
