"""An environment for each peer, under `.peers/`, because their requirements contradict each other.

`requirements/NAME.txt` pins a peer and all its dependencies. If there is a
`requirements/NAME-alone.txt`, it is installed after that and without its own dependencies (a CUDA
build of torch, for example).
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
REQUIREMENTS = Path(__file__).parent / "requirements"
ENVIRONMENTS = ROOT / ".peers"

# As its installation guide has it: with Debian's libtcmalloc-minimal4, where that is installed.
# By itself it takes one thread for two hyperthreads of a core.
_PRELOADED = [
    ENVIRONMENTS / "vllm" / "lib" / "libiomp5.so",
    *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
]
VLLM_VARIABLES = {
    "LD_PRELOAD": ":".join(map(str, _PRELOADED)),
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    "VLLM_CACHE_ROOT": str(ENVIRONMENTS / "vllm-cache"),  # what it compiles
    "VLLM_NO_USAGE_STATS": "1",
}


class NotInstalled(Exception):
    """An environment could not be made; the reason in one line."""


def python_of(
    name: str, environments: Path = ENVIRONMENTS, requirements: Path = REQUIREMENTS
) -> Path:
    """The interpreter of a peer's environment, which is made first where it is not up to date.

    Raises:
        NotInstalled
    """
    files = [requirements / f"{name}.txt", requirements / f"{name}-alone.txt"]
    wanted = "".join(file.read_text() for file in files if file.exists())
    home = environments / name
    python, record = home / "bin" / "python", home / "installed.txt"
    if record.exists() and record.read_text() == wanted:
        return python
    print(f"installing {name} into {home}", file=sys.stderr, flush=True)
    record.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", str(home)])
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "-r", str(files[0])])
    if files[1].exists():
        _run([*pip, "--no-deps", "-r", str(files[1])])
    record.write_text(wanted)
    return python


def with_disagg(python: Path) -> Path:
    """Install this repository into a peer's environment, without its dependencies."""
    where = "import disagg, importlib.metadata as m; m.version('disagg'); print(*disagg.__path__)"
    found = subprocess.run([str(python), "-c", where], cwd="/", capture_output=True, text=True)
    if found.stdout.strip() == str(ROOT / "disagg"):
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*pip, "--no-deps", "--no-build-isolation", "-e", str(ROOT)])
    return python


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled((lines or done.stderr.splitlines() or ["no word"])[-1])
