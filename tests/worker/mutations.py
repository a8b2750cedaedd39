"""Messages as nobody sends them: bytes flipped, values replaced, fields dropped or added."""

from __future__ import annotations

import copy
import random
from typing import Any

import msgspec

ODD: dict[type, tuple[Any, ...]] = {
    bool: (True, False),
    int: (0, 1, -1, 2, 5, 100, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)),
    float: (0.0, -1.5, 1e-9, 3.0, 1e308, float("nan"), float("inf"), -float("inf")),
    str: ("", "\0", "x", "x" * 300, "worker-0", "worker-9"),
    bytes: (b"", b"\0", b"\xff" * 40),
    list: ([], [0], [-1], [1 << 40], [[]], list(range(300)), [5] * 40),
    dict: ({}, {"a": 1}),
    type(None): (None, 0, "", []),
}


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """`payload` with something wrong with it, more often in its values than in its bytes."""
    if rng.random() < 0.1:
        raw = bytearray(payload)
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return bytes(raw[: rng.randrange(1, len(raw))] if rng.random() < 0.3 else raw)
    message = msgspec.msgpack.decode(payload)
    for _ in range(rng.randrange(1, 4)):
        _mutate(message, rng)
    return msgspec.msgpack.encode(message)


def _mutate(node: Any, rng: random.Random) -> None:
    """Change one place somewhere below `node`, in place: mostly to another value of its type."""
    keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
    if not keys:
        return
    key = rng.choice(keys)
    child, fate = node[key], rng.random()
    if isinstance(child, list | dict) and child and fate < 0.8:
        _mutate(child, rng)
    elif fate < 0.9:
        node[key] = _odd(type(child), rng)
    elif fate < 0.94:
        node[key] = _odd(rng.choice(list(ODD)), rng)
    elif fate < 0.97:
        del node[key]
    elif isinstance(node, list):
        node.insert(key, copy.deepcopy(child))
    else:
        node[f"{key}x"] = child


def _odd(kind: type, rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(ODD[kind]))
