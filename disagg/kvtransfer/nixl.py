"""NIXL's names, imported so that the logging of this process stays as it is.

The package `nixl` chooses between its builds by the CUDA that torch was built for. If torch was
built without CUDA, the package would load all of torch to find that out, although torch's version
already says it.

NIXL's package configures logging when it is imported (`logging.config.dictConfig`). That closes
every log handler of the process and hides later errors of handlers. A worker imports NIXL after Ray
Serve has opened its log files. With these closed, nothing more is logged, and the replica dies when
a new Serve controller makes it write a line.
"""

from __future__ import annotations

import importlib
import logging
import logging.config
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any


@contextmanager
def _logging_left_alone() -> Iterator[None]:
    """Ignore what NIXL wants of `logging`; what other threads want of it meanwhile is done."""
    configure, raises = logging.config.dictConfig, logging.raiseExceptions

    def configure_unless_nixl(config: Any) -> None:
        if set(config.get("loggers", ())) != {"nixl"}:
            configure(config)

    logging.config.dictConfig = configure_unless_nixl
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raises


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Answer for a torch without CUDA; then NIXL takes whichever build is installed."""
    helpers: Any = importlib.import_module("nixl_meta_utils")
    detect = helpers.detect_cuda_major
    if version("torch").endswith("+cpu"):
        helpers.detect_cuda_major = lambda: None
    try:
        yield
    finally:
        helpers.detect_cuda_major = detect


with _logging_left_alone(), _torch_left_alone():
    from nixl import _bindings, nixl_agent, nixl_agent_config, nixl_xfer_handle

__all__ = ["_bindings", "nixl_agent", "nixl_agent_config", "nixl_xfer_handle"]
