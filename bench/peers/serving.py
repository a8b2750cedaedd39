"""Measures `disagg serve` over HTTP beside `vllm serve` and Ray Serve LLM with vLLM, on CPUs.

    python -m bench.peers.serving [--shape 15m 160m] [--server NAME...] [--rounds 2] [--tiny]
    python -m bench.peers.serving --server "disagg auto" --before COMMIT

Requests are streaming completions with 128 tokens in and 128 out, N at once. The next wave begins
when the last request of a wave has ended. Checkpoints are Llama shapes with random weights in bf16;
decoding is greedy. `disagg auto` computes in the format that the machine multiplies well, the
others in bf16. Servers take turns in every round, and share the machine's two cores with the client
only. A server that took 30 s in waves of one kind gets no more of them. tokens/s is the median of
all waves. TTFT and TPOT are medians of all requests. `RSS MB` is that of all processes of a server,
after its first waves. With `--before`, an older commit of this repository takes turns, too, as
`disagg auto`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.peers.checkpoint import kept
from bench.peers.environments import VLLM_VARIABLES
from bench.peers.limits import AUTO_FLAGS, FLAGS, MODEL
from bench.peers.servers import VLLM, Running, Server, in_turns, started
from bench.peers.streams import complete
from bench.report import ENOUGH_S, finish, print_table
from bench.shapes import SHAPES
from bench.trees import checked_out
from disagg.tools.bench.endpoint import RequestTiming

OURS, OURS_AUTO = "disagg", "disagg auto"
NAMED = f"--served-model-name {MODEL} --host 127.0.0.1 --port PORT"


def ours(flags: str) -> Server:
    pools = "--prefill 0 --decode 1 --num-threads 2 --no-redis"
    command = f"-m disagg.cli.main serve CHECKPOINT {NAMED} {flags} {pools}"
    return Server("", command, ("/ready", b'"num_decode":1'))


SERVERS = {
    OURS: ours(FLAGS),
    OURS_AUTO: ours(AUTO_FLAGS),
    "vllm": Server(
        "vllm",
        f"{VLLM} {NAMED} {FLAGS}",
        ("/v1/models", MODEL.encode()),
        VLLM_VARIABLES,
    ),
    "ray serve llm": Server(
        "vllm",
        "-m bench.peers.ray_serve_llm CHECKPOINT PORT",
        ("/v1/models", MODEL.encode()),
        VLLM_VARIABLES,
    ),
}
NUM_UNCOUNTED = 8  # tokens of each answer in the wave that does not count

Row = dict[str, Any]
Key = tuple[str, int]  # server, requests at once


@dataclass(frozen=True)
class Waves:
    """What is asked of each server in a round: `waves` of each of `at_once` requests.

    Args:
        num_tokens: of a prompt, and of an answer.
    """

    at_once: tuple[int, ...] = (1, 8, 32)
    waves: int = 3
    num_tokens: int = 128


class Figures:
    """All that was measured of a shape."""

    def __init__(self) -> None:
        self.rates: dict[Key, list[float]] = {}
        self.took_s: dict[Key, float] = {}
        self.streams: dict[Key, list[RequestTiming]] = {}
        self.resident_mb: dict[str, float] = {}

    def add(self, key: Key, wave: list[RequestTiming]) -> None:
        num_tokens = sum(stream.num_output_tokens for stream in wave)
        seconds = max(stream.event_s[-1] for stream in wave) - wave[0].due_s
        self.rates.setdefault(key, []).append(num_tokens / seconds)
        self.took_s[key] = self.took_s.get(key, 0.0) + seconds
        self.streams.setdefault(key, []).extend(wave)

    def row(self, shape: str, key: Key) -> Row:
        """All waves of a case so far."""
        name, at_once = key
        streams = self.streams[key]
        return {
            "shape": shape,
            "at once": at_once,
            "server": name,
            "waves": len(self.rates[key]),
            "tokens/s": statistics.median(self.rates[key]),
            "TTFT p50 ms": 1e3 * statistics.median(each.ttft_s for each in streams),
            "TPOT p50 ms": 1e3 * statistics.median(each.tpot_s for each in streams),
            "RSS MB": self.resident_mb.get(name),
        }

    def rows(self, shape: str) -> list[Row]:
        return [self.row(shape, key) for key in sorted(self.streams, key=lambda key: key[1])]


async def ask_all(running: Running, name: str, shape: str, asked: Waves, figures: Figures) -> None:
    """All waves to one server, while they add up to `ENOUGH_S`; the first does not count. Prints
    each case when it is measured, as other rounds and servers may take an hour."""
    rng = random.Random(0)
    vocab = SHAPES[shape][0]
    for at_once in asked.at_once:
        key = name, at_once
        if figures.took_s.get(key, 0.0) >= ENOUGH_S:
            continue
        for number, num_new in enumerate((NUM_UNCOUNTED, *[asked.num_tokens] * asked.waves)):
            if figures.took_s.get(key, 0.0) >= ENOUGH_S:
                break
            prompts = [
                [rng.randrange(1, vocab) for _ in range(asked.num_tokens)] for _ in range(at_once)
            ]
            wave = await asyncio.gather(
                *(complete(running.port, prompt, num_new) for prompt in prompts)
            )
            if number:
                figures.add(key, wave)
        figures.resident_mb[name] = running.resident_mb()
        print_table([figures.row(shape, key)])


def measure(
    shape: str, servers: Mapping[str, Server], rounds: int, asked: Waves
) -> tuple[list[Row], dict[str, str]]:
    """A row for each server and number of requests; and who is absent, and why."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, log = kept(shape), Path(directory) / "log"
        systems = {
            name: partial(started, server, checkpoint, log) for name, server in servers.items()
        }

        def ask(name: str, running: Running) -> None:
            asyncio.run(ask_all(running, name, shape, asked, figures))

        absent = in_turns(systems, rounds, ask)
        if OURS in absent:
            raise SystemExit(f"{OURS}: {absent[OURS]}")
    return figures.rows(shape), absent


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers.serving", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["15m", "160m"])
    parser.add_argument("--server", nargs="+", choices=SERVERS, default=[*SERVERS])
    parser.add_argument("--at-once", nargs="+", type=int, default=Waves.at_once)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--waves", type=int, default=Waves.waves, help="in a round")
    parser.add_argument("--before", metavar="COMMIT", help="takes turns with the others")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: only ours")
    arguments = parser.parse_args()
    shapes, names, rounds = arguments.shape, arguments.server, arguments.rounds
    asked = Waves(tuple(arguments.at_once), arguments.waves)
    if arguments.tiny:
        shapes, names, rounds, asked = ["tiny"], [OURS], 1, Waves(waves=1, num_tokens=16)
    rows: list[Row] = []
    absent: dict[str, str] = {}
    with ExitStack() as files:
        servers = {name: SERVERS[name] for name in names}
        if arguments.before:
            root = files.enter_context(checked_out(arguments.before))
            variables = {"PYTHONPATH": str(root)}
            servers["before"] = replace(SERVERS[OURS_AUTO], variables=variables, root=root)
        for shape in shapes:
            of_shape, absent_of_shape = measure(shape, servers, rounds, asked)
            rows += of_shape
            absent |= absent_of_shape
    print_table(rows)
    finish("peers.serving", rows, absent=absent, rounds=rounds, waves=asked.waves)


if __name__ == "__main__":
    main()
