"""Session cookies of the page: who showed an API key once need not keep it in the page.

A cookie has its end, the keyed digest of the key, and a signature of both. It lasts only as long as
the key itself: `KeyCheck` looks up the digest as it does that of a key. Browsers send it to no
other site (SameSite=Strict), and it does not count for a request that another origin sends, such as
another port of the same host. Scripts cannot read it (HttpOnly).
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable

from disagg.api.http.request import HttpRequest

LIFETIME_S = 12 * 3600
CHAT, OPERATOR = "disagg-session", "disagg-operator"  # cookies with an API key, the metrics key
_TRUSTED = {b"same-origin", b"none", b""}  # "none": typed by the user; "": no browser of today


class SessionCookies:
    """Makes and reads cookies.

    Args:
        secret: signs cookies; all ingresses of a server have the same.
        is_https: whether clients reach the server by HTTPS.
        now: returns Unix time in seconds.
    """

    def __init__(
        self, secret: bytes, is_https: bool = False, now: Callable[[], float] = time.time
    ) -> None:
        self._secret = secret
        self._attributes = "; Path=/; HttpOnly; SameSite=Strict" + "; Secure" * is_https
        self._now = now

    def begin(self, name: str, digest: bytes) -> tuple[bytes, bytes]:
        """The header that sets cookie `name` for a key with this keyed digest."""
        said = f"{int(self._now()) + LIFETIME_S}.{digest.hex()}"
        value = f"{said}.{self._sign(name, said)}"
        return self._set(name, f"{value}; Max-Age={LIFETIME_S}")

    def end(self, name: str) -> tuple[bytes, bytes]:
        return self._set(name, "; Max-Age=0")

    def digest(self, name: str, request: HttpRequest) -> bytes | None:
        """The keyed digest of the key; None if the request has no valid cookie `name`."""
        if request.headers.get(b"sec-fetch-site", b"") not in _TRUSTED:
            return None
        cookies = request.headers.get(b"cookie", b"").decode("latin-1").split(";")
        pairs = (cookie.strip().partition("=") for cookie in cookies)
        for value in (value for each, _, value in pairs if each == name):
            said, _, signature = value.rpartition(".")
            if not hmac.compare_digest(signature.encode(), self._sign(name, said).encode()):
                continue
            end_s, _, digest = said.partition(".")
            if self._now() < int(end_s):
                return bytes.fromhex(digest)
        return None

    def _sign(self, name: str, said: str) -> str:
        return hmac.digest(self._secret, f"{name}={said}".encode(), "sha256").hex()

    def _set(self, name: str, value: str) -> tuple[bytes, bytes]:
        return b"set-cookie", f"{name}={value}{self._attributes}".encode()
