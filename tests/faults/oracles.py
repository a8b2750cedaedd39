"""What must hold after every fault, whatever it was."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import partial
from typing import Any

import psutil

from tests.faults.clients import Answer
from tests.faults.system import System, until

# Leases of tickets whose readers died end by themselves, and then there is nothing left.
REST_TIMEOUT_S = 60.0
NUM_FDS_SPARE, NUM_THREADS_SPARE = 24, 6  # of Ray, which opens connections when it likes
NUM_TASKS_SPARE = 4  # health checks and the like
NUM_TASKS = "disagg_event_loop_tasks"
EMPTY = ("num_held_blocks", "num_holds", "num_sequences", "num_streams")


class Oracle:
    """Made before a fault, while nothing runs; `check` afterwards says what is wrong."""

    def __init__(self, system: System, model: str) -> None:
        self._system = system
        self._model = model
        self._counters = system.counters()
        self._ingresses = system.ingresses()
        self._before = {member.process: member.state() for member in system.members(model)}
        self._sizes = {each: _size(each) for each in (*self._ingresses, *self._before)}

    def check(
        self,
        answers: Iterable[Answer],
        victims: Collection[psutil.Process] = (),
        timeout_s: float = REST_TIMEOUT_S,
    ) -> None:
        """
        Args:
            answers: all that was asked since.
            victims: the processes that the fault may have ended.
        """
        answers = list(answers)
        for answer in answers:
            check_answer(answer)
        self.check_rest(timeout_s)
        if not set(victims) & set(self._ingresses):  # or what it counted is gone with it
            self._check_counters(answers)
            until(self._has_few_tasks, timeout_s, lambda: "tasks of an ingress are left")
        for process in {*self._ingresses, *self._before} - set(victims):
            assert process.is_running(), f"{process} was no victim and is gone"
            until(partial(self._is_small, process), timeout_s, lambda: "it has grown")

    def check_answered(
        self, answers: Iterable[Answer], victims: Collection[psutil.Process] = ()
    ) -> None:
        """Nothing was refused or cut, and whoever was a victim is there again."""
        answers = list(answers)
        assert_answered(answers)
        if victims:
            self._system.wait_whole()
        self.check(answers, victims)

    def check_rest(self, timeout_s: float = REST_TIMEOUT_S) -> float:
        """Every worker comes to rest with all its blocks. Returns the seconds that it took."""
        return until(lambda: not self._busy(), timeout_s, lambda: f"never at rest: {self._busy()}")

    def _busy(self) -> list[dict[str, Any]]:
        states = self._system.states(self._model)
        return [state for state in states if any(state[key] for key in EMPTY)]

    def _check_counters(self, answers: list[Answer]) -> None:
        """accepted = ok + error + cancelled, and the same as the clients counted.

        A client that left before it got a head may have left before its request arrived: the proxy
        then drops the request, and nobody counts it.
        """
        num_left = sum(answer.has_left for answer in answers)
        num_left_early = sum(answer.has_left and not answer.status for answer in answers)
        num_ok = sum(answer.finish_reason is not None for answer in answers)
        num_failed = sum(answer.error is not None for answer in answers)

        def counted() -> dict[str, float]:
            now = self._system.counters()
            return {name: now[name] - self._counters.get(name, 0.0) for name in now}

        def is_right() -> bool:
            new = counted()
            num = sum(count for name, count in new.items() if name.startswith("v1 "))
            ok = new.get("disagg_request_success_total", 0.0)
            failed = new.get("disagg_request_failure_total", 0.0)
            left = new["disagg_request_disconnect_total"]
            num_dropped = len(answers) - num
            return (ok, failed, left) == (num_ok, num_failed, num_left - num_dropped) and (
                0 <= num_dropped <= num_left_early
            )

        seen = f"{len(answers)} asked, {num_ok} ok, {num_failed} failed, {num_left} left"
        until(is_right, REST_TIMEOUT_S, lambda: f"{seen}, and the ingress counted {counted()}")

    def _has_few_tasks(self) -> bool:
        """The ingresses have no more than before."""
        num_tasks = self._system.counters()[NUM_TASKS]
        return num_tasks <= self._counters[NUM_TASKS] + NUM_TASKS_SPARE

    def _is_small(self, process: psutil.Process) -> bool:
        """Threads and file descriptors are as many as before."""
        threads, fds = _size(process)
        before_threads, before_fds = self._sizes[process]
        return threads <= before_threads + NUM_THREADS_SPARE and fds <= before_fds + NUM_FDS_SPARE


def assert_answered(answers: Collection[Answer]) -> None:
    """All of them wholly and rightly, and none with an error."""
    failed = [(each.status, each.error, each.trouble) for each in answers if not each.finish_reason]
    assert not failed, f"{len(failed)} of {len(answers)} failed: {failed[:5]}"
    for answer in answers:
        check_answer(answer)


def check_answer(answer: Answer) -> None:
    """One end, the right text, and nothing of another's. Its schema was checked when it came."""
    expected = answer.question.expected
    assert expected.startswith(answer.text), f"wrong tokens: {answer}"
    if answer.has_left:
        return
    assert not answer.trouble and answer.is_done and answer.num_ends == 1, f"lost: {answer}"
    if answer.error is None:
        assert answer.text == expected and answer.finish_reason == "length", f"torn: {answer}"


def _size(process: psutil.Process) -> tuple[int, int]:
    return process.num_threads(), process.num_fds()
