"""The requests of a trace: arrival times, lengths, and shared prefixes.

This module reads the formats of Mooncake (JSON lines) and Azure (CSV). A line that cannot be read
raises an error with its number and the reason. `loads.py` makes up requests.
"""

from __future__ import annotations

import csv
import datetime
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from disagg.errors import RequestError

TRACE_BLOCK_TOKENS = 512  # tokens of a block that has a name in a trace


class TraceRequest(msgspec.Struct, frozen=True, gc=False):
    """One request.

    block_names: the names of the prompt's blocks of `TRACE_BLOCK_TOKENS` tokens. Equal names mean
        equal prompts up to the end of the block. Prompts without names share nothing.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_names: tuple[int, ...] = ()
    tenant: str = ""


class _MooncakeLine(msgspec.Struct):
    timestamp: Annotated[float, Meta(ge=0)]  # ms
    input_length: Annotated[int, Meta(ge=1)]
    output_length: Annotated[int, Meta(ge=0)]
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=(1 << 63) - 1)], ...]


_mooncake_line = msgspec.json.Decoder(_MooncakeLine)
_FRACTION = re.compile(r"\.\d+")
_AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


def read_trace(path: Path) -> list[TraceRequest]:
    """The requests of a file, in order of arrival; the first one arrives at 0.

    Raises:
        RequestError: the file cannot be read, is empty, or has an invalid line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"Cannot read the trace {path}: {error}", param="trace") from error
    is_azure = bool(lines) and lines[0].startswith(_AZURE_COLUMNS[0])
    requests = _read_azure(lines, path) if is_azure else _read_mooncake(lines, path)
    if not requests:
        raise RequestError(f"The trace {path} has no requests.", param="trace")
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [
        msgspec.structs.replace(request, arrival_s=request.arrival_s - first_s)
        for request in requests
    ]


def _broken(path: Path, number: int, reason: object) -> RequestError:
    return RequestError(f"{path}, line {number}: {reason}", param="trace")


def _read_mooncake(lines: Iterable[str], path: Path) -> list[TraceRequest]:
    requests = []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = _mooncake_line.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise _broken(path, number, error) from error
        num_blocks = -(-line.input_length // TRACE_BLOCK_TOKENS)
        if line.hash_ids and len(line.hash_ids) not in (num_blocks, num_blocks - 1):
            raise _broken(
                path,
                number,
                f"there are {len(line.hash_ids)} hash_ids, but an input_length of"
                f" {line.input_length} is {num_blocks} blocks of {TRACE_BLOCK_TOKENS} tokens",
            )
        requests.append(
            TraceRequest(
                line.timestamp / 1e3,
                line.input_length,
                max(1, line.output_length),
                line.hash_ids,
            )
        )
    return requests


def _read_azure(lines: Iterable[str], path: Path) -> list[TraceRequest]:
    requests = []
    for number, row in enumerate(csv.reader(lines), 1):
        if number == 1:
            if row != _AZURE_COLUMNS:
                raise _broken(path, 1, f"the columns are {row}, but must be {_AZURE_COLUMNS}")
            continue
        if not row:
            continue
        try:
            when, num_prompt_tokens, num_output_tokens = row
            request = TraceRequest(
                _unix_s(when),
                int(num_prompt_tokens),
                max(1, int(num_output_tokens)),
            )
        except ValueError as error:
            raise _broken(path, number, error) from error
        if request.num_prompt_tokens < 1:
            raise _broken(
                path, number, f"a prompt needs at least one token, but has {num_prompt_tokens}"
            )
        requests.append(request)
    return requests


def _unix_s(when: str) -> float:
    """Seconds of an ISO time; UTC unless it has an offset, as the traces of 2024 have.

    Raises:
        ValueError: it is no time.
    """
    # Seven digits of a second are one more than `fromisoformat` of Python 3.11 takes.
    fraction = _FRACTION.search(when)
    moment = datetime.datetime.fromisoformat(_FRACTION.sub("", when, count=1))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp() + (float(fraction[0]) if fraction is not None else 0.0)
