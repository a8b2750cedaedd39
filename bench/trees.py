"""The files of this tree and of an older commit, so that both can be measured in turns."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment_of(root: Path) -> dict[str, str]:
    """Variables of a process that runs the files below `root`, one thread for each computation."""
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


@contextmanager
def checked_out(commit: str) -> Iterator[Path]:
    """The repository's files as of `commit`, with its compiled kernels where it has any."""
    with tempfile.TemporaryDirectory(prefix="bench-before-") as directory:
        files = Path(directory) / "files"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(files), commit], check=True)
        try:
            if (files / "setup.py").exists():
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
                subprocess.run(build, cwd=files, check=True)
            yield files
        finally:
            subprocess.run([*git, "remove", "--force", str(files)], check=True)
