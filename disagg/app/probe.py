"""HTTP requests to the server on this machine. Does not import Ray."""

from __future__ import annotations

import ssl
import urllib.request
from http.client import HTTPResponse
from typing import cast


def ask_here(url: str, timeout_s: float) -> HTTPResponse:
    """GET a URL of this machine. Certificates are not checked: they have a name for clients.

    Raises:
        OSError: there is no answer, or an error status (`urllib.error.HTTPError`).
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    answer = urllib.request.urlopen(url, timeout=timeout_s, context=context)  # noqa: S310
    return cast(HTTPResponse, answer)
