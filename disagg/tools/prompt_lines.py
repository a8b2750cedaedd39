"""Files with a prompt in each line (JSON), for commands that send them to a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from disagg.errors import RequestError

Line = TypeVar("Line", bound="PromptLine")


class PromptLine(msgspec.Struct, kw_only=True):
    """A prompt, or the messages of a conversation. Commands add fields of their own."""

    prompt: str | None = None
    messages: Annotated[tuple[dict[str, Any], ...], Meta(min_length=1)] | None = None

    @property
    def conversation(self) -> tuple[dict[str, Any], ...]:
        return self.messages or ({"role": "user", "content": self.prompt},)


def prompt_lines(path: Path, kind: type[Line], param: str, hint: str = "") -> Iterator[Line]:
    """The lines of a file that are not empty.

    Args:
        param: the flag that names the file.
        hint: added to the error of a line that cannot be read.

    Raises:
        RequestError: the file cannot be read or has no lines, or a line is invalid.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise RequestError(f"Cannot read {path}: {why}.", param=param) from error
    if not any(map(str.strip, lines)):
        raise RequestError(f"{path} has no lines.", param=param)
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=kind)
        except msgspec.MsgspecError as error:
            raise RequestError(f"{path}, line {number}: {error}.{hint}", param=param) from error
        if (line.prompt is None) == (line.messages is None):
            raise RequestError(
                f"{path}, line {number}: a line has either a prompt or messages.", param=param
            )
        yield line
