"""Runs the checks of `checks.py` against a server, and prints a table. Runs in `.clients`.

    .clients/bin/python -m bench.clients.matrix http://127.0.0.1:8000 MODEL TOKENIZER_DIRECTORY

Returns 1 if a check failed.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from importlib.metadata import PackageNotFoundError, version

from bench.clients.checks import CHECKS, Server


def main() -> int:
    server, wanted = Server(*sys.argv[1:4]), sys.argv[4:]
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it looks for prices on the network
    num_failed = 0
    print("| library | version | what | | s |\n|---|---|---|---|---|")
    for (library, what), check in CHECKS.items():
        if wanted and library not in wanted:
            continue
        began_s = time.monotonic()
        try:
            check(server)
            told = "ok"
        except Exception as error:  # whatever a library raises
            num_failed += 1
            told = f"FAILED: {type(error).__name__}"
            traceback.print_exc()
        took_s = time.monotonic() - began_s
        print(f"| {library} | {_version(library)} | {what} | {told} | {took_s:.1f} |", flush=True)
    print(f"{num_failed} failed")
    return 1 if num_failed else 0


def _version(library: str) -> str:
    try:
        return version({"pydantic-ai": "pydantic-ai-slim"}.get(library, library))
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
