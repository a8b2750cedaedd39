"""What tests of the server ask it about itself."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests import plain_http
from tests.e2e.command import Command, until

ADAPTERS = ("red", "green", "blue")
UNLUCKY_SEED = 666
WINDOW = 48  # of a layer of "tiny", in tokens


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


def until_one_can_die(server: Command, model: str) -> None:
    """Waits until two of its workers serve: one may still be starting in place of a dead one."""

    def serving() -> list[str]:
        workers = plain_http.get(f"{server.url}/debug/fleet").json()["workers"]
        of_model = [each for each in workers if each["model"] == model]
        return [each["worker_id"] for each in of_model if each["state"] == "serving"]

    until(lambda: len(serving()) > 1, why=lambda: f"serving: {serving()}")
