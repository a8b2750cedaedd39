"""Probes of what runs on this machine: processes, and the server's answers. Knows no Ray."""

from __future__ import annotations

import contextlib
import ssl
import urllib.request
from http.client import HTTPResponse
from typing import cast

import psutil


def runs(process: psutil.Process) -> bool:
    """Whether a process is running. A zombie is not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def ask_here(url: str, timeout_s: float) -> HTTPResponse:
    """GET a URL of this machine. Certificates are not checked: they have a name for clients.

    Raises:
        OSError: there is no answer, or an error status (`urllib.error.HTTPError`).
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}),  # http_proxy would apply to 127.0.0.1, too
        urllib.request.HTTPSHandler(context=context),
    )
    return cast(HTTPResponse, opener.open(url, timeout=timeout_s))
