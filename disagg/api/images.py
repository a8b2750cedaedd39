"""Images of messages: read from data URLs, or fetched from hosts that the operator names.

They go to the engine as the client sent them. Only models on vLLM take them.
"""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from disagg.api.refusals import invalid_value
from disagg.errors import InvalidRequest

MAX_NUM_IMAGES = 64  # in one request
MAX_NBYTES = 32 << 20  # of all images of a request, for each of its choices
FETCH_S = 5.0  # for one image, as vLLM has it
MAX_URL_LEN = 8192  # of images to fetch; Python keeps the last URLs that it has parsed
_CHUNK_NBYTES = 1 << 16
# Own threads: those of `asyncio.to_thread` tokenize, and a host that does not answer must not keep
# them. A request whose fetch finds no free one waits until its deadline at most.
_FETCHERS = ThreadPoolExecutor(max_workers=16, thread_name_prefix="fetch")
_DATA = re.compile(r"data:image/[a-z0-9.+-]+;base64,", re.IGNORECASE)


class ImageRules(NamedTuple):
    """How a model takes images.

    Attributes:
        mark_id: the token of the prompt in whose place an image's tokens begin.
        domains: the hosts from which images are fetched.
    """

    mark_id: int
    domains: tuple[str, ...] = ()


class RemoteImage(NamedTuple):
    """An image that is still to be fetched; `path` is its place in the request."""

    url: str
    path: str


def read_image(url: str, path: str, rules: ImageRules) -> bytes | RemoteImage:
    """The image behind a URL. Raises `InvalidRequest` if it is no image, or not to be fetched."""
    if url[:5].lower() == "data:":
        head = _DATA.match(url)
        if head is None:
            raise invalid_value(path, "it is not of the form data:image/png;base64,....")
        try:
            return b64decode(url[head.end() :], validate=True)
        except ValueError:
            raise invalid_value(path, "the image is not in base64.") from None
    if len(url) > MAX_URL_LEN:
        raise invalid_value(path, f"it is longer than {MAX_URL_LEN} characters.")
    host = _host(url)
    if host is None or host not in rules.domains:
        allowed = ", ".join(rules.domains)
        raise invalid_value(
            path,
            f"images are not fetched from {(host or url)[:64]!r}"
            + (f", only from {allowed}" if allowed else "")
            + ". Send the image itself, in base64: as data:image/png;base64,...., or in"
            " /v1/messages with a source of type 'base64'.",
        )
    return RemoteImage(url, path)


async def fetch_images(images: Sequence[bytes | RemoteImage], num_choices: int) -> list[bytes]:
    """All images of a request, in their order.

    Raises:
        InvalidRequest: one cannot be fetched, or there are too many, or they are too large.
    """
    if len(images) > MAX_NUM_IMAGES:
        raise invalid_value(
            "messages", f"there are {len(images)} images; at most {MAX_NUM_IMAGES} are allowed."
        )
    loop, left, found = asyncio.get_running_loop(), MAX_NBYTES // num_choices, []
    for image in images:
        if isinstance(image, RemoteImage):
            image = await loop.run_in_executor(_FETCHERS, _fetch, image, left)
        left -= len(image)
        if left < 0:
            raise _too_large("messages")
        found.append(image)
    return found


def _too_large(path: str) -> InvalidRequest:
    return invalid_value(
        path,
        f"its images are larger than {MAX_NBYTES >> 20} MiB, counted once for each of its n"
        " choices. Send smaller ones.",
    )


def _host(url: str) -> str | None:
    """The host of an HTTP URL that says nothing besides host and port: no user, which hides it."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    plain = re.fullmatch(r"[a-z0-9.-]+(:[0-9]+)?", parts.netloc, re.IGNORECASE)
    return parts.hostname if plain and parts.scheme in ("http", "https") else None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """An allowed host must not lead to others, such as those of the operator's own network."""

    def redirect_request(self, *args: Any) -> None:
        return None


_opener = urllib.request.build_opener(_NoRedirect)


def _fetch(image: RemoteImage, most: int) -> bytes:
    """Up to `most` bytes."""
    ends_s = time.monotonic() + FETCH_S
    raw = bytearray()
    try:
        with _opener.open(image.url, timeout=FETCH_S) as answer:
            while chunk := answer.read1(_CHUNK_NBYTES):
                raw += chunk
                if len(raw) > most:
                    raise _too_large(image.path)
                if time.monotonic() > ends_s:
                    raise TimeoutError
    except (OSError, HTTPException, ValueError) as error:  # an HTTPError is an OSError
        raise invalid_value(
            image.path, f"the image could not be fetched: {type(error).__name__}."
        ) from None
    return bytes(raw)
