"""Lines that the command prints: sentences on a terminal, one JSON object per line elsewhere."""

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
        file: the run's log file; None writes to standard output only.
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
        """Whether the output can show a status line that changes in place."""
        return self._console.is_terminal and not self._is_json

    def say(self, event: str, message: str, **fields: Any) -> None:
        """Print one event.

        Args:
            event: the event's name, for programs.
            message: a sentence for people.
            fields: further values for programs, in JSON only.
        """
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        # On a terminal, empty lines and indentation set a message apart.
        line = json.dumps({"time": time, "event": event, "message": message.strip(), **fields})
        # Neither a closed output nor a full disk may end the service.
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
        """Update the status line; an empty message removes it. Does nothing unless `is_live`."""
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
            with contextlib.suppress(OSError):  # flushing the last line fails if the disk is full
                self._file.close()
