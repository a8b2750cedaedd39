"""Checks of the server on this machine."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from disagg.app.probe import ask_here
from disagg.host import free_port


class FakeServing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/live" else 503)
        self.end_headers()
        self.wfile.write(b"here")

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), FakeServing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_check_goes_past_the_proxy_of_the_environment(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")  # nothing listens there
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with ask_here(f"{url}/live", 5.0) as answer:
        assert answer.read() == b"here"
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask_here(f"{url}/ready", 5.0)
    assert refused.value.read() == b"here"
