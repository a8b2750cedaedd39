"""Serve's HAProxy configuration, mended, is one that HAProxy takes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from disagg.app.haproxy import as_stand_in, find_haproxy
from disagg.app.haproxy_launcher import mended

# The lines of Serve's template (ray/serve/_private/haproxy_templates.py) that are mended.
SERVE = """\
global
    stats socket {0}/admin.sock mode 666 level admin expose-fd listeners
    server-state-base {0}
    server-state-file {0}/server-state
defaults
    mode http
    timeout connect 5s
    timeout client 5s
    timeout server 5s
    errorfile 502 {0}/500.http
    errorfile 503 {0}/500.http
    load-server-state-from-file global
frontend http_frontend
    bind *:18000
    default_backend default_backend
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::"])
def test_without_routes_or_servers_it_says_try_again(tmp_path: Path, host: str) -> None:
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\n\r\n")
    (tmp_path / "503.http").write_text("HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
    text = mended(SERVE.format(tmp_path), host, f"{tmp_path}/503.http")
    assert "404" not in text and text.count("503.http") == 2
    binds = {"127.0.0.1": "*:18000", "::1": "::1:18000", "::": ":::18000 v4v6"}
    assert f"    bind {binds[host]}\n" in text
    stand_in = as_stand_in(text, f"{tmp_path}/other.sock")
    assert "server-state" not in stand_in and "admin.sock" not in stand_in
    for each in (text, stand_in):
        file = tmp_path / "haproxy.cfg"
        file.write_text(each)
        done = subprocess.run(
            [find_haproxy(), "-c", "-f", str(file)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
