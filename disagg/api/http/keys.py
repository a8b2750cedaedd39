"""Finds the tenant of a request by its API key, which the configuration or a file defines."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import time
from collections.abc import Callable

from disagg.api.http.request import HttpRequest
from disagg.api.http.sessions import CHAT, OPERATOR, SessionCookies
from disagg.api_keys import digest_of, digest_said, read_key_file, tenants_by_digest
from disagg.config import HttpConfig
from disagg.errors import StartupError, Unauthorized

LOOK_S = 2.0  # shortest time between two looks at the keys file

logger = logging.getLogger("disagg.api")


class KeyCheck:
    """Maps API keys to tenants. Without any configured key, every request is allowed.

    Keys are looked up by a keyed digest with a secret of this process, so that response times
    reveal nothing about keys. Instead of a key a request may have a session cookie (`sessions.py`),
    which begins with a key and has its digest. The keys file is read again when it changes; if it
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
