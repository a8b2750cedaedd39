"""Finds the tenant of a request by its API key, which the configuration or a file defines.

Session cookies of the page: who showed an API key once need not keep it in the page. A cookie has
its end, the keyed digest of the key, and a signature of both. It lasts only as long as the key
itself: `KeyCheck` looks up the digest as it does that of a key. Browsers send it to no other site
(SameSite=Strict), and it does not count for a request that another origin sends, such as another
port of the same host. Scripts cannot read it (HttpOnly).
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable

from disagg.api.http.request import HttpRequest
from disagg.api_keys import digest_of, digest_said, read_key_file, tenants_by_digest
from disagg.config import HttpConfig
from disagg.errors import StartupError, Unauthorized

LOOK_S = 2.0  # shortest time between two looks at the keys file

logger = logging.getLogger("disagg.api")

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


class KeyCheck:
    """Maps API keys to tenants. Without any configured key, every request is allowed.

    Keys are looked up by a keyed digest with a secret of this process, so that response times
    reveal nothing about keys. Instead of a key a request may have a session cookie, which
    begins with a key and has its digest. The keys file is read again when it changes; if it
    then cannot be read, the old keys stay valid.

    Args:
        now: returns monotonic seconds.
        secret: makes the digests; with the same one, ingresses accept each other's sessions.

    Raises:
        StartupError: the keys file is invalid.
    """

    def __init__(
        self,
        config: HttpConfig,
        now: Callable[[], float] = time.monotonic,
        secret: bytes | None = None,
    ) -> None:
        self._secret = secret or secrets.token_bytes(32)
        self._sessions = SessionCookies(self._secret, is_https=config.ssl_certfile is not None)
        self._configured = tenants_by_digest(config.named_keys())
        self._file = config.api_keys_file
        self._now = now
        self._looked_s = now()
        self._version = _version(self._file)
        self._tenants = self._read()
        metrics_key = config.metrics_key
        self._of_metrics = (
            None
            if metrics_key is None
            else self._hidden(digest_said(metrics_key, "key of /metrics", "metrics_key"))
        )

    def __call__(self, request: HttpRequest) -> None:
        """Set the tenant of a request. Raises `Unauthorized`."""
        if self._file is not None and self._now() - self._looked_s > LOOK_S:
            self._reload_if_changed()
        if not self._tenants:
            return
        given = self._given(request)
        if given is None:
            raise Unauthorized("Send your API key as Authorization: Bearer KEY.")
        tenant = self._tenants.get(given)
        if tenant is None:
            raise Unauthorized("The API key is invalid.")
        request.tenant = tenant

    def of_metrics(self, request: HttpRequest) -> None:
        """Check the key of a request for metrics. Raises `Unauthorized`."""
        if self._of_metrics is not None and self._given(request, OPERATOR) != self._of_metrics:
            raise Unauthorized(
                f"{request.path} needs the metrics key of the server (--metrics-key)."
            )

    def of_operator(self, request: HttpRequest) -> None:
        """Check the key of a request for what is of all tenants. Raises `Unauthorized`.

        It is the metrics key where one is set, otherwise the API key without a tenant's name.
        """
        if self._of_metrics is not None:
            self.of_metrics(request)
        elif self._tenants and self._tenants.get(self._given(request) or b"") != "":
            raise Unauthorized(
                f"{request.path} is for the operator of all tenants, and needs its key: the metrics"
                " key of the server (--metrics-key), or without one its --api-key."
            )

    @property
    def is_required(self) -> bool:
        """Whether there is anything that needs a key."""
        return bool(self._tenants) or self._of_metrics is not None

    def begin_session(self, request: HttpRequest) -> list[tuple[bytes, bytes]]:
        """Headers with cookies for a request's key. Raises `Unauthorized` if it is none."""
        digest = self._given(request) or b""
        begun = []
        if self._tenants.get(digest) is not None:
            begun.append(self._sessions.begin(CHAT, digest))
        if digest == self._of_metrics:
            begun.append(self._sessions.begin(OPERATOR, digest))
        if not begun:
            raise Unauthorized("The API key is invalid.")
        return begun

    def end_session(self) -> list[tuple[bytes, bytes]]:
        return [self._sessions.end(name) for name in (CHAT, OPERATOR)]

    def _given(self, request: HttpRequest, cookie: str = CHAT) -> bytes | None:
        """The digest of the request's key, or else of its session's, in the cookie of this name."""
        given = request.headers.get(b"authorization")
        if given is None and b"x-api-key" in request.headers:  # the header of Anthropic's clients
            given = b"Bearer " + request.headers[b"x-api-key"]
        if given is None:
            return self._sessions.digest(cookie, request)
        scheme, _, key = given.partition(b" ")
        return self._hidden(digest_of(key)) if scheme.lower() == b"bearer" else b""

    def _reload_if_changed(self) -> None:
        self._looked_s = self._now()
        version = _version(self._file)
        if version == self._version:
            return
        self._version = version
        try:
            self._tenants = self._read()
        except StartupError as error:
            logger.warning("%s The previous API keys stay valid.", error.message)
        else:
            logger.info("Reloaded the API keys from %s.", self._file)

    def _read(self) -> dict[bytes, str]:
        from_file = {} if self._file is None else read_key_file(self._file)
        tenants = self._configured | from_file
        return {self._hidden(digest): tenant for digest, tenant in tenants.items()}

    def _hidden(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")


def _version(file: str | None) -> tuple[int, ...]:
    """A value that changes when the file changes.

    It has the inode, because Kubernetes replaces the whole file of a secret.
    """
    try:
        found = os.stat(file) if file is not None else None
    except OSError:
        return (0,)
    return () if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)
