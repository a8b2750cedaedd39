"""Requests that are refused, as data.

chat.yaml, completions.yaml and forms.yaml (both) have changes to a good request, bodies.yaml
bodies, heads.yaml places, methods, keys and headers. answers.yaml has what models write and clients
get, schemas.yaml schemas that are taken. `!repeat [x, n]` is x so many times, for texts and for
lists; `!entries [n, x]` an object of x for so many keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
CHAT_URL, TEXT_URL = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT_URL, TEXT_URL, "/tokenize", "/detokenize")
KEY = "key-of-a-test"

_HERE = Path(__file__).parent


class Row(NamedTuple):
    """A request, and how it is refused.

    Attributes:
        fields: of a JSON body, where it is one that any client could send; else None.
    """

    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    status: int
    code: str
    param: str | None
    fields: dict[str, Any] | None = None


class _Loader(yaml.SafeLoader):
    """With `!repeat` and `!entries`."""


def _repeat(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    unit, times = loader.construct_sequence(node, deep=True)
    return unit * times


def _entries(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> Any:
    number, value = loader.construct_sequence(node, deep=True)
    return {str(each): value for each in range(number)}


_Loader.add_constructor("!repeat", _repeat)
_Loader.add_constructor("!entries", _entries)


def load(name: str) -> Any:
    return yaml.load((_HERE / f"{name}.yaml").read_text(), _Loader)


@cache
def rows() -> tuple[Row, ...]:
    return (
        *_changed("chat", CHAT_URL, CHAT),
        *_changed("completions", TEXT_URL, TEXT),
        *_changed("forms", CHAT_URL, CHAT),
        *_changed("forms", TEXT_URL, TEXT),
        *_bodies(),
        *_heads(),
    )


@cache
def codes() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load("codes")
    return found


@cache
def routes() -> dict[str, dict[str, str]]:
    """Path -> its method, and who may call it."""
    found: dict[str, dict[str, str]] = load("routes")
    return found


def headers(**others: str) -> dict[str, str]:
    own = {"host": "test", "content-type": "application/json", "authorization": f"Bearer {KEY}"}
    return own | others


def _changed(name: str, url: str, base: dict[str, Any]) -> Iterator[Row]:
    for each in load(name):
        without = each.get("without", ())
        change = each.get("change", {})
        fields = {key: value for key, value in (base | change).items() if key not in without}
        words = f"{name} {url}: {change or ''} {'without ' + without[0] if without else ''}"
        status = each.get("status", 400)
        body = json.dumps(fields).encode()
        param = each.get("param")
        yield Row(words[:60], "POST", url, headers(), body, status, each["code"], param, fields)


def _bodies() -> Iterator[Row]:
    for each in load("bodies"):
        body = each["body"]
        if isinstance(body, list):
            body = "".join(text * times for text, times in body)
        raw = body.encode() if isinstance(body, str) else body
        for url in each.get("paths", URLS):
            name = f"{url}: {raw[:30]!r}"
            yield Row(name, "POST", url, headers(), raw, 400, each["code"], each.get("param"))


def _heads() -> Iterator[Row]:
    for each in load("heads"):
        method, path = each.get("method", "POST"), each.get("path", CHAT_URL)
        own = {name: str(value) for name, value in each.get("headers", {}).items()}
        body = json.dumps(CHAT).encode() if each.get("body", True) else b""
        name = f"{method} {path} {own or ''}"[:60]
        status, code, param = each["status"], each["code"], each.get("param")
        yield Row(name, method, path, headers(**own), body, status, code, param)
