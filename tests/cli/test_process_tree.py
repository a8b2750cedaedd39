"""What a killed run has left is found by its directory, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

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


def test_a_dead_run_is_ended_and_a_living_one_is_not(
    left_behind: list[subprocess.Popen[bytes]],
) -> None:
    dead, lock = process_tree.new_run()
    alive, _ = process_tree.new_run()
    by_argument = run_with(f"{dead}/haproxy.cfg")
    by_environment = run_with(**{process_tree.MARK: str(dead)})
    bystander = run_with(f"{alive}/haproxy.cfg")
    left_behind += [by_argument, by_environment, bystander]
    assert process_tree.end_dead_runs() == []  # its lock is held by this process
    os.close(lock)
    ended = {each.pid for each in process_tree.end_dead_runs()}
    assert ended == {by_argument.pid, by_environment.pid}
    assert [each.poll() is None for each in left_behind] == [False, False, True]
    assert not dead.exists() and alive.exists()


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


def test_a_whole_family_is_ended() -> None:
    program = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEP!r}])"
    child = subprocess.Popen([sys.executable, "-c", program])
    while not process_tree.family()[1:]:
        assert child.poll() is None
    assert process_tree.end_family() == []
    assert child.poll() is not None
