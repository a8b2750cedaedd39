"""Which signals ask the command to stop, whatever started it had them do."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from disagg.cli.main import main
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


def test_one_that_is_delivered_twice_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`docker stop` and shells signal the process and its group. Later ones count, however soon."""
    signals, now_s = Signals(), 100.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for later_s, num in ((0.0, 1), (0.0, 1), (0.9, 1), (1.1, 2), (1.2, 3)):
        now_s = 100.0 + later_s
        signal.raise_signal(signal.SIGTERM)
        assert signals.num == num


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


INTERRUPTED = """
import importlib, signal, sys
from disagg.cli.main import main
importlib.import_module = lambda name: signal.raise_signal(signal.SIGINT)
sys.argv = ["disagg", "serve"]
main()
"""


def test_ctrl_c_while_the_command_is_imported_is_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_verb_has_pythons_own_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait for one, such as `disagg chat`, catch KeyboardInterrupt."""
    seen = []

    def run(_: object) -> int:
        seen.append(signal.getsignal(signal.SIGINT))
        return 0

    verb = SimpleNamespace(__doc__="", add_arguments=lambda _: None, run=run)
    monkeypatch.setattr("importlib.import_module", lambda name: verb)
    monkeypatch.setattr(sys, "argv", ["disagg", "chat"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert main() == 0
    assert seen == [signal.default_int_handler]
