"""Log lines as JSON objects, each with its request id and trace id.

The request is a context variable, set where its work begins and inherited by tasks. A line about
another request has `extra={"request_id": ...}`. No text that a client wrote is logged.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from logging.handlers import RotatingFileHandler
from pathlib import Path

DIRECTORY = "DISAGG_LOG_DIR"  # variable; without it lines go to standard error
LEVEL = "DISAGG_LOG_LEVEL"  # variable: a name that `logging` knows
MAX_FILE_NBYTES = 64 << 20
RECENT_S = 120.0  # Serve may take so long to end a worker whose engine failed
TAIL_NBYTES = 1 << 16  # in which `last_error` looks

# Request id and trace id, "" where there is none.
about: ContextVar[tuple[str, str]] = ContextVar("about", default=("", ""))


def set_request(request_id: str, traceparent: str) -> None:
    """Say which request the lines of this task, and of the tasks that it begins, are about.

    Args:
        traceparent: a valid W3C header, or "".
    """
    about.set((request_id, traceparent.split("-")[1] if traceparent else ""))


class JsonLines(logging.Formatter):
    """Args:
    process: names the process in each line.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        request_id, trace_id = about.get()
        line = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": getattr(record, "request_id", request_id),
            "trace_id": getattr(record, "trace_id", trace_id),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def setup(process: str, environment: Mapping[str, str] = os.environ) -> None:
    """Write the lines of this process to a file of its own, or to standard error."""
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    directory = environment.get(DIRECTORY)
    if directory:
        with contextlib.suppress(OSError):  # it may be of another node, or full
            handler = RotatingFileHandler(
                Path(directory) / f"{process}.log", maxBytes=MAX_FILE_NBYTES, backupCount=1
            )
    handler.setFormatter(JsonLines(process))
    logger = logging.getLogger("disagg")
    logger.handlers = [handler]
    logger.propagate = False
    level = environment.get(LEVEL, "INFO").upper()
    logger.setLevel(level if level in logging.getLevelNamesMapping() else "INFO")


def last_error(pid: int, environment: Mapping[str, str] = os.environ) -> str:
    """The last error that a process wrote to its file within `RECENT_S`; "" if there is none."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=RECENT_S)
    found = (since.isoformat(timespec="milliseconds"), "")
    directory = environment.get(DIRECTORY)
    for file in Path(directory).glob("*.log") if directory else ():
        with contextlib.suppress(OSError), file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - TAIL_NBYTES))
            for raw in opened.read().splitlines():
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    line = json.loads(raw)
                    if (line["pid"], line["level"]) == (pid, "ERROR"):
                        found = max(found, (line["time"], line["message"]))
    return found[1]
