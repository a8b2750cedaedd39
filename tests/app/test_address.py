"""A cluster that does not let us in is refused for its own reason, before Ray is imported.

The real one is in `tests/e2e/test_lifecycle.py`; here a server of gRPC answers as Ray's head does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from disagg.app import address
from disagg.app.address import check_address
from disagg.errors import StartupError

TOKEN = "a" * 64


def check_alive(token: str) -> Any:
    """Ray's service of that name, for those who have a token."""

    def answer(question: bytes, about: Any) -> bytes:
        sent = dict(about.invocation_metadata()).get("authorization")
        if token and sent != f"Bearer {token}":
            about.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        return b""

    handlers = {"CheckAlive": grpc.unary_unary_rpc_method_handler(answer)}
    return grpc.method_handlers_generic_handler("ray.rpc.NodeInfoGcsService", handlers)


@contextmanager
def head(token: str = "") -> Iterator[str]:
    """Its address."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads, [check_alive(token)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)
    # So that what the code sets is taken away again.
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delenv("RAY_AUTH_MODE")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def keep(token: str, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{token}\n")


def test_one_without_a_token_is_sent_none(home: Path) -> None:
    keep(TOKEN, home / ".ray" / "auth_token")
    with head() as where:
        check_address(where)
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_one_that_wants_its_token_says_so(home: Path) -> None:
    with head(TOKEN) as where:
        with pytest.raises(StartupError, match=r"requires a token.*RAY_AUTH_TOKEN"):
            check_address(where)
        keep("b" * 64, home / ".ray" / "auth_token")
        with pytest.raises(StartupError, match=r"does not accept the token in .*auth_token"):
            check_address(where)


@pytest.mark.parametrize("place", ["RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "home"])
def test_a_token_is_taken_from_where_ray_takes_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    keep(TOKEN if place == "home" else "b" * 64, home / ".ray" / "auth_token")
    if place == "RAY_AUTH_TOKEN":
        monkeypatch.setenv(place, TOKEN)
    elif place == "RAY_AUTH_TOKEN_PATH":
        keep(TOKEN, home / "elsewhere")
        monkeypatch.setenv(place, str(home / "elsewhere"))
    with head(TOKEN) as where:
        check_address(where)
    assert os.environ["RAY_AUTH_MODE"] == "token"


def test_the_last_cluster_of_this_machine(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(home))
    check_address("auto")  # there is none, and Ray may find one in its own way
    with head(TOKEN) as where:
        (home / "ray").mkdir()
        (home / "ray" / "ray_current_cluster").write_text(where)
        with pytest.raises(StartupError, match="requires a token"):
            check_address("auto")


def test_nobody_listens() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"No Ray cluster answers at {where}"):
            check_address(where)


def test_a_head_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that was stopped: the kernel still takes connections for it."""
    monkeypatch.setattr(address, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StartupError, match="accepts connections but did not answer"):
            check_address(where)


def test_a_server_of_something_else() -> None:
    """Such as the port of Ray's dashboard, or of its client."""
    with ThreadPoolExecutor(2) as threads:
        server = grpc.server(threads)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with pytest.raises(StartupError, match=r"is not a Ray head .*ray start --head"):
            check_address(f"127.0.0.1:{port}")
        server.stop(None).wait()


@pytest.mark.parametrize("form", ["ray://127.0.0.1:1", "anywhere"])
def test_other_forms_are_read_by_ray(form: str) -> None:
    check_address(form)
