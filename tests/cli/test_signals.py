"""Which signals ask the command to stop, whatever started it had them do."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from disagg.cli.supervisor import STOP_SIGNALS, Signals


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_asks_for_an_end(number: signal.Signals) -> None:
    signal.signal(number, signal.SIG_DFL)
    signals = Signals()
    signal.raise_signal(number)
    assert (signals.num, signals.last) == (1, number)


def test_what_a_shell_ignores_in_the_background_still_stops() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signals = Signals()
    signal.raise_signal(signal.SIGINT)
    assert signals.num == 1


def test_nohup_keeps_its_promise() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals = Signals()
    signal.raise_signal(signal.SIGHUP)
    assert signals.num == 0
