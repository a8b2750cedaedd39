"""It starts, stops and heals as it says: real signals to a real `disagg serve` under streams.

Its two workers share a GPU, which is stood in for. After each end nothing may be left: no process,
port, directory or shared memory. More ends are in `served/test_deaths.py`, `test_cascade.py` and
`test_wheel.py`, of servers that are started for something else. A cluster of others is in
`test_running_cluster.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import httpx
import psutil
import pytest

from disagg.app.probe import runs
from disagg.cli.supervisor import SAME_SIGNAL_S
from disagg.config import ASSETS
from tests import plain_http
from tests.e2e.command import (
    DONE,
    NUM_STREAMS,
    TIMEOUT_S,
    Command,
    Streams,
    ask,
    is_open,
    refusal_of,
    until,
)
from tests.e2e.gpus import Opened, machine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SHORT, LONG = 400, 16_000  # tokens of a stream that is to end, and of one that is not
ROOT = Path(__file__).parents[2]
FLAGS = "--num-threads 1 --max-num-seqs 32"
MODEL = f"demo-small {FLAGS}"
ONE_WORKER = f"{MODEL} --prefill 0"  # for what ends everything, whichever workers there are


# Who may listen on a port: ours, Serve's and Ray's (docs/security.md).
OURS = {"haproxy", "python", "ServeReplica"}
SERVES = {"HAProxyManager", "ProxyActor", "SERVE_REPLICA", "ServeController"}
RAYS = {"IDLE", "gcs_server", "raylet"}


def _kind(process: psutil.Process) -> str:
    """What it is, without numbers and names of models."""
    words = process.cmdline()
    if words and words[0].startswith("ray::"):
        return words[0].split(":")[2].split(".")[0]
    scripts = [word for word in words if word.endswith(".py")]
    return Path(scripts[0]).name if scripts else process.name()


def with_long_context(directory: Path) -> Path:
    """A copy of demo-small in which a stream has room for `LONG` tokens."""
    copy = Path(shutil.copytree(ASSETS / "demo-small", directory / "demo-small"))
    config = json.loads((copy / "config.json").read_text())
    config["max_position_embeddings"] = 2 * LONG
    (copy / "config.json").write_text(json.dumps(config))
    return copy


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Command]:
    """For what it survives; the last test stops it."""
    (directory / "opened").mkdir()
    environment = {**machine(80), "DISAGG_TEST_OPENED": str(directory / "opened")}
    # On a busy machine the last test's streams may need longer than the usual 60 s to end.
    flags = f"{FLAGS} --num-gpus-per-worker 0.5 --drain-s {TIMEOUT_S:g}"
    command = Command(f"{with_long_context(directory)} {flags}", directory, environment)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


def test_workers_that_share_a_gpu_share_its_memory(served: Command, directory: Path) -> None:
    found = Opened(directory / "opened")
    assert found.gpus == [("demo-small-decode", 0), ("demo-small-prefill", 0)]
    assert found.claims == [36.0, 36.0]


def test_only_this_machine_reaches_any_of_its_ports(served: Command) -> None:
    """Ray's and Serve's ports unpickle what they get, and UCX writes where it is told."""
    listening = set()
    for process in served.family():
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray has others come and go
            for each in process.net_connections("inet"):
                if each.status == psutil.CONN_LISTEN:
                    listening.add((_kind(process), each.laddr.ip.removeprefix("::ffff:")))
    assert {ip for _, ip in listening} == {"127.0.0.1"}
    kinds = {kind for kind, _ in listening}
    assert {"haproxy", "ServeReplica"} < kinds <= OURS | SERVES | RAYS


def test_haproxy_says_what_it_took(served: Command) -> None:
    text = plain_http.get(f"{served.url}/metrics").text
    assert re.search(r'^haproxy_frontend_connections_total\{proxy="http_frontend"\} \d', text, re.M)


def test_a_controller_that_dies_takes_nobody_along(served: Command) -> None:
    """Its successor asks every replica for its health, which needs the replica's log files."""
    workers, num_ended = set(served.named("ServeReplica")), len(served.events("process_ended"))
    num_started = len(served.events("process_started"))
    served.one("ray::ServeController").kill()
    served.wait_for("process_started", num_started + 1)
    asked_until_s = time.monotonic() + 10  # five periods of Serve's health checks
    while time.monotonic() < asked_until_s:
        assert ask(served.url).status_code == 200
        time.sleep(0.3)
    assert workers == set(served.named("ServeReplica"))
    (line,) = served.events("process_ended")[num_ended:]
    assert line["message"].startswith("Serve's controller ended")


def test_haproxy_that_dies_is_stood_in_for(served: Command) -> None:
    num_replaced, num_answers = len(served.events("haproxy_replaced")), 0
    served.one("haproxy").kill()
    deadline_s = time.monotonic() + TIMEOUT_S
    while len(served.events("haproxy_replaced")) == num_replaced:
        assert time.monotonic() < deadline_s, served.output()
        time.sleep(0.02)
        try:
            answer = ask(served.url)
        except httpx.ConnectError:
            assert num_answers == 0, "nobody listened again"
            continue
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
            continue  # the one that died was asked
        num_answers += 1
        assert answer.status_code == 200 or (
            answer.status_code == 503 and answer.headers["retry-after"] == "1"
        ), answer.text
    assert num_answers
    assert served.events("haproxy_died")
    assert ask(served.url).status_code == 200


def test_haproxy_outlives_its_manager(served: Command) -> None:
    """Ray kills the group of a process that died. No stream is cut, and somebody always listens;
    the next HAProxy has no routes for a moment."""
    old = served.one("haproxy")
    streams = Streams(served.url, [SHORT] * NUM_STREAMS)
    served.one("ray::HAProxyManager").kill()
    assert streams.wait() == [DONE] * NUM_STREAMS

    def is_replaced() -> bool:
        answer = ask(served.url)
        assert answer.status_code == 200 or answer.headers["retry-after"] == "1", answer.text
        return not runs(old)

    until(is_replaced, why=served.output)
    until(lambda: ask(served.url).status_code == 200)


def test_what_ends_everything_is_started_again(served: Command) -> None:
    """So does the death of one of the raylet's agents (`tests/app/test_watch.py`) or of the GCS
    (`test_cascade.py`). Here the command looks so late that HAProxy may have been killed by its
    manager: then a stand-in listens."""
    manager = served.one("ray::HAProxyManager")
    served.process.send_signal(signal.SIGSTOP)
    served.one("raylet").kill()
    until(lambda: not runs(manager))
    served.process.send_signal(signal.SIGCONT)
    until(lambda: is_open(served.port))
    statuses = set()
    # From now on somebody always listens. Who asks may be cut, or wait for the new workers.
    accepted = httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.ReadTimeout
    while len(served.events("ready")) < 2:
        assert served.process.poll() is None, served.output()
        with contextlib.suppress(*accepted):
            answer = ask(served.url)
            assert answer.status_code == 200 or answer.headers["retry-after"] == "1", answer.text
            statuses.add(answer.status_code)
        time.sleep(0.05)
    assert 503 in statuses
    (line,) = served.events("broken")
    assert "process died, and all workers end with it" in line["message"]
    assert len(served.events("restarting")) == 1
    until(lambda: ask(served.url).status_code == 200)
    assert (Path(served.events("logs")[0]["directory"]) / "ray-before").is_dir()


def test_lines_are_json_and_logs_outlive_the_command(served: Command) -> None:
    (line,) = served.events("logs")
    files = {each.name for each in Path(line["directory"]).iterdir()}
    assert {"disagg.log", "server.log"} <= files


@pytest.mark.last(1)
def test_sigterm_lets_streams_end_and_a_second_one_does_not(served: Command) -> None:
    """The first is delivered twice, as by `docker stop`."""
    streams = Streams(served.url, [LONG] * NUM_STREAMS + [SHORT] * 4)
    served.process.send_signal(signal.SIGTERM)
    served.wait_for("stopping")
    served.process.send_signal(signal.SIGTERM)
    counts_again_s = time.monotonic() + SAME_SIGNAL_S
    until(lambda: not takes_requests(served))  # the ingress hears of it a bit later
    assert streams.wait(SHORT) == [DONE] * 4
    time.sleep(max(0.0, counts_again_s - time.monotonic()))
    served.process.send_signal(signal.SIGTERM)
    assert served.ended() == 128 + signal.SIGTERM
    assert DONE not in streams.wait(LONG), "they were waited for"
    served.assert_only_own_lines()
    served.assert_nothing_left()
    assert (Path(served.events("logs")[0]["directory"]) / "ray").is_dir()


def takes_requests(command: Command) -> bool:
    try:
        return plain_http.get(f"{command.url}/ready").status_code == 200
    except httpx.TransportError:
        return False  # it has ended


@pytest.mark.parametrize(
    ("phase", "number"),  # what asks for an end is the same in every phase: `test_signals.py`
    [("starting Ray", signal.SIGTERM), ("starting workers", signal.SIGINT)],
)
def test_a_signal_ends_a_start(tmp_path: Path, phase: str, number: signal.Signals) -> None:
    command = Command(ONE_WORKER, tmp_path)
    try:
        until(lambda: phase in command.output())
        command.process.send_signal(number)
    finally:
        assert command.ended() == 0
    command.assert_only_own_lines()
    assert "before the server is ready" in command.output()
    command.assert_nothing_left()


def test_a_killed_command_takes_all_along(tmp_path: Path) -> None:
    """Its server process does that. Where both are killed: `served/test_deaths.py`."""
    command = Command(ONE_WORKER, tmp_path)
    with command.killed_at_the_end():
        until(lambda: command.named("raylet"))


def other_tmp(options: str) -> str:
    """Mounts another /tmp. This checkout may lie in the one that is there, so it is kept."""
    keep = f"mount --bind {ROOT} /mnt"
    back = f"mkdir -p {ROOT} && mount --bind /mnt {ROOT}"
    return f"{keep} && mount -t tmpfs tmpfs /tmp && {back} && mount -o remount,{options} /tmp"


def frozen(name: str, home: Path) -> str:
    """Mounts a program over one of Ray's that stops itself at once, whoever wakes it up."""
    program = home / "frozen"
    program.write_text("#!/bin/sh\nwhile :; do kill -STOP $$; done\n")
    program.chmod(0o700)
    ray = find_spec("ray")
    assert ray is not None and ray.submodule_search_locations is not None
    return f"mount --bind {program} {ray.submodule_search_locations[0]}/core/src/ray/{name}"


def test_what_cannot_start_is_refused_in_words(tmp_path: Path) -> None:
    """All at the same time, as they mostly wait."""
    full = f"{other_tmp('size=1m')} && ! head -c 2m /dev/zero >/tmp/all 2>/dev/null"
    only_logs = f"{other_tmp('ro')} && mount -t tmpfs tmpfs /mnt"
    without_haproxy = {"RAY_SERVE_HAPROXY_BINARY_PATH": "/nowhere"}
    stands_still = "Starting Ray came to a standstill"
    begun = [
        ("--no-haproxy", Command(MODEL, tmp_path, without_haproxy)),
        ("Cannot write to /proc/logs", Command(f"{MODEL} --log-dir /proc/logs", tmp_path)),
        ("/tmp has only 0 MiB left", Command(MODEL, tmp_path, mounts=full)),
        (
            "Cannot write to /tmp (Read-only file system)",
            Command(f"{MODEL} --log-dir /mnt/logs", tmp_path, mounts=only_logs),
        ),
        (
            "or to /tmp; give a directory with --log-dir",
            Command(MODEL, tmp_path, mounts=other_tmp("ro")),
        ),
        (stands_still, Command(MODEL, tmp_path, mounts=frozen("gcs/gcs_server", tmp_path))),
        (stands_still, Command(MODEL, tmp_path, mounts=frozen("raylet/raylet", tmp_path))),
    ]
    said = [(words, refusal_of(command)) for words, command in begun]
    assert [words in each for words, each in said] == [True] * len(said), said
