"""The command's own lines: sentences on a terminal, one JSON object a line elsewhere."""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
from pathlib import Path
from typing import Any, Literal, TextIO

from rich.console import Console
from rich.markup import escape
from rich.status import Status

LogFormat = Literal["auto", "text", "json"]


class Lines:
    """Writes lines to standard output, and all of them as JSON to a file.

    Args:
        form: "auto" is text on a terminal and JSON elsewhere.
        file: of the run; None: only standard output.
    """

    def __init__(
        self, form: LogFormat = "auto", file: Path | None = None, console: Console | None = None
    ) -> None:
        self._console = console or Console(highlight=False)
        self._is_json = form == "json" or (form == "auto" and not self._console.is_terminal)
        self._file: TextIO | None = None
        if file is not None:
            with contextlib.suppress(OSError):
                self._file = file.open("a", encoding="utf-8")
        self._status: Status | None = None

    @property
    def is_live(self) -> bool:
        """Whether a line can be shown that changes."""
        return self._console.is_terminal and not self._is_json

    def say(self, event: str, message: str, **fields: Any) -> None:
        """One event: its name, a sentence, and what a program would want to know of it."""
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, "message": message, **fields})
        # A reader that has gone away must not end the service; nor must a full disk.
        with contextlib.suppress(OSError, ValueError):
            if self._file is not None:
                print(line, file=self._file, flush=True)
        with contextlib.suppress(OSError, ValueError):
            if self._is_json:
                print(line, flush=True)
            else:
                self._console.print(message, markup=False, soft_wrap=True)
                sys.stdout.flush()

    def show(self, message: str) -> None:
        """The line that changes; an empty one takes it away. Only where `is_live`."""
        if not self.is_live:
            return
        if not message and self._status is not None:
            self._status.stop()
            self._status = None
        elif message and self._status is None:
            self._status = self._console.status(escape(message))
            self._status.start()
        elif self._status is not None:
            self._status.update(escape(message))

    def close(self) -> None:
        self.show("")
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, to which the last line still goes
                self._file.close()
