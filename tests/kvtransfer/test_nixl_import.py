"""A worker that imports NIXL keeps its logging, Serve's files above all, and loads no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import logging, logging.handlers, sys
serve_file = logging.handlers.MemoryHandler(1, target=logging.FileHandler(sys.argv[1]))
logging.getLogger("ray.serve").addHandler(serve_file)
import disagg.kvtransfer.nixl_transport
from importlib.metadata import version
assert "torch" not in sys.modules or not version("torch").endswith("+cpu")
assert serve_file.target is not None, "NIXL's import has closed Serve's handler"
assert logging.raiseExceptions
logging.getLogger("ray.serve").error("after the import")
logging.getLogger("disagg.worker").error("a line of ours")
"""


def test_importing_nixl_leaves_logging_alone(tmp_path: Path) -> None:
    file = tmp_path / "log"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "after the import\n"
    assert "a line of ours" in done.stderr
    assert done.stdout == ""
