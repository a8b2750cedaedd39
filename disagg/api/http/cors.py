"""Cross-origin resource sharing (CORS): which websites' scripts may call the API from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api.http.reply import Reply
from disagg.api.http.request import HttpRequest

ANY = "*"
MAX_AGE_S = 600  # for which a browser may remember the answer to a preflight
_METHODS = b"GET, POST, DELETE"


class Cors:
    """Adds headers for requests from allowed origins. Others get no header, so that their browser
    hides the answer from the script.

    Args:
        allowed_origins: such as `https://ui.example.com`; `*` is any origin.
    """

    def __init__(self, allowed_origins: Sequence[str]) -> None:
        self._is_any = ANY in allowed_origins
        self._allowed = frozenset(each.encode() for each in allowed_origins)

    def add_headers(self, request: HttpRequest) -> None:
        """Add the headers of every reply, also of an error, to `request.reply_headers`."""
        if self._is_any:
            request.reply_headers.append((b"access-control-allow-origin", b"*"))
        elif self._allowed:
            request.reply_headers.append((b"vary", b"origin"))
            if not self._is_allowed(request):
                return
            origin = request.headers[b"origin"]
            request.reply_headers.append((b"access-control-allow-origin", origin))
        else:
            return
        request.reply_headers.append((b"access-control-expose-headers", b"*"))

    def is_preflight(self, request: HttpRequest) -> bool:
        """Whether a browser asks before a script's request, which has the API key only later."""
        return (
            request.method == "OPTIONS"
            and b"access-control-request-method" in request.headers
            and self._is_allowed(request)
        )

    def preflight(self, request: HttpRequest) -> Reply:
        """Allow the requested headers. `*` would not include `Authorization`."""
        headers = [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-max-age", str(MAX_AGE_S).encode()),
        ]
        asked = request.headers.get(b"access-control-request-headers")
        if asked:
            headers.append((b"access-control-allow-headers", asked))
        return Reply(b"", headers=headers)

    def _is_allowed(self, request: HttpRequest) -> bool:
        origin = request.headers.get(b"origin")
        return origin is not None and (self._is_any or origin in self._allowed)
