"""HAProxy with Serve's configuration, mended: what it takes, refuses and leaves out."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.app import haproxy_launcher
from disagg.app.haproxy import as_stand_in, find_haproxy, haproxy_environment
from disagg.app.haproxy_launcher import mended
from disagg.cli.ports import free_port
from disagg.config import HttpConfig

# The lines of Serve's template (ray/serve/_private/haproxy_templates.py) that are mended.
SERVE = """\
global
    stats socket {0}/admin.sock mode 666 level admin expose-fd listeners
    maxconn 4096
    server-state-base {0}
    server-state-file {0}/server-state
defaults
    mode http
    timeout connect 5s
    timeout client 3600s

    timeout http-keep-alive 90s
    timeout server 60s
    option abortonclose
    errorfile 502 {0}/500.http
    errorfile 503 {0}/500.http
    errorfile 504 {0}/500.http
    load-server-state-from-file global
frontend prometheus
    bind :{1}
    mode http
frontend http_frontend
    bind 127.0.0.1:{2}
{3}    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
backend ours
    server it 127.0.0.1:{4}
listen stats
  bind *:{5}
  stats enable
"""
LIMIT_S = 1  # for a head, and for a client's silence, instead of 10 and 60


class Backend(socketserver.BaseRequestHandler):
    """Answers each request with its own head; `/slow` and `/gap` take longer than `LIMIT_S`."""

    def handle(self) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.request.recv(65536)
        path = data.split()[1]
        if path == b"/dies":
            return
        if path == b"/slow":
            time.sleep(2.5 * LIMIT_S)
        head, _, _ = data.partition(b"\r\n\r\n")
        length = b"Content-Length: %d\r\n" % len(head)
        half = len(head) // 2
        self.request.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + length + b"\r\n")
        self.request.sendall(head[:half])
        if path == b"/gap":
            time.sleep(2.5 * LIMIT_S)
        self.request.sendall(head[half:])


class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


class Proxy:
    """An HAProxy in front of a `Backend`, as Serve's launcher would start it."""

    def __init__(
        self,
        directory: Path,
        has_routes: bool = True,
        certificate: str = "",
        num_connections: int = 400,
    ) -> None:
        self.server = Server(("127.0.0.1", 0), Backend)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.port = free_port()
        routes = "    use_backend ours\n" if has_routes else ""
        ports = (free_port(), self.port, routes, self.server.server_address[1], free_port())
        (directory / "server-state").touch()
        text = mended(SERVE.format(directory, *ports), "127.0.0.1", certificate, num_connections)
        file = directory / "haproxy.cfg"
        file.write_text(text)
        self.process = subprocess.Popen(
            [find_haproxy(), "-db", "-f", str(file)], stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 20
        while True:
            try:
                self.connect().close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def ask(self, path: str = "/", headers: bytes = b"") -> bytes:
        return talk(self.connect(), request(path, headers))

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()
        self.server.shutdown()
        self.server.server_close()


def request(path: str = "/", headers: bytes = b"") -> bytes:
    return b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s\r\n" % (path.encode(), headers)


def talk(connection: socket.socket, data: bytes) -> bytes:
    """Everything that comes back until the other side closes."""
    with connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


@pytest.fixture
def proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    timeouts = haproxy_launcher.timeouts(head_s=LIMIT_S, silent_s=LIMIT_S)
    monkeypatch.setattr(haproxy_launcher, "timeouts", lambda: timeouts)
    made = Proxy(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_it_listens_where_the_user_said_and_to_nobody_else(tmp_path: Path, host: str) -> None:
    text = mended(SERVE.format(tmp_path, 18001, 18000, "", 18002, 18003), host, "", 400)
    option = " v4v6" if host == "::" else ""
    binds = [line.strip() for line in text.splitlines() if line.strip().startswith("bind ")]
    assert binds == ["bind 127.0.0.1:18001", f"bind {host}:18000{option}", "bind 127.0.0.1:18003"]
    assert "mode 666" not in text
    assert mended(text, host, "", 400) == text, "a successor is started with the same file"
    stand_in = as_stand_in(text, f"{tmp_path}/other.sock")
    assert "server-state" not in stand_in and "admin.sock" not in stand_in
    for each in (text, stand_in):
        file = tmp_path / "haproxy.cfg"
        file.write_text(each)
        done = subprocess.run(
            [find_haproxy(), "-c", "-f", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_without_routes_it_says_try_again(tmp_path: Path) -> None:
    proxy = Proxy(tmp_path, has_routes=False)
    head, _, body = proxy.ask().partition(b"\r\n\r\n")
    proxy.close()
    assert head.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in head.lower()
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["code"] == "unavailable"


def test_an_ingress_that_dies_is_a_refusal_that_can_be_retried(proxy: Proxy) -> None:
    head, _, body = proxy.ask("/dies").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 502") and b"retry-after: 1" in head.lower()
    assert json.loads(body)["error"]["type"] == "server_error"


def test_headers_that_serve_would_obey_are_taken_away(proxy: Proxy) -> None:
    headers = b"x-request-timeout-seconds: 1\r\nX-Session-Id: \xff\r\n"
    seen = proxy.ask("/", headers + b"serve_multiplexed_model_id: x\r\nx-kept: 1\r\n").lower()
    assert b"x-kept: 1" in seen
    for name in (b"timeout-seconds", b"session", b"multiplexed"):
        assert name not in seen


@pytest.mark.parametrize(
    ("headers", "is_kept"),
    [
        (b"x-request-id: trace-1.2:3\r\n", True),
        (b"x-request-id: a\xff\r\n", False),
        (b"x-request-id: a b\r\n", False),
        (b"x-request-id: " + b"a" * 129 + b"\r\n", False),
        (b"x-request-id: one\r\nx-request-id: two\r\n", False),
    ],
)
def test_request_ids(proxy: Proxy, headers: bytes, is_kept: bool) -> None:
    assert (b"x-request-id" in proxy.ask("/", headers).lower()) == is_kept


@pytest.mark.parametrize("path", ["/slow", "/gap"])
def test_a_client_that_waits_for_its_answer_is_not_silent(proxy: Proxy, path: str) -> None:
    assert b"host: x" in proxy.ask(path).lower()


def test_a_head_that_does_not_end_is_given_up(proxy: Proxy) -> None:
    assert talk(proxy.connect(), b"GET / HTTP/1.1\r\nHost").startswith(b"HTTP/1.1 408")
    assert talk(proxy.connect(), b"") == b""


def test_one_address_cannot_hold_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four, with 40 for all."""
    patient = haproxy_launcher.timeouts(head_s=600)
    monkeypatch.setattr(haproxy_launcher, "timeouts", lambda: patient)
    proxy = Proxy(tmp_path, num_connections=40)
    num_held, num_refused = 0, 0
    with contextlib.ExitStack() as held:
        while num_refused < 5:
            try:
                connection = held.enter_context(proxy.connect())
                connection.sendall(b"GET / HT")
                connection.settimeout(0.02 if num_held < 28 else 1.0)
                num_refused += connection.recv(1) == b""
            except TimeoutError:
                num_held += 1
            except ConnectionError:
                num_refused += 1
        assert num_held in (30, 31)
    proxy.close()


def test_https(tmp_path: Path) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    options = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = f"openssl req -x509 {options} -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    http = HttpConfig(ssl_certfile=str(chain), ssl_keyfile=str(key))
    directory = tmp_path / "h"
    environment = haproxy_environment(directory, http, free_port)
    certificate = directory / "certificate.pem"
    launcher = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).read_text()
    assert str(certificate) in launcher and certificate.stat().st_mode & 0o77 == 0
    proxy = Proxy(tmp_path, certificate=str(certificate))
    try:
        trusting = ssl.create_default_context(cafile=str(chain))
        wrapped = trusting.wrap_socket(proxy.connect(), server_hostname="127.0.0.1")
        assert talk(wrapped, request()).startswith(b"HTTP/1.1 200")
        with pytest.raises(ssl.SSLError):
            ssl.create_default_context().wrap_socket(proxy.connect(), server_hostname="127.0.0.1")
    finally:
        proxy.close()
