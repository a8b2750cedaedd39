"""Measures the time to the first and second token of one prefill and one decode worker.

    python -m bench.peers.pair [--shape 15m 160m] [--system NAME...] [--rounds 2] [--tiny]

Each worker has one core. Prompts of 512 and 1,024 tokens are sent one at a time, each a new one.

- `disagg`: our prefill and decode worker.
- `alone`: one worker of ours that does both; like `disagg` it computes in bf16, and with `auto` in
  the format that the machine multiplies well.
- `vllm`: two vLLM engines on CPUs with its NixlConnector. The client does what vLLM's own proxy
  does: it asks one engine for a single token, then the other one with the KV parameters of the
  first answer. The first token is the first that the second engine streams.

Figures are milliseconds from asking, medians. Systems take turns in every round, each for at most
30 s a length. `moved` is the share of our requests that went to the prefill worker first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers.checkpoint import WORD, kept
from bench.peers.environments import VLLM_VARIABLES
from bench.peers.limits import AUTO_FLAGS, FLAGS, MODEL
from bench.peers.servers import VLLM, Server, in_turns, started
from bench.peers.streams import complete
from bench.report import ENOUGH_S, finish, print_table
from bench.shapes import SHAPES
from disagg.host import free_port
from disagg.tools.bench.endpoint import RequestTiming
from disagg.worker.vllm.tickets import ASK

NUM_UNCOUNTED = 2  # prompts of a length
NUM_NEW = 8
NAMED = f"--served-model-name {MODEL} --host 127.0.0.1 --port PORT"
OURS = f"-m disagg.cli.main serve CHECKPOINT {NAMED} --num-threads 1 --no-redis"
CONNECTOR = '{"kv_connector":"NixlConnector","kv_role":"kv_both"}'

Row = dict[str, Any]


class Asked(NamedTuple):
    """One answer. `was_moved`: to another worker after its first token, as far as it is known."""

    timing: RequestTiming
    was_moved: bool = False


Ask = Callable[[list[int]], Awaitable[Asked]]


@contextmanager
def ours(checkpoint: Path, scratch: Path, num_prefill: int, flags: str = FLAGS) -> Iterator[Ask]:
    pools = f"--prefill {num_prefill} --decode 1"
    ready = f'"num_prefill":{num_prefill},"num_decode":1'.encode()
    server = Server("", f"{OURS} {flags} {pools}", ("/ready", ready))
    with started(server, checkpoint, scratch / "log") as running:

        async def ask(prompt: list[int]) -> Asked:
            timing = await complete(running.port, prompt, NUM_NEW)
            return Asked(timing, num_prefill > 0 and was_moved(running.port, timing.id))

        yield ask


def was_moved(port: int, request_id: str) -> bool:
    """Whether the prefill worker was asked first, as the ingress says."""
    url = f"http://127.0.0.1:{port}/debug/requests/{request_id}"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return json.load(answer)["routes"][0]["route"]["prefill"] is not None


@contextmanager
def vllm(checkpoint: Path, scratch: Path) -> Iterator[Ask]:
    with ExitStack() as stack:
        ports = []
        for core in (0, 1):
            server = Server(
                "vllm",
                f"{VLLM} {NAMED} {FLAGS} --kv-transfer-config {CONNECTOR}",
                ("/v1/models", MODEL.encode()),
                {
                    **VLLM_VARIABLES,
                    "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                },
            )
            log = scratch / f"log-{core}"
            ports.append(stack.enter_context(started(server, checkpoint, log)).port)

        async def ask(prompt: list[int]) -> Asked:
            began_s = time.perf_counter()
            ticket = _prefilled(ports[0], prompt)
            timing = await complete(ports[1], prompt, NUM_NEW, {"kv_transfer_params": ticket})
            timing.due_s = began_s
            return Asked(timing)

        yield ask


def _prefilled(port: int, prompt: list[int]) -> dict[str, Any]:
    """What the prefill engine says of the KV that it keeps for another one."""
    body = {
        "model": MODEL,
        "prompt": " ".join(f"{WORD}{token}" for token in prompt),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": ASK,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        ticket: dict[str, Any] = json.load(answer)["kv_transfer_params"]
        return ticket


SYSTEMS: dict[str, Callable[[Path, Path], AbstractContextManager[Ask]]] = {
    "disagg": partial(ours, num_prefill=1),
    "alone": partial(ours, num_prefill=0),
    "disagg auto": partial(ours, num_prefill=1, flags=AUTO_FLAGS),
    "alone auto": partial(ours, num_prefill=0, flags=AUTO_FLAGS),
    "vllm": vllm,
}


async def ask_all(ask: Ask, vocab: int, num_in: int, num_prompts: int) -> list[Asked]:
    """Streams of up to `num_prompts`; those that add up to `ENOUGH_S` are enough."""
    rng = random.Random(num_in)
    counted: list[Asked] = []
    for number in range(NUM_UNCOUNTED + num_prompts):
        stream = await ask([rng.randrange(1, vocab) for _ in range(num_in)])
        if number >= NUM_UNCOUNTED:
            counted.append(stream)
        if sum(each.timing.e2el_s for each in counted) >= ENOUGH_S:
            break
    return counted


def measure(
    shape: str, names: list[str], rounds: int, num_prompts: int, scale: int
) -> tuple[list[Row], dict[str, str]]:
    """A row for each system and length; and who is absent, and why."""
    found: dict[tuple[int, str], list[Asked]] = {}
    with tempfile.TemporaryDirectory() as directory:
        scratch, checkpoint = Path(directory), kept(shape)
        systems = {name: partial(SYSTEMS[name], checkpoint, scratch) for name in names}

        def ask_each(name: str, ask: Ask) -> None:
            for num_in in (512 // scale, 1024 // scale):
                streams = asyncio.run(ask_all(ask, SHAPES[shape][0], num_in, num_prompts))
                found.setdefault((num_in, name), []).extend(streams)
                # Each when it is measured: other systems and rounds take minutes.
                print_table([_row(shape, num_in, name, found[num_in, name])])

        absent = in_turns(systems, rounds, ask_each)
        for name in absent.keys() - {"vllm"}:
            raise SystemExit(f"{name}: {absent[name]}")
    rows = [_row(shape, num_in, name, found[num_in, name]) for num_in, name in sorted(found)]
    return rows, absent


def _row(shape: str, num_in: int, name: str, streams: list[Asked]) -> Row:
    return {
        "shape": shape,
        "prompt": num_in,
        "system": name,
        "first token ms": 1e3 * statistics.median(each.timing.ttft_s for each in streams),
        "second token ms": 1e3
        * statistics.median(each.timing.event_s[1] - each.timing.due_s for each in streams),
        "moved": statistics.mean(each.was_moved for each in streams),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.pair", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["15m", "160m"])
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=12, help="of each length in a round")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: only ours")
    arguments = parser.parse_args()
    shapes, names, scale = arguments.shape, arguments.system, 1
    rounds, prompts = arguments.rounds, arguments.prompts
    if arguments.tiny:
        shapes, names, rounds, prompts, scale = ["tiny"], ["disagg", "alone"], 1, 2, 4
    rows: list[Row] = []
    absent: dict[str, str] = {}
    for shape in shapes:
        of_shape, absent_of_shape = measure(shape, names, rounds, prompts, scale)
        rows += of_shape
        absent |= absent_of_shape
    print_table(rows)
    finish("peers.pair", rows, absent=absent, rounds=rounds, prompts=prompts)


if __name__ == "__main__":
    main()
