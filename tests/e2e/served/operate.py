"""What tests of the server ask it about itself."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests import plain_http
from tests.e2e.command import Command, until

ADAPTERS = ("red", "green", "blue")
UNLUCKY_SEED = 666


def num_pulls(server: Command, outcome: str) -> float:
    text = plain_http.get(f"{server.url}/metrics").text
    found = re.findall(r"^disagg_worker_kv_pulls_total\{(.*)\} ([\d.e+]+)$", text, re.M)
    return sum(float(number) for labels, number in found if f'outcome="{outcome}"' in labels)


def until_pulled(server: Command, ask: Callable[[], object]) -> None:
    """Asks until KV was pulled: a worker that measured slow first steps gets no prompt yet."""
    before = num_pulls(server, "ok")

    def pulled() -> bool:
        ask()
        return num_pulls(server, "ok") > before

    until(pulled, why=lambda: "nothing was pulled")
