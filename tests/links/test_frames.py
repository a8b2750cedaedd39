"""Framing survives any cut of the byte stream; proofs hold only for what they bind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.links import connection as frames
from disagg.links.connection import (
    HEADER,
    BadFrame,
    FrameReader,
    frame,
    prove,
)
from disagg.messages import (
    Refused,
    Release,
    decode_to_ingress,
    decode_to_worker,
    decode_worker_record,
    encode,
)
from tests.links.fakes import make_record


@given(
    payloads=st.lists(st.binary(max_size=80), max_size=12),
    cuts=st.lists(st.integers(min_value=1, max_value=50), min_size=1),
)
def test_any_cut_gives_the_same_frames(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader(max_nbytes=80)
    got: list[bytes] = []
    turn = 0
    while stream:
        size = cuts[turn % len(cuts)]
        got += reader.feed(stream[:size])
        stream = stream[size:]
        turn += 1
    assert got == payloads


def test_an_announced_size_above_the_cap_is_refused_before_it_arrives() -> None:
    reader = FrameReader(max_nbytes=10)
    with pytest.raises(BadFrame, match="11 bytes was announced; at most 10"):
        reader.feed(HEADER.pack(11))


def test_a_frame_too_long_to_send_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_NBYTES", 8)
    assert frame(b"12345678") == HEADER.pack(8) + b"12345678"
    with pytest.raises(BadFrame, match="9 bytes"):
        frame(b"123456789")


def test_proofs_bind_key_role_nonces_and_identity() -> None:
    base = prove(b"key", "ingress", (b"n1", b"n2"), b"one")
    others = [
        prove(b"kez", "ingress", (b"n1", b"n2"), b"one"),
        prove(b"key", "ingress", (b"n2", b"n1"), b"one"),
        prove(b"key", "ingress", (b"n1", b"n2"), b"another"),
        prove(b"key", "ingress", (b"n1n", b"2"), b"one"),
        prove(b"key", "worker", (b"n1", b"n2"), b"one"),
    ]
    assert base == prove(b"key", "ingress", (b"n1", b"n2"), b"one")
    assert len({base, *others}) == 6


@pytest.mark.parametrize(
    ("message", "decode"),
    [
        (Release("text"), decode_to_worker),
        (Refused("text"), decode_to_ingress),
        (make_record("text"), decode_worker_record),
    ],
    ids=["to a worker", "to an ingress", "record"],
)
def test_text_that_is_not_utf_8_is_no_message(
    message: Any, decode: Callable[[bytes], object]
) -> None:
    """Where the decoder itself raises an error of another kind."""
    raw = encode(message)
    assert decode(raw) == message
    with pytest.raises(msgspec.DecodeError, match="UTF-8"):
        decode(raw.replace(b"text", b"t\xff\xb7t"))
