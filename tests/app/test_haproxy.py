"""HAProxy with Serve's adapted configuration: what it accepts, refuses and removes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from disagg.app import haproxy, haproxy_launcher
from disagg.app.haproxy import (
    HAProxyWatch,
    as_stand_in,
    find_haproxy,
    haproxy_environment,
    read_metrics,
)
from disagg.app.haproxy_launcher import adapted
from disagg.config import HttpConfig
from disagg.errors import StartupError
from disagg.host import free_port
from tests.e2e.command import is_open, until

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Ray's own import

LIMIT_S = 1  # for a head, and for a client's silence, instead of 10 and 60


def serve_config(
    directory: Path, port: int, backend_port: int | None = None, metrics_port: int = 0
) -> str:
    """What Serve itself writes for HAProxy, with an application on `backend_port` or with none."""
    from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
    from ray.serve.config import HTTPOptions

    options = HAProxyConfig(
        socket_path=str(directory / "admin.sock"),
        server_state_base=str(directory),
        server_state_file=str(directory / "server-state"),
        enable_hap_optimization=True,
        metrics_port=metrics_port or free_port(),
        stats_port=free_port(),
        metrics_socket_path=str(directory / "metrics.sock"),
        http_options=HTTPOptions(host="127.0.0.1", port=port),
        has_received_routes=True,
        is_head=True,
    )
    backends = {}
    if backend_port is not None:
        server = ServerConfig(name="it", host="127.0.0.1", port=backend_port)
        backends["ours"] = BackendConfig(
            name="ours", path_prefix="/", app_name="ours", servers=[server]
        )
    (directory / "server-state").touch()
    file = directory / "of-serve.cfg"
    HAProxyApi(options, backends, str(file))._generate_config_file_internal()
    return file.read_text()


class Backend(socketserver.BaseRequestHandler):
    """Answers each request with its own head; `/slow` and `/gap` take longer than `LIMIT_S`, and
    `/hold` has no answer."""

    server: Server

    def handle(self) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += self.request.recv(65536)
        path = data.split()[1]
        if path == b"/dies":
            return
        if path == b"/hold":
            self.server.held.put("begun")
            with contextlib.suppress(ConnectionError):
                self.request.recv(1)
            self.server.held.put("ended")
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

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Backend)
        self.held = queue.Queue[str]()  # what happened to requests for `/hold`


class Proxy:
    """An HAProxy in front of a `Backend`, as Serve's launcher would start it."""

    def __init__(
        self,
        directory: Path,
        has_routes: bool = True,
        certificate: str = "",
        num_connections: int = 400,
    ) -> None:
        self.server = Server()
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.port = free_port()
        self.metrics_port = free_port()
        backend_port = self.server.server_address[1] if has_routes else None
        of_serve = serve_config(directory, self.port, backend_port, self.metrics_port)
        text = adapted(of_serve, "127.0.0.1", certificate, num_connections)
        file = directory / "haproxy.cfg"
        file.write_text(text)
        self.process = subprocess.Popen(
            [find_haproxy(), "-db", "-f", str(file)], stderr=subprocess.PIPE
        )
        deadline = time.monotonic() + 60
        while True:
            try:
                self.connect().close()
                return
            except OSError:
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

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
    text = adapted(serve_config(tmp_path, 18000), host, "", 400)
    option = " v4v6" if host == "::" else ""
    binds = [line.split() for line in text.splitlines() if line.strip().startswith("bind ")]
    addresses = [address.rpartition(":")[0] for _, address, *_ in binds]
    assert addresses == ["127.0.0.1", host, "127.0.0.1"]
    assert f"bind {host}:18000{option}\n" in text
    assert "mode 666" not in text
    assert adapted(text, host, "", 400) == text, "a successor is started with the same file"
    stand_in = as_stand_in(text, f"{tmp_path}/other.sock")
    assert "server-state" not in stand_in and "admin.sock" not in stand_in
    for each in (text, stand_in):
        file = tmp_path / "haproxy.cfg"
        file.write_text(each)
        done = subprocess.run(
            [find_haproxy(), "-c", "-f", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def test_a_successor_has_the_routes_of_the_dead_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve gives it none until half a second after its start."""
    monkeypatch.setattr("os.execv", lambda program, arguments: None)
    file = tmp_path / "haproxy.cfg"

    def has_routes(of_serve: str, *arguments: str, old: str = "") -> bool:
        file.write_text(of_serve)
        words = ["-db", "-f", str(file), *arguments]
        haproxy_launcher._run("haproxy", "127.0.0.1", "", words, old)
        text = file.read_text()
        assert text.startswith(haproxy_launcher.MARK)
        return haproxy_launcher.has_routes(text)

    without, routed = serve_config(tmp_path, 18000), serve_config(tmp_path, 18000, 18002)
    assert not has_routes(without), "the first one of all"
    assert has_routes(routed, "-sf", "7")
    assert has_routes(without), "a successor"
    assert has_routes(without, old="7"), "one that takes over from one without a manager"
    assert not has_routes(without, "-sf", "7"), "the application was removed"
    assert not has_routes(without)


def test_who_outlived_its_manager_is_replaced_without_a_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`-sf` has HAProxy let the old process end its streams."""
    started: list[list[str]] = []
    monkeypatch.setattr("os.execv", lambda program, arguments: started.append(arguments))
    monkeypatch.setattr("os.setpgid", lambda *_: None)
    file = tmp_path / "haproxy.cfg"
    file.write_text(serve_config(tmp_path, 18000))
    words = ["-", "haproxy", "127.0.0.1", "", "-db", "-f", str(file)]

    def last_arguments(*more: str) -> list[str]:
        monkeypatch.setattr(sys, "argv", [*words, *more])
        haproxy_launcher.main()
        return started[-1][4:]

    assert last_arguments() == []
    saved = tmp_path / "haproxy.cfg.pid"
    assert saved.read_text() == str(os.getpid())
    with subprocess.Popen([sys.executable, "-c", "input()", str(file)], stdin=-1) as old:
        saved.write_text(str(old.pid))
        assert last_arguments("-sf", "7") == ["-sf", "7"], "Serve reloads its own"
        saved.write_text(str(old.pid))
        assert last_arguments() == ["-sf", str(old.pid)]
        old.kill()
    saved.write_text(str(old.pid))
    assert last_arguments() == []


def events_of(directory: Path, *texts: str) -> list[str]:
    """What is said about a configuration of Serve's as it becomes, however often it is looked
    at."""
    (directory / "node").mkdir(exist_ok=True)
    events: list[str] = []
    say = lambda event, sentence: events.append(f"{event}: {sentence}")  # noqa: E731
    watch = HAProxyWatch(directory, "127.0.0.1", say)
    for text in texts:
        (directory / "node" / "haproxy.cfg").write_text(text)
        watch.look()
        watch.look()
    return events


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("    errorfile", "error files"),
        ("    http-request return status 404", "the answer without routes"),
        ("    stats socket", "the admin socket"),
        ("frontend prometheus", "the metrics port"),
        ("listen stats", "the statistics port"),
        ("    maxconn", "the number of connections"),
        ("    timeout client", "timeouts"),
        ("defaults", "defaults"),
        ("frontend http_frontend", "the port of HTTP"),
    ],
)
def test_what_another_version_of_serve_lacks_is_said(
    tmp_path: Path, line: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_serve = serve_config(tmp_path, 18000, 18004)
    of_another = of_serve.replace("timeout http-keep-alive", "timeout client")
    of_another = of_another.replace(f"\n{line}", "\n    # another version")
    monkeypatch.setattr(HAProxyWatch, "_start", lambda *_: None)
    assert not events_of(tmp_path, adapted(of_serve, "127.0.0.1", "", 400))
    # Serve writes it some time before the launcher mends it.
    (event,) = events_of(tmp_path, of_another, adapted(of_another, "127.0.0.1", "", 400))
    assert event.startswith("haproxy_unknown: ") and f" {part} could not be set" in event


def test_a_stand_in_stays_until_an_haproxy_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in that dies is started again; one whose successor dies at once goes on."""
    port = free_port()
    config = tmp_path / "node" / "haproxy.cfg"
    config.parent.mkdir()
    of_serve = serve_config(tmp_path, port, 18004)
    config.write_text(of_serve)
    events: list[str] = []
    watch = HAProxyWatch(tmp_path, "127.0.0.1", lambda event, sentence: events.append(event))
    words = [sys.executable, haproxy_launcher.__file__, find_haproxy(), "127.0.0.1", ""]
    words += ["-db", "-f", str(config)]

    def stand_in_that_listens() -> subprocess.Popen[bytes]:
        watch.look()
        assert watch._stand_in is not None
        until(lambda: is_open(port))
        return watch._stand_in

    try:
        first = stand_in_that_listens()
        watch.look()
        first.kill()
        first.wait()
        stand_in = stand_in_that_listens()
        assert events == ["haproxy_died"] * 2
        with subprocess.Popen(words) as dies_at_once:
            until(lambda: listens(dies_at_once, port))
            watch.look()
            dies_at_once.kill()
        for _ in range(3):
            watch.look()
            assert is_open(port), "nobody listens"
        assert stand_in.poll() is None and events == ["haproxy_died"] * 2
        monkeypatch.setattr(haproxy, "TAKEOVER_S", 0.5)
        with subprocess.Popen(words) as of_serve_again:
            try:
                until(lambda: listens(of_serve_again, port))
                while stand_in.poll() is None:
                    watch.look()
                    assert is_open(port), "nobody listens"
                assert stand_in.returncode == 0 and is_open(port)
                watch.look()
            finally:
                of_serve_again.kill()
        assert events == ["haproxy_died"] * 2 + ["haproxy_replaced"]
    finally:
        watch.close()


def test_an_ingress_is_reached_by_its_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it has one; that of a port that is no ingress's changes nothing."""
    monkeypatch.setenv(haproxy_launcher.SOCKETS, str(tmp_path))
    port = free_port()
    of_serve = serve_config(tmp_path, port, 18004)
    assert "server it 127.0.0.1:18004 check" in adapted(of_serve, "127.0.0.1", "", 400)
    near = tmp_path / "18004.sock"
    with socketserver.ThreadingUnixStreamServer(str(near), Backend) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        text = adapted(of_serve, "127.0.0.1", "", 400)
        assert f"server it unix@{near} check" in text
        file = tmp_path / "haproxy.cfg"
        file.write_text(text)
        with subprocess.Popen([find_haproxy(), "-db", "-f", str(file)]) as process:
            try:
                until(lambda: is_open(port))
                found = talk(socket.create_connection(("127.0.0.1", port)), request())
                assert found.startswith(b"HTTP/1.1 200") and b"host: x" in found.lower()
            finally:
                process.kill()
                server.shutdown()


def listens(process: subprocess.Popen[bytes], port: int) -> bool:
    found = psutil.Process(process.pid).net_connections("tcp")
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in found)


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
        (b"x-request-id: tcp://evil:1\r\n", False),
        (b"x-request-id: " + b"a" * 129 + b"\r\n", False),
        (b"x-request-id: one\r\nx-request-id: two\r\n", False),
    ],
)
def test_request_ids(proxy: Proxy, headers: bytes, is_kept: bool) -> None:
    assert (b"x-request-id" in proxy.ask("/", headers).lower()) == is_kept


def test_a_question_about_the_whole_server_reaches_the_ingress(proxy: Proxy) -> None:
    asked = request("*").replace(b"GET", b"OPTIONS")
    assert b"OPTIONS / HTTP/1.1" in talk(proxy.connect(), asked)


def test_many_headers_reach_the_ingress_which_refuses_them_in_json(proxy: Proxy) -> None:
    """HAProxy itself takes 101 without a setting, and answers more with its own text."""
    headers = b"".join(b"x-%d: 1\r\n" % number for number in range(900))
    assert b"x-899: 1" in proxy.ask("/", headers)


@pytest.mark.parametrize("path", ["/slow", "/gap"])
def test_a_client_that_waits_for_its_answer_is_not_silent(proxy: Proxy, path: str) -> None:
    assert b"host: x" in proxy.ask(path).lower()


def test_a_client_that_closes_its_sending_side_is_gone(proxy: Proxy) -> None:
    """It may have disconnected: nobody computes its answer to the end."""
    with proxy.connect() as client:
        client.sendall(request("/hold"))
        assert proxy.server.held.get(timeout=60) == "begun"
        client.shutdown(socket.SHUT_WR)
        assert proxy.server.held.get(timeout=60) == "ended"
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400") and b"sending side" in answer


def test_a_head_that_does_not_end_is_given_up(proxy: Proxy) -> None:
    assert talk(proxy.connect(), b"GET / HTTP/1.1\r\nHost").startswith(b"HTTP/1.1 408")
    assert talk(proxy.connect(), b"") == b""


def counts(proxy: Proxy) -> dict[str, float]:
    lines = read_metrics().decode().splitlines()
    named = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name.replace('proxy="http_frontend"', ""): float(value) for name, value in named}


def test_what_it_refuses_is_counted(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_METRICS_PORT", str(proxy.metrics_port))
    assert read_metrics() == b"", "there is no HAProxy"
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    proxy.ask()
    before = counts(proxy)
    assert before["haproxy_frontend_limit_sessions{}"] == 400
    assert talk(proxy.connect(), b"GET / HTTP/1.1\r\nHost").startswith(b"HTTP/1.1 408")
    after = counts(proxy)
    for name in ("request_errors_total{}", 'http_responses_total{,code="4xx"}'):
        name = f"haproxy_frontend_{name}"
        assert after[name] == before[name] + 1
    assert "prometheus" not in read_metrics().decode()
    proxy.process.kill()
    proxy.process.wait()
    assert read_metrics() == b""


def test_one_address_cannot_hold_all_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four, with 40 for all."""
    patient = haproxy_launcher.timeouts(head_s=600)
    monkeypatch.setattr(haproxy_launcher, "timeouts", lambda: patient)
    proxy = Proxy(tmp_path, num_connections=40)
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "1")
    monkeypatch.setenv("RAY_SERVE_HAPROXY_METRICS_PORT", str(proxy.metrics_port))

    def held_and_denied() -> tuple[float, float]:
        now = counts(proxy)
        return (
            now["haproxy_frontend_current_sessions{}"],
            now["haproxy_frontend_denied_connections_total{}"],
        )

    with contextlib.ExitStack() as opened:
        connections, num_reset = [], 0
        for _ in range(36):
            try:
                connection = opened.enter_context(proxy.connect())
                connection.sendall(b"GET / HT")
                connections.append(connection)
            except ConnectionError:
                num_reset += 1
        until(lambda: sum(held_and_denied()) == 36)
        num_held, num_denied = held_and_denied()
        assert num_held in (30, 31)
        until(lambda: num_reset + sum(map(is_closed, connections)) == num_denied)
    proxy.close()


def is_closed(connection: socket.socket) -> bool:
    """By the other side, which never sends anything here."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_what_one_address_may_have_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For clients that all come through one NAT or load balancer."""
    of_serve = serve_config(tmp_path, 18000)
    for setting, number in (("", 300), ("400", 400), ("20", 20)):
        monkeypatch.setenv(haproxy_launcher.OF_ONE_ADDRESS, setting)
        assert f"sc0_conn_cur gt {number} }}" in adapted(of_serve, "127.0.0.1", "", 400)
    for wrong in ("0", "-1", "many", "1.5"):
        monkeypatch.setenv(haproxy_launcher.OF_ONE_ADDRESS, wrong)
        with pytest.raises(StartupError, match="number of connections"):
            haproxy_environment(tmp_path / "h", HttpConfig())


def test_https(tmp_path: Path) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    options = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    command = f"openssl req -x509 {options} -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(key), "-out", str(chain)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    http = HttpConfig(ssl_certfile=str(chain), ssl_keyfile=str(key))
    directory = tmp_path / "h"
    environment = haproxy_environment(directory, http)
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
