"""The protocol between a contender and its process: JSON, one line for each line.

It runs inside every peer's environment, so it imports only the standard library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], Sequence[Sequence[int]]]


def answer(load: Callable[[], Generate]) -> None:
    """Load an engine, then generate what standard input asks for until it ends.

    Args:
        load: gives a function of prompts (token ids) and a number of tokens for each, which
            returns the new tokens of each, chosen greedily, ends of sequence ignored.
    """
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)  # libraries print to standard output
        generate = load()
        _reply(replies, {"ready": True})
        for line in sys.stdin:
            question = json.loads(line)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            outputs = generate(question["prompts"], question["num_new"])
            times = {
                "seconds": time.perf_counter() - began_s,
                "cpu_s": time.process_time() - began_cpu_s,
            }
            tokens = [[int(token) for token in output] for output in outputs]
            _reply(replies, {**times, "outputs": tokens})


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
