"""A free port is one that nobody has, and that no outgoing connection will take."""

from __future__ import annotations

import secrets
import socket

import pytest

from disagg.cli import ports


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    free = ports.free_port()
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        drawn = iter([taken - ports.FIRST, free - ports.FIRST])
        monkeypatch.setattr(secrets, "randbelow", lambda end: next(drawn))
        assert ports.free_port() == free


def test_it_can_be_bound() -> None:
    port = ports.free_port()
    assert ports.FIRST <= port < ports.END
    with socket.create_server(("127.0.0.1", port)):
        pass
