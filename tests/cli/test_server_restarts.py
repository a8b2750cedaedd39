"""When a server that broke is started again, and after which pauses: with scripted servers."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from disagg.cli.lines import Lines
from disagg.cli.supervisor import BROKEN, LONGEST_PAUSE_S, NUM_STARTS, Ended, keep_serving
from disagg.errors import StartupError

STOPPED = Ended(0, 1.0)
FAILED = Ended(BROKEN, None)
REFUSED = StartupError("The port is taken.")


class Script:
    """Servers that end as told, one after another."""

    def __init__(self, tmp_path: Path, *ends: Ended | StartupError) -> None:
        self._ends = list(ends)
        self.file = tmp_path / "disagg.log"
        self.pauses: list[float] = []  # before each server
        self.is_stopped = False
        self.stops_while_it_sleeps = False

    def serve_once(self) -> Ended:
        self.pauses.append(0.0)
        end = self._ends.pop(0)
        if isinstance(end, StartupError):
            raise end
        return end

    def sleep(self, seconds: float) -> None:
        self.pauses[-1] += seconds
        self.is_stopped = self.stops_while_it_sleeps

    def run(self) -> int:
        with contextlib.closing(Lines("json", self.file)) as lines:
            return keep_serving(self.serve_once, lines, lambda: self.is_stopped, self.sleep)

    def num_lines(self, event: str) -> int:
        return self.file.read_text().count(f'"event": "{event}"')


def test_once_at_once_then_after_longer_and_longer_pauses(tmp_path: Path) -> None:
    script = Script(tmp_path, *[Ended(BROKEN, 1.0)] * 7, STOPPED)
    assert script.run() == 0
    assert script.pauses == pytest.approx([0, 5, 10, 20, 40, 60, LONGEST_PAUSE_S, 0])
    assert script.num_lines("restarting") == 7


def test_who_has_served_for_a_minute_starts_again_at_once(tmp_path: Path) -> None:
    script = Script(tmp_path, *[Ended(BROKEN, 1.0)] * 3, Ended(BROKEN, 61.0), STOPPED)
    assert script.run() == 0
    assert script.pauses == pytest.approx([0, 5, 10, 0, 0])


def test_a_first_start_is_not_repeated(tmp_path: Path) -> None:
    assert Script(tmp_path, FAILED).run() == BROKEN
    with pytest.raises(StartupError, match="port is taken"):
        Script(tmp_path, REFUSED).run()


def test_three_starts_that_fail_end_the_command(tmp_path: Path) -> None:
    assert Script(tmp_path, Ended(BROKEN, 99.0), *[FAILED] * NUM_STARTS).run() == BROKEN
    script = Script(tmp_path, Ended(BROKEN, 99.0), *[REFUSED] * NUM_STARTS)
    with pytest.raises(StartupError, match="port is taken"):
        script.run()
    assert script.num_lines("start_failed") == NUM_STARTS - 1


def test_failures_are_counted_in_a_row(tmp_path: Path) -> None:
    ends: list[Ended | StartupError] = [Ended(BROKEN, 99.0), REFUSED, FAILED]
    assert Script(tmp_path, *ends * 3, STOPPED).run() == 0


def test_a_stop_ends_a_pause(tmp_path: Path) -> None:
    script = Script(tmp_path, *[Ended(BROKEN, 1.0)] * 2)
    script.stops_while_it_sleeps = True
    assert script.run() == 0
    assert script.num_lines("stopped") == 1


def test_a_second_signal_has_its_own_status(tmp_path: Path) -> None:
    assert Script(tmp_path, Ended(128 + 15, 5.0)).run() == 128 + 15
