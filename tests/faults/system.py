"""A whole running system as tests see it: its processes, its counters, its workers' own words."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from disagg.cli.embedded_redis import EmbeddedRedis
from disagg.host import free_port
from tests import plain_http
from tests.e2e.command import STAND_IN
from tests.faults.fake_model import BACK_DOORS, write_fake_model

ROOT = Path(__file__).parent.parent.parent
ANSWER_TIMEOUT_S = 30.0  # a busy machine lets a worker wait
STOP_TIMEOUT_S = 120.0
LEFT_TIMEOUT_S = 60.0  # for its processes to end after it
METRICS_TIMEOUT_S = 60.0  # a busy ingress answers late
POLL_S = 0.5  # at most: a look at a whole system takes 0.05 s of a processor
ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class Pool:
    """A tier: its model is the fake one under this name."""

    name: str
    num_prefill: int
    num_decode: int
    engine: tuple[tuple[str, Any], ...] = ()
    step_s: float = 0.01
    token_s: float = 0.0
    settings: tuple[tuple[str, Any], ...] = ()  # of the tier


@dataclass(frozen=True)
class Member:
    """A worker process, found by its back door."""

    back_door: Path

    @property
    def pid(self) -> int:
        return int(self.back_door.name)

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises `OSError` when there is no answer, `AssertionError` when it is an error."""
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(ANSWER_TIMEOUT_S)
            line.connect(str(self.back_door))
            line.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            with line.makefile("rb") as reader:
                said = reader.readline()
        if not said:
            raise ConnectionResetError(f"{self.pid} ended without an answer")
        answer: dict[str, Any] = json.loads(said)
        assert "error" not in answer, f"{self.pid}: {answer['error']}"
        return answer

    def state(self) -> dict[str, Any]:
        return self.ask("state")


class System:
    """Ingress, workers, Redis, Ray: one process tree."""

    def __init__(
        self, process: subprocess.Popen[str], config: dict[str, Any], redis: EmbeddedRedis
    ) -> None:
        self.redis = redis
        self.port: int = config["http"]["port"]
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = psutil.Process(process.pid)
        self._process = process
        self._config = config
        self._url_of: dict[psutil.Process, str] = {}  # of ingresses that have answered

    def members(self, model: str, role: str | None = None) -> list[Member]:
        """The workers of a tier that answer now."""
        return [member for member, state in self._ask_all(model) if role in (None, state["role"])]

    def states(self, model: str) -> list[dict[str, Any]]:
        """What the workers of a tier say of themselves."""
        return [state for _, state in self._ask_all(model)]

    def num_streams(self, model: str, role: str) -> dict[Member, int]:
        """Requests that run or wait on each worker at this moment."""
        found = self._ask_all(model)
        return {member: state["num_streams"] for member, state in found if state["role"] == role}

    def _ask_all(self, model: str) -> list[tuple[Member, dict[str, Any]]]:
        found = []
        for tier in self._config["tiers"]:
            if tier["served_model_name"] == model:
                for path in (Path(tier["model"]) / BACK_DOORS).glob("*"):
                    with suppress(OSError):
                        found.append((Member(path), Member(path).state()))
        return found

    def ingress(self) -> psutil.Process:
        """The only one."""
        (found,) = self.ingresses()
        return found

    def ingresses(self) -> list[psutil.Process]:
        family = self.root.children(recursive=True)
        return [each for each in family if "disagg:Ingress" in _title(each)]

    def ingress_urls(self) -> dict[psutil.Process, str]:
        """Of those that answer, past the proxy, which would choose one of them."""
        found = self.ingresses()
        for process in found:
            with suppress(psutil.Error, httpx.HTTPError):
                for port in _listening(process) if process not in self._url_of else ():
                    url = f"http://127.0.0.1:{port}"
                    plain_http.get(f"{url}/live", timeout=20)
                    self._url_of[process] = url
        return {each: self._url_of[each] for each in found if each in self._url_of}

    def pools(self, url: str = "") -> dict[str, dict[str, int]]:
        """What an ingress says of its pools; empty when it says nothing."""
        with suppress(httpx.HTTPError, KeyError, ValueError):
            answer = plain_http.get(f"{url or self.url}/ready", timeout=5)
            pools: dict[str, dict[str, int]] = answer.json()["pools"]
            return pools
        return {}

    def wait_whole(self, timeout_s: float = 120.0) -> None:
        """Until every worker of the configuration is there, for the ingress too."""
        until(self._is_whole, timeout_s, lambda: f"the fleet is not whole: {self.pools()}")

    def counters(self) -> dict[str, float]:
        """Sums over labels, and over all ingresses, of what they count, by sample name."""
        sums: Counter[str] = Counter()
        for url in self._urls():
            sums.update(self.counters_of(url))
        return dict(sums)

    def counters_of(self, url: str) -> dict[str, float]:
        """Of one ingress, if it is the URL of one."""
        text = plain_http.get(f"{url}/metrics?ingress=own", timeout=METRICS_TIMEOUT_S).text
        sums: defaultdict[str, float] = defaultdict(float)
        for line in text.splitlines():  # a parser of all of the format takes fifty times as long
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            if line.startswith("#") or name.endswith("_created"):
                continue
            sums[name] += float(value)
            if re.search(r'[{,]route="/v1/', sample):
                code = re.search(r'[{,]code="(\w*)"', sample)
                sums[f"v1 {code[1] if code else ''}"] += float(value)
        return dict(sums)

    def deploy_again(self) -> None:
        """A rolling update of everything; returns when Serve calls it done."""
        self._tell("deploy")

    def scale(self, model: str, role: str, num_replicas: int) -> None:
        """Change the size of a pool, for `wait_whole` too."""
        (tier,) = [each for each in self._config["tiers"] if each["served_model_name"] == model]
        tier[role]["num_replicas"] = num_replicas
        self._tell(f"scale {model}-{role} {num_replicas}")

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        self.wait_ready_line()

    def wait_ready_line(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise AssertionError("the cluster process ended; its words are above")

    def _urls(self) -> list[str]:
        is_one = self._config["num_ingress"] == 1
        return [self.url] if is_one else list(self.ingress_urls().values())

    def _is_whole(self) -> bool:
        urls = self._urls()
        pools = [self.pools(url) for url in urls]
        for tier in self._config["tiers"]:
            name = tier["served_model_name"]
            num_members = len(self.members(name))
            for each in pools:
                sizes = {role: each.get(name, {}).get(f"num_{role}", -1) for role in ROLES}
                if any(size not in _sizes(tier[role]) for role, size in sizes.items()):
                    return False
                if sum(sizes.values()) != num_members:
                    return False
        num_ingress: int = self._config["num_ingress"]
        is_complete = len(urls) == len(self.ingresses()) == num_ingress
        return is_complete and (num_ingress == 1 or self._reached(8 * num_ingress) == num_ingress)

    def _reached(self, num_asked: int) -> int:
        """How many ingresses the proxy sends requests to."""
        url = f"{self.url}/metrics?ingress=own"
        answers = (plain_http.get(url, timeout=METRICS_TIMEOUT_S).text for _ in range(num_asked))
        return len({found[1] for text in answers if (found := re.search(r'ingress="(\w+)"', text))})


def until(
    condition: Callable[[], bool], timeout_s: float, words: Callable[[], str] = lambda: "too late"
) -> float:
    """Wait for something. Returns the seconds that it took; raises `AssertionError` after many."""
    began_s, pause_s = time.monotonic(), 0.05
    while not condition():
        assert time.monotonic() < began_s + timeout_s, words()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, POLL_S)
    return time.monotonic() - began_s


async def busiest(system: System, model: str, role: str) -> Member:
    """A worker that has streams right now: whoever hits an idle one proves nothing."""
    while True:
        num_streams = await asyncio.to_thread(system.num_streams, model, role)
        found = max(num_streams, key=lambda member: num_streams[member], default=None)
        if found is not None and num_streams[found]:
            return found
        await asyncio.sleep(0.05)


@contextmanager
def running_system(*pools: Pool, num_ingress: int = 1) -> Iterator[System]:
    """Start everything, wait until the fleet is whole, stop it; nothing may be left."""
    with tempfile.TemporaryDirectory(prefix="faults-", dir="/tmp") as name:
        directory = Path(name)
        with EmbeddedRedis(directory / "redis") as redis:
            config = _config(pools, directory, redis.url, num_ingress)
            file = directory / "config.json"
            file.write_text(json.dumps(config))
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.cluster_process", str(file)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{STAND_IN}:{ROOT}", "OMP_NUM_THREADS": "1"},
            )
            with _ended(process):
                system = System(process, config, redis)
                system.wait_ready_line()
                system.wait_whole()
                yield system


def _config(
    pools: tuple[Pool, ...], directory: Path, redis_url: str, num_ingress: int
) -> dict[str, Any]:
    tiers = [
        {
            "model": str(
                write_fake_model(directory / pool.name, step_s=pool.step_s, token_s=pool.token_s)
            ),
            "served_model_name": pool.name,
            "prefill": {"num_replicas": pool.num_prefill},
            "decode": {"num_replicas": pool.num_decode},
            "engine": dict(pool.engine),
            **dict(pool.settings),
        }
        for pool in pools
    ]
    return {
        "tiers": tiers,
        "http": {"port": free_port()},
        "num_ingress": num_ingress,
        "redis_url": redis_url,
        "cluster_key": "tests",
        "link_host": "127.0.0.1",
        "drain_s": 5.0,
    }


@contextmanager
def _ended(process: subprocess.Popen[str]) -> Iterator[None]:
    assert process.stdin is not None and process.stdout is not None
    family: list[psutil.Process] = []
    try:
        yield
    finally:
        with suppress(psutil.Error):
            family = psutil.Process(process.pid).children(recursive=True)
        process.stdin.close()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.stdout.close()
            _, left = psutil.wait_procs(family, timeout=LEFT_TIMEOUT_S)
            for each in left:
                each.kill()
    assert not left, f"still running afterwards: {[_title(each) for each in left]}"


def _sizes(pool: dict[str, Any]) -> range:
    """How many workers that serve a pool may have: an autoscaled one has a choice."""
    number = pool["num_replicas"]
    limits = pool.get("autoscaling", {"min_replicas": number, "max_replicas": number})
    return range(limits["min_replicas"], limits["max_replicas"] + 1)


def _listening(process: psutil.Process) -> list[int]:
    """Ports of IPv4, where Serve listens; Ray's own take any address."""
    found = process.net_connections("tcp4")
    return [each.laddr.port for each in found if each.status == psutil.CONN_LISTEN]


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
