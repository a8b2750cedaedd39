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

Generate = Callable[[list[list[int]], int], Sequence[Sequence[int]]]


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
            began_s = time.perf_counter()
            outputs = generate(question["prompts"], question["num_new"])
            seconds = time.perf_counter() - began_s
            tokens = [[int(token) for token in output] for output in outputs]
            _reply(replies, {"seconds": seconds, "outputs": tokens})


def _reply(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
