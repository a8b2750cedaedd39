"""Corrects the configuration that Serve wrote for HAProxy, then executes HAProxy.

    python haproxy_launcher.py HAPROXY HOST [arguments of HAProxy...]

Serve's configuration answers 404 while there are no routes, and 500 while no server is up: clients
take the first for their own mistake. Both are 503 with `Retry-After` here. And HAProxy listens
where the user said, be it IPv6, which Serve's ingresses behind it cannot, on a port that a stand-in
can share.

Run as a script with the standard library alone: it must be as fast as HAProxy's own start.
"""

from __future__ import annotations

import os
import re
import sys

_BODY = (
    '{"error":{"message":"No worker can be reached at the moment; ask again.",'
    '"type":"server_error","param":null,"code":"unavailable"}}'
)
_REPLY = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    f"Cache-Control: no-cache\r\nConnection: close\r\nContent-Length: {len(_BODY)}\r\n\r\n{_BODY}"
)


def mended(text: str, host: str, reply_file: str) -> str:
    """Serve's configuration with our answers in the place of its own.

    Args:
        host: that the user asked to listen on.
        reply_file: holds a whole HTTP reply, for HAProxy to send.
    """
    text = re.sub(r"errorfile 503 .*", lambda _: f'errorfile 503 "{reply_file}"', text)
    text = re.sub(
        r"(backend default_backend\n\s+)http-request return status 404 .*",
        lambda match: f'{match[1]}http-request return status 503 errorfile "{reply_file}"',
        text,
    )
    if ":" in host:
        both = " v4v6" if host == "::" else ""
        bind = re.compile(r"(frontend http_frontend\n\s+bind )\S+:(\d+)")
        text = bind.sub(lambda match: f"{match[1]}{host}:{match[2]}{both}", text)
    return text


def main() -> None:
    haproxy, host, *arguments = sys.argv[1:]
    if "-f" in arguments:
        file = arguments[arguments.index("-f") + 1]
        reply_file = os.path.join(os.path.dirname(file), "503.http")
        with open(reply_file, "w", newline="") as reply:
            reply.write(_REPLY)
        with open(file) as config:
            text = config.read()
        with open(file + ".new", "w") as config:
            config.write(mended(text, host, reply_file))
        os.replace(file + ".new", file)
    # -dR forbids others to listen on the port, as a stand-in must while Serve's own one starts.
    arguments = [each for each in arguments if each != "-dR"]
    os.execv(haproxy, [haproxy, *arguments])  # noqa: S606


if __name__ == "__main__":
    main()
