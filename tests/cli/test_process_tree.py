"""What a killed run has left is found by its directory, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from disagg.app.probe import runs
from disagg.cli import process_tree

SLEEP = "import time; time.sleep(60)"


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(process_tree, "temporary_directory", lambda: tmp_path)
    return tmp_path


@pytest.fixture
def left_behind() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for each in processes:
        each.kill()
        each.wait()


def run_with(*arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", "-c", SLEEP, *arguments]
    return subprocess.Popen(command, env={**os.environ, **environment})


def has_mark(process: psutil.Process) -> bool:
    """As its parent has; until it has begun its own program, a child is a copy of it."""
    return process_tree.MARK in process.environ()


def test_a_dead_run_is_ended_and_a_living_one_is_not(
    left_behind: list[subprocess.Popen[bytes]],
) -> None:
    dead, lock = process_tree.new_run()
    alive, _ = process_tree.new_run()
    orphan = run_with(**{process_tree.MARK: str(dead)})
    at_work = run_with(**{process_tree.MARK: str(alive)})
    left_behind += [orphan, at_work]
    assert process_tree.end_dead_runs() == []  # its lock is held by this process
    os.close(lock)
    assert [each.pid for each in process_tree.end_dead_runs()] == [orphan.pid]
    assert [each.poll() is None for each in left_behind] == [False, True]
    assert not dead.exists() and alive.exists()


SEMAPHORE = """
import multiprocessing, time

semaphore = multiprocessing.get_context("spawn").Semaphore()
print(semaphore._semlock.name, flush=True)
time.sleep(60)
"""


def test_semaphores_of_a_dead_run_are_removed(left_behind: list[subprocess.Popen[bytes]]) -> None:
    """By Python's resource tracker, which ends by itself when its process has been killed."""
    dead, lock = process_tree.new_run()
    orphan = subprocess.Popen(
        [sys.executable, "-c", SEMAPHORE],
        env={**os.environ, process_tree.MARK: str(dead)},
        stdout=subprocess.PIPE,
    )
    left_behind.append(orphan)
    assert orphan.stdout is not None
    with orphan.stdout as printed:
        semaphore = Path(f"/dev/shm/sem.{printed.readline().decode().strip().lstrip('/')}")
    assert semaphore.exists()
    os.close(lock)
    assert [each.pid for each in process_tree.end_dead_runs()] == [orphan.pid]
    assert not semaphore.exists()


def test_who_reads_the_files_of_a_dead_run_is_left_alone(
    left_behind: list[subprocess.Popen[bytes]],
) -> None:
    """Such as `tail -f` on its logs; and a run whose directory's name begins with the same."""
    dead, lock = process_tree.new_run()
    os.close(lock)
    left_behind += [run_with(f"{dead}/server.log"), run_with(**{process_tree.MARK: f"{dead}-2"})]
    assert process_tree.end_dead_runs() == []
    assert [each.poll() for each in left_behind] == [None, None]


def test_a_process_that_has_overwritten_its_environment_ends_with_its_parent(
    left_behind: list[subprocess.Popen[bytes]],
) -> None:
    dead, lock = process_tree.new_run()
    os.close(lock)
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}], env={{}})"
    parent = subprocess.Popen(
        [sys.executable, "-c", program], env={**os.environ, process_tree.MARK: str(dead)}
    )
    left_behind.append(parent)
    while not (children := psutil.Process(parent.pid).children()) or has_mark(children[0]):
        assert parent.poll() is None
    ended = {each.pid for each in process_tree.end_dead_runs()}
    assert ended == {parent.pid, children[0].pid}
    assert not runs(children[0]), "it may be a zombie until somebody reaps it"


def test_a_run_lives_while_any_of_its_processes_does() -> None:
    directory, lock = process_tree.new_run()
    other = process_tree.join_run(directory)
    os.close(lock)
    process_tree.end_dead_runs()
    assert directory.exists()
    os.close(other)
    process_tree.end_dead_runs()
    assert not directory.exists()


def test_directories_of_others_are_left_alone(temporary: Path) -> None:
    (temporary / "disagg-of-somebody").mkdir()
    process_tree.end_dead_runs()
    assert (temporary / "disagg-of-somebody").exists()


def test_runs_of_another_user_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, lock = process_tree.new_run()
    os.close(lock)
    monkeypatch.setattr(os, "getuid", lambda: dead.stat().st_uid + 1)
    assert process_tree.end_dead_runs() == [] and dead.exists()


PARENT = """
import subprocess, sys
from disagg.cli import process_tree

program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sys.argv[1]!r}])"
child = subprocess.Popen([sys.executable, "-c", program])
while not process_tree.family()[1:]:
    assert child.poll() is None
assert process_tree.end_family() == []
assert child.poll() is not None
"""


def test_a_whole_family_is_ended() -> None:
    """That of another process: servers of other tests may be children of this one."""
    subprocess.run([sys.executable, "-c", PARENT, SLEEP], check=True)


def test_children_that_have_ended_are_buried_besides_one() -> None:
    ended, kept = (subprocess.Popen(["true"]) for _ in range(2))
    for child in (ended, kept):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process_tree.reap(besides=kept.pid)
    assert not psutil.pid_exists(ended.pid)
    assert psutil.Process(kept.pid).status() == psutil.STATUS_ZOMBIE
    process_tree.reap()
    assert not psutil.pid_exists(kept.pid)
    assert (ended.wait(), kept.wait()) == (0, 0)  # nothing is known of them any more


def test_a_standstill_is_told_from_work(
    left_behind: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times are this test's; the work is the kernel's, without what other tests have left."""
    monkeypatch.setattr(process_tree, "STILL_WORK", 1e-5)
    left_behind.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    busy = psutil.Process(left_behind[0].pid)
    monkeypatch.setattr(process_tree, "family", lambda: [busy])
    while busy.cpu_times().user < 0.1:
        assert busy.is_running()
    standstill = process_tree.Standstill()
    for now_s in range(30):
        used_s = busy.cpu_times().user
        assert not standstill.is_there(float(now_s))
        while busy.cpu_times().user == used_s:
            assert busy.is_running()
    # One that is suspended is a standstill, though another of the start works, this process.
    monkeypatch.setattr(process_tree, "family", lambda: [busy, psutil.Process()])
    busy.suspend()
    while busy.status() != psutil.STATUS_STOPPED:
        assert busy.is_running()
    found = [standstill.is_there(float(now_s)) for now_s in range(30, 60)]
    assert found == [False] * 10 + [True] * 20


@pytest.mark.parametrize(("idle_percent", "is_standstill"), [(90.0, True), (10.0, False)])
def test_nothing_is_told_from_waiting_on_a_busy_machine(
    left_behind: list[subprocess.Popen[bytes]],
    monkeypatch: pytest.MonkeyPatch,
    idle_percent: float,
    is_standstill: bool,
) -> None:
    machine = psutil.cpu_times_percent()._replace(idle=idle_percent)
    monkeypatch.setattr(psutil, "cpu_times_percent", lambda: machine)
    left_behind.append(run_with())
    waiting = psutil.Process(left_behind[0].pid)
    while waiting.status() != psutil.STATUS_SLEEPING:
        assert waiting.is_running()
    monkeypatch.setattr(process_tree, "family", lambda: [waiting])
    standstill = process_tree.Standstill()
    found = [standstill.is_there(float(now_s)) for now_s in range(30)]
    assert not any(found[:9]) and set(found[11:]) == {is_standstill}
