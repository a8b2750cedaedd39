"""It starts, stops and heals as it says: real signals to a real `disagg serve` under streams.

After each end nothing may be left: no process, port, directory or shared memory.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from disagg.cli.ports import free_port
from tests.e2e.command import TIMEOUT_S, Command, Streams, ask, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_STREAMS = 12
LONG = 1900  # tokens, which last longer than the tests wait
SHORT = 600
DONE = "data: [DONE]"
MODEL = "demo-small --num-threads 1 --max-num-seqs 32"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """For what it survives; the last test stops it."""
    command = Command(MODEL, tmp_path_factory.mktemp("home"))
    try:
        command.wait_ready()
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        command.assert_nothing_left()


def test_a_controller_that_dies_takes_nobody_along(served: Command) -> None:
    """Its successor asks every replica for its health, which needs the replica's log files."""
    workers = {each.pid for each in served.family() if "ServeReplica" in each.name()}
    served.one("ray::ServeController").kill()
    served.wait_for("process_started")
    asked_until_s = time.monotonic() + 10  # five periods of Serve's health checks
    while time.monotonic() < asked_until_s:
        assert ask(served.url).status_code == 200
    assert workers == {each.pid for each in served.family() if "ServeReplica" in each.name()}
    (line,) = served.events("process_ended")
    assert line["message"].startswith("Serve's controller ended")


def test_haproxy_that_dies_is_stood_in_for(served: Command) -> None:
    served.one("haproxy").kill()
    num_answers = 0
    deadline_s = time.monotonic() + TIMEOUT_S
    while not served.events("haproxy_replaced"):
        assert time.monotonic() < deadline_s, served.output()
        try:
            answer = ask(served.url)
        except httpx.ConnectError:
            assert num_answers == 0, "nobody listened again"
            continue
        except httpx.RemoteProtocolError:  # it was asked by the one that died
            continue
        num_answers += 1
        assert answer.status_code == 200 or (
            answer.status_code == 503 and answer.headers["retry-after"] == "1"
        ), answer.text
    assert num_answers
    assert served.events("haproxy_died")
    assert ask(served.url).status_code == 200


def test_lines_are_json_and_logs_outlive_the_command(served: Command) -> None:
    (line,) = served.events("logs")
    files = {each.name for each in Path(line["directory"]).iterdir()}
    assert {"disagg.log", "server.log"} <= files


def test_sigterm_lets_streams_end(served: Command) -> None:
    """Last of those with this server."""
    streams = Streams(served.url, NUM_STREAMS, SHORT)
    served.process.send_signal(signal.SIGTERM)
    served.wait_for("stopping")
    until(lambda: not takes_requests(served), timeout_s=10.0)  # the ingress hears of it a bit later
    assert streams.wait() == [DONE] * NUM_STREAMS
    assert served.ended() == 0
    assert_only_own_lines(served)
    served.assert_nothing_left()
    assert (Path(served.events("logs")[0]["directory"]) / "ray").is_dir()


def takes_requests(command: Command) -> bool:
    try:
        return httpx.get(f"{command.url}/ready").status_code == 200
    except httpx.TransportError:
        return False  # it has ended


def assert_only_own_lines(command: Command) -> None:
    others = [line for line in command.output().splitlines() if not line.startswith("{")]
    assert not others, others


def test_streams_without_time_end_with_an_error(home: Path) -> None:
    command = Command(f"{MODEL} --drain-s 0.2", home, host="::1")
    try:
        command.wait_ready()
        streams = Streams(command.url, NUM_STREAMS, LONG)
        command.process.send_signal(signal.SIGINT)
        for end in streams.wait():
            assert isinstance(end, str) and end.startswith("data: {"), end
            error = json.loads(end.removeprefix("data: "))["error"]
            assert "stopped before this answer was complete" in error["message"]
    finally:
        assert command.ended() == 0
    (line,) = command.events("drained")
    assert (line["num_ended"], line["num_cut"]) == (0, NUM_STREAMS)
    assert_only_own_lines(command)
    command.assert_nothing_left()


def test_a_second_signal_ends_it_at_once(home: Path) -> None:
    command = Command(f"{MODEL} --no-haproxy --host ::", home)
    try:
        command.wait_ready()
        streams = Streams(command.url, NUM_STREAMS, LONG)
        command.process.send_signal(signal.SIGTERM)
        command.wait_for("stopping")
        command.process.send_signal(signal.SIGTERM)
        command.process.wait(3)
    finally:
        assert command.ended() == 128 + signal.SIGTERM
    assert len(streams.wait()) == NUM_STREAMS
    assert_only_own_lines(command)
    command.assert_nothing_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("phase", ["logs", "starting Ray", "starting workers"])
def test_a_signal_ends_a_start(home: Path, phase: str, number: signal.Signals) -> None:
    command = Command(MODEL, home)
    try:
        until(lambda: phase in command.output())
        command.process.send_signal(number)
        command.process.wait(5)
    finally:
        assert command.ended() == 0
    assert_only_own_lines(command)
    assert "before it was ready" in command.output()
    command.assert_nothing_left()


def test_a_node_that_dies_ends_the_command_with_a_sentence(home: Path) -> None:
    command = Command(MODEL, home)
    try:
        command.wait_ready()
        command.one("raylet").kill()
    finally:
        assert command.ended() == 1
    (line,) = command.events("broken")
    assert "Ray's raylet process died" in line["message"]
    assert_only_own_lines(command)
    command.assert_nothing_left()


def test_a_killed_command_takes_everything_along(home: Path) -> None:
    command = Command(MODEL, home)
    try:
        command.wait_ready()
    finally:
        command.process.kill()
        command.process.wait()
    command.assert_nothing_left()


def test_what_a_killed_run_leaves_ends_at_the_next_start(home: Path) -> None:
    """The command and the process that serves are killed together: nobody is left to clean up."""
    command = Command(MODEL, home)
    try:
        command.wait_ready()
        server = psutil.Process(command.process.pid).children()[0]
    finally:
        command.process.send_signal(signal.SIGSTOP)
        server.kill()
        command.process.kill()
        command.process.wait()
    following = Command(f"{MODEL} --ray-address 127.0.0.1:{free_port()}", home)
    assert following.ended() == 2
    following.assert_nothing_left()
    command.assert_nothing_left()


def _refusal(command: Command) -> str:
    """What a start says that cannot work; it must do so soon, and leave nothing."""
    try:
        command.process.wait(60)
    finally:
        assert command.ended() == 2, command.output()
    command.assert_nothing_left()
    (line,) = [each for each in command.output().splitlines() if each.startswith("disagg: ")]
    return line


def test_a_dead_cluster(home: Path) -> None:
    port = free_port()
    said = _refusal(Command(f"{MODEL} --ray-address 127.0.0.1:{port}", home))
    assert f"No Ray cluster answers at 127.0.0.1:{port}" in said and "ray-address" in said


def test_few_open_files(home: Path) -> None:
    said = _refusal(Command(MODEL, home, before="ulimit -n 300;"))
    assert "300 files" in said and "ulimit -n" in said


def test_no_haproxy(home: Path) -> None:
    said = _refusal(Command(MODEL, home, {"RAY_SERVE_HAPROXY_BINARY_PATH": "/nowhere"}))
    assert "--no-haproxy" in said


def test_a_log_directory_that_cannot_be(home: Path) -> None:
    said = _refusal(Command(f"{MODEL} --log-dir /proc/logs", home))
    assert "/proc/logs cannot be written to" in said
