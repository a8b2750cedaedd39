"""Where a server is, as people write it."""

from __future__ import annotations

from typing import NamedTuple
from urllib.parse import urlsplit

from disagg.errors import StartupError

DEFAULT_URL = "http://127.0.0.1:8000"


class Address(NamedTuple):
    """Where a server is. `prefix` is the path before `/v1`."""

    scheme: str
    host: str
    port: int
    prefix: str

    @property
    def netloc(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def root(self) -> str:
        """The URL to which the path of an endpoint, such as `/v1/models`, is added."""
        return f"{self.scheme}://{self.netloc}{self.prefix}"


def address_of(url: str) -> Address:
    """Read a URL, which may end with `/v1` and leave out the scheme.

    Raises:
        StartupError: it is not an http or https URL.
    """
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    except (KeyError, ValueError):
        port = 0
    if not port or not parts.hostname:
        raise StartupError(f"{url!r} is not a URL like {DEFAULT_URL}.", param="url")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme, parts.hostname, port, prefix)
