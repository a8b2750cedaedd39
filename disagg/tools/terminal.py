"""Tables and sentences on a terminal; plain, and not broken into short lines, in a pipe."""

from __future__ import annotations

import sys
from typing import Any, Literal

import msgspec
from rich.console import Console
from rich.table import Table

_PIPE_WIDTH = 160  # characters of a line where nobody's window says how many there are


def console() -> Console:
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def table(*names: str, title: str = "") -> Table:
    """Columns without lines between them. A name that begins with < is of a column of text, which
    begins at the left; numbers end at the right."""
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False)
    for name in names:
        justify: Literal["left", "right"] = "left" if name.startswith("<") else "right"
        made.add_column(name.removeprefix("<"), justify=justify, overflow="fold")
    return made


def print_json(value: Any) -> None:
    """Anything that msgspec encodes, or JSON as bytes, for `--json`."""
    raw = value if isinstance(value, bytes) else msgspec.json.encode(value)
    sys.stdout.write(msgspec.json.format(raw).decode() + "\n")
