"""Corrects the configuration that Serve wrote for HAProxy, then executes HAProxy.

    python haproxy_launcher.py HAPROXY HOST CERTIFICATE [arguments of HAProxy...]

Serve's configuration is made for a trusted network. Here HAProxy meets strangers, so:

- It listens where the user said (IPv6 too, which Serve's ingresses behind it cannot) on a port that
  a stand-in can share. Its statistics are on the loopback, its socket is for its own user.
- A head must be complete within `HEAD_S`, and a client that is to send something may be silent for
  `SILENT_S`. One address cannot hold all connections.
- Headers that Serve obeys are removed or checked: they would cut streams, or be errors 500.
- HAProxy's refusals are OpenAI's JSON with a request id, but for bytes that it cannot read as HTTP:
  it has fixed texts for these. Serve's 404 while there are no routes and 500 while no server is up
  are 503 with `Retry-After`, since clients take a 404 for their own mistake.

Run as a script with the standard library alone: it must be as fast as HAProxy's own start.
"""

from __future__ import annotations

import os
import re
import resource
import sys
from typing import NamedTuple

HEAD_S = 10
SILENT_S = 60
KEEP_ALIVE_S = 75  # longer than clients keep idle connections, or they would meet a closed one
MOST_CONNECTIONS = 16384
OTHER_FILES = 512  # that HAProxy opens beside those of its connections
FILES_EACH = 2.5  # to the client, to the ingress, and a pipe for every fourth
SHARE_OF_ONE = 0.75  # of all connections, for one address: it may be a proxy of many clients

_MARK = "# Mended by disagg/app/haproxy_launcher.py\n"
_REMOVED_HEADERS = (
    "x-request-timeout-seconds",  # Serve would cut a stream after it, without an error event
    "serve_multiplexed_model_id",
    "serve-multiplexed-model-id",
    "x-session-id",
)
_REQUEST_ID = "^[!-~]{1,128}$"  # what is no text would be an error 500 in Serve


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
        "The request is not HTTP as RFC 9112 has it, or ended before its body did.",
    ),
    Refusal(408, "invalid_request_error", "request_timeout", "The request did not come in time."),
    Refusal(500, "server_error", "internal_error", "Something went wrong here."),
    Refusal(502, "server_error", "unavailable", "Its server is gone; send it again.", True),
    Refusal(503, "server_error", "unavailable", "No worker can be reached; ask again.", True),
    Refusal(504, "server_error", "unavailable", "No answer came in time; send it again.", True),
)


def _refusals() -> str:
    return "".join(
        f"    http-error status {each.status} content-type application/json"
        f" lf-string '{each.body}' hdr x-request-id \"%[uuid()]\""
        f"{' hdr Retry-After 1' if each.may_retry else ''}\n"
        for each in _REFUSALS
    )


def most_connections() -> int:
    """As many as the limit of open files allows. Raises the soft limit to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(256, min(MOST_CONNECTIONS, int((hard - OTHER_FILES) / FILES_EACH)))


def mended(text: str, host: str, certificate: str, num_connections: int) -> str:
    """Serve's configuration with our answers and limits in the place of its own.

    Args:
        host: that the user asked to listen on.
        certificate: file with a certificate chain and its key, for HTTPS; "": HTTP.
        num_connections: at once, of all clients.
    """
    if text.startswith(_MARK):  # Serve starts a successor with the file as it finds it
        return text
    text = re.sub(r"( {4}errorfile 50\d .*\n)+", lambda _: _refusals(), text)
    text = re.sub(
        r"(backend default_backend\n\s+)http-request return status 404 .*",
        # `http-error` of this status answers, as it does where no server is up.
        lambda match: f"{match[1]}http-request deny deny_status 503",
        text,
    )
    text = re.sub(r"(stats socket \S+) mode 666", r"\1 mode 600", text)
    text = re.sub(r"(frontend prometheus\n\s+bind )\S*:", r"\g<1>127.0.0.1:", text)
    text = re.sub(r"(listen stats\n\s+bind )\S*:", r"\g<1>127.0.0.1:", text)
    text = re.sub(r"maxconn \d+", f"maxconn {num_connections}", text, count=1)
    text = re.sub(r" {4}timeout (client|http-request|http-keep-alive) .*\n", "", text)
    text = text.replace("defaults\n", f"defaults\n{timeouts()}", 1)
    options = " v4v6" if host == "::" else ""
    if certificate:
        options += f' ssl crt "{certificate}" ssl-min-ver TLSv1.2 alpn http/1.1'
    bind = re.compile(r"(frontend http_frontend\n\s+bind )\S+:(\d+)\n")
    rules = _rules(int(num_connections * SHARE_OF_ONE))
    return _MARK + bind.sub(lambda match: f"{match[1]}{host}:{match[2]}{options}\n{rules}", text)


def timeouts(head_s: float = HEAD_S, silent_s: float = SILENT_S) -> str:
    return (
        f"    timeout client {silent_s}s\n"
        f"    timeout http-request {head_s}s\n"
        f"    timeout http-keep-alive {KEEP_ALIVE_S}s\n"
        "    option http-ignore-probes\n"  # a browser's connection that it did not need
    )


def _rules(num_of_one: int) -> str:
    """Of the frontend that clients reach."""
    removed = [f"http-request del-header {name}" for name in _REMOVED_HEADERS]
    lines = [
        "stick-table type ipv6 size 100k expire 60s store conn_cur",
        "tcp-request connection track-sc0 src",
        f"tcp-request connection reject if {{ sc0_conn_cur gt {num_of_one} }}",
        *removed,
        "http-request del-header x-request-id if { req.fhdr_cnt(x-request-id) gt 1 } ||"
        " { req.fhdr(x-request-id) -m found }"
        f" !{{ req.fhdr(x-request-id) -m reg '{_REQUEST_ID}' }}",
    ]
    return "".join(f"    {line}\n" for line in lines)


def main() -> None:
    haproxy, host, certificate, *arguments = sys.argv[1:]
    if "-f" in arguments:
        file = arguments[arguments.index("-f") + 1]
        with open(file) as config:
            text = config.read()
        with open(file + ".new", "w") as config:
            config.write(mended(text, host, certificate, most_connections()))
        os.replace(file + ".new", file)
    # -dR forbids others to listen on the port, as a stand-in must while Serve's own one starts.
    arguments = [each for each in arguments if each != "-dR"]
    os.execv(haproxy, [haproxy, *arguments])  # noqa: S606


if __name__ == "__main__":
    main()
