"""vLLM behind our router, plain and behind Ray Serve LLM, and our own engine.

    python -m bench.engines [--system NAME...] [--rounds 2] [--request-rate 2] [--tiny]

Plain vLLM stands behind round robin; Ray Serve LLM routes by the power of two choices, or by
prefixes. Each has two engines of one thread that do both prefill and decode, with demo-large in
bfloat16. Prompts of 512 tokens begin with one of 8 prefixes of 384, so a router that knows what
each engine caches computes less. `disagg bench` asks in an open loop; the systems take turns in
every round. Goodput is requests/s within 1 s of TTFT and 100 ms of TPOT.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.peers.children import NotRunning
from bench.peers.environments import ROOT, VLLM_VARIABLES, python_of, with_disagg
from bench.peers.limits import FLAGS, MODEL
from bench.peers.servers import VLLM, Running, Server, in_turns, started
from bench.report import finish, print_table
from disagg.app.haproxy import find_haproxy
from disagg.config import ASSETS
from disagg.host import free_port

CHECKPOINT = ASSETS / "demo-large"
NUM_ENGINES = 2
LENGTHS = ("--input-len", "512", "--prefix-len", "384", "--num-prefixes", "8", "--output-len", "64")
GOODPUT = ("--goodput", "ttft:1000", "tpot:100")
FIGURES = ("median_ttft_ms", "p95_ttft_ms", "median_tpot_ms", "request_goodput")

NAMED = f"--served-model-name {MODEL} --host 127.0.0.1 --port PORT"
POOLS = f"--prefill 0 --decode {NUM_ENGINES} --num-threads 1 --no-redis"
OURS = f"-m disagg.cli.main serve CHECKPOINT {NAMED} {FLAGS} {POOLS} --ttft-slo-s none"
READY = ("/ready", f'"num_decode":{NUM_ENGINES}'.encode())
BEHIND_US = {**VLLM_VARIABLES, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
PLAIN = Server(
    "vllm",
    f"{VLLM} {NAMED} {FLAGS} --enable-prompt-tokens-details",
    ("/v1/models", MODEL.encode()),
    VLLM_VARIABLES,
)
RAY = "-m bench.peers.ray_serve_llm CHECKPOINT PORT"
OF_RAY = {**BEHIND_US, "OMP_NUM_THREADS": "1"}
HAPROXY = """
defaults
    mode http
    timeout connect 5s
    timeout client 10m
    timeout server 10m
listen all
    bind 127.0.0.1:{port}
    balance roundrobin
"""


def alone(server: Server, place: Path) -> AbstractContextManager[Running]:
    return started(server, CHECKPOINT, place / "log")


@contextmanager
def round_robin(server: Server, place: Path) -> Iterator[Running]:
    """One server a core, and HAProxy in front of them."""
    with ExitStack() as running:
        port, text = free_port(), HAPROXY
        for core in range(NUM_ENGINES):
            variables = {**server.variables, "VLLM_CPU_OMP_THREADS_BIND": str(core)}
            one = replace(server, variables=variables)
            it = running.enter_context(started(one, CHECKPOINT, place / f"vllm-{core}"))
            text += f"    server s{core} 127.0.0.1:{it.port}\n"
        file = place / "haproxy.cfg"
        file.write_text(text.format(port=port))
        process = subprocess.Popen([find_haproxy(), "-db", "-f", str(file)])
        running.callback(process.wait)
        running.callback(process.terminate)
        yield Running(psutil.Process(process.pid), port)


def asked(port: int, num_prompts: int, rate: float) -> dict[str, Any]:
    """The figures of `disagg bench`. Raises `NotRunning` if it got no answers."""
    load = ("--num-prompts", str(num_prompts), "--request-rate", str(rate))
    words = (*load, *LENGTHS, *GOODPUT, "--url", f"http://127.0.0.1:{port}", "--json")
    command = [sys.executable, "-m", "disagg.cli.main", "bench", *words]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise NotRunning("disagg bench failed, and has said why")
    figures: dict[str, Any] = json.loads(done.stdout)["figures"]
    return figures


def of_ray(router: str = "") -> Server:
    arguments = f"{RAY} {NUM_ENGINES} {router}"
    return Server("vllm", arguments, PLAIN.is_ready, OF_RAY)


SYSTEMS: dict[str, Callable[[Path], AbstractContextManager[Running]]] = {
    "disagg": partial(alone, Server("", OURS, READY)),
    "disagg --engine vllm": partial(
        alone, Server("vllm", f"{OURS} --engine vllm", READY, BEHIND_US)
    ),
    "vllm, round robin": partial(round_robin, PLAIN),
    "ray serve llm": partial(alone, of_ray()),
    "ray serve llm, prefixes": partial(alone, of_ray("PrefixCacheAffinityRouter")),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engines", description=__doc__)
    parser.add_argument("--system", nargs="+", choices=SYSTEMS, default=[*SYSTEMS])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=60)
    parser.add_argument("--request-rate", type=float, default=2.0)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: only ours")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        if arguments.tiny:
            arguments.system, arguments.rounds, arguments.num_prompts = ["disagg"], 1, 10
        else:
            with_disagg(python_of("vllm"))
        systems = {name: partial(SYSTEMS[name], place) for name in arguments.system}

        def measure(system: str, running: Running) -> None:
            figures = asked(running.port, arguments.num_prompts, arguments.request_rate)
            cached = figures["total_cached_tokens"] / figures["total_input_tokens"]
            shown = {key: figures.get(key) for key in FIGURES}
            rows.append({"system": system, **shown, "cached": cached, "failed": figures["failed"]})
            print_table(rows[-1:])

        absent = in_turns(systems, arguments.rounds, measure)
    print_table(rows)
    finish("engines", rows, absent=absent)


if __name__ == "__main__":
    main()
