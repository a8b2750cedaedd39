"""One load test, and the search for a rate: a server, and what flags say is asked of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from typing import Any

from tqdm import tqdm

from disagg.errors import Unavailable
from disagg.server_address import address_of
from disagg.tools.bench.endpoint import Endpoint
from disagg.tools.bench.generator import Generator, arrivals
from disagg.tools.bench.prompts import (
    RandomPrompts,
    Session,
    WordCount,
    count_words,
    read_dataset,
    trace_sessions,
)
from disagg.tools.bench.result import BenchResult, finished
from disagg.tools.bench.slo_search import HighestRate, search
from disagg.tools.server import server_of
from disagg.tools.sim.report import percentile
from disagg.tools.sim.trace import TraceRequest, read_trace

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# What describes a load in its result.
LOAD = (
    *("num_prompts", "request_rate", "burstiness", "max_concurrency", "trace", "speed", "seed"),
    *("dataset", *RandomPrompts.__struct_fields__, "num_warmups", "ignore_eos", "extra_body"),
)
REFRESH_S = 0.25
_WARM_UP_SEED = 1 << 40  # no prompt of the run is one of the warm-up


class Bench:
    """A server, and what is asked of it.

    Raises:
        DisaggError: the server does not answer.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._trace: list[TraceRequest] = []
        if args.trace is not None:
            self._trace = read_trace(args.trace)[: args.num_prompts]
        self._num = len(self._trace) or args.num_prompts or 100
        self._dataset: list[Session] = []
        if args.dataset is not None:
            self._dataset = read_dataset(args.dataset, self._num, args.output_len)
        server = server_of(args)
        self._model = args.model or server.first_model()
        self._fields: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if args.ignore_eos else {}),
            **({"prompt": ""} if args.endpoint == COMPLETIONS else {}),
            **args.extra_body,
        }
        self._words = WordCount()
        if not self._dataset:
            self._words = count_words(server, args.endpoint, self._fields, args.seed)
        self._runs = itertools.count()
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with contextlib.suppress(ValueError, OSError):  # a connection for each request in flight
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    def measure(self, rate: float | None) -> BenchResult:
        """One run, also if the user stops it."""
        args = self._args
        result = BenchResult(
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            url=args.url,
            model=self._model,
            endpoint=args.endpoint,
            load=_described(args, rate),
            slos=dict(args.goodput),
        )
        generator: list[Generator] = []
        cpu_s, began_s = time.process_time(), time.perf_counter()
        try:
            asyncio.run(self._run(rate, generator))
        except KeyboardInterrupt:
            result.was_stopped = True
        spent_s = time.process_time() - cpu_s
        result.cpu_percent = 100 * spent_s / (time.perf_counter() - began_s)
        result.requests = sorted(generator[0].timings, key=lambda each: each.due_s)
        return finished(result)

    def search(self) -> HighestRate:
        args = self._args

        def measure(rate: float) -> tuple[int, int]:
            result = self.measure(rate)
            if result.was_stopped:
                raise KeyboardInterrupt
            num = len(result.requests)
            print(f"{rate:.3g}/s: {result.num_in_time} of {num} in time", file=sys.stderr)
            return result.num_in_time, num

        return search(measure, args.request_rate or 1.0, args.slo_share, args.precision)

    def _sessions(self, seed: int) -> Iterable[Session]:
        if self._trace:
            return trace_sessions(self._trace, self._words, seed)
        return self._dataset or self._random(self._num, seed)

    def _random(self, num: int, seed: int) -> Iterator[Session]:
        values = {name: getattr(self._args, name) for name in RandomPrompts.__struct_fields__}
        if self._dataset:  # the warm-up of a server that may be small
            values |= {"input_len": 32, "output_len": 16, "prefix_len": 0}
        return RandomPrompts(**values).sessions(num, self._words, seed)

    async def _run(self, rate: float | None, made: list[Generator]) -> None:
        """`made` gets the generator at once, so that what it has measured outlives Ctrl-C."""
        args, began_s = self._args, time.perf_counter()

        def now() -> float:
            return time.perf_counter() - began_s

        seed = args.seed + next(self._runs)  # a search must not meet its own prompts in the cache
        is_open = rate is not None or bool(self._trace)
        limit = args.max_concurrency or (None if is_open else 8)
        async with AsyncExitStack() as stack:
            endpoint = Endpoint(
                address_of(args.url),
                args.endpoint,
                now=now,
                api_key=args.api_key,
                timeout_s=args.timeout,
            )
            stack.push_async_callback(endpoint.close)
            made.append(Generator(endpoint.ask, self._fields, now, limit))
            warm_up = Generator(endpoint.ask, self._fields, now)
            await warm_up.closed_loop(self._random(args.num_warmups, seed + _WARM_UP_SEED))
            if warm_up.timings and all(each.error for each in warm_up.timings):
                failed = warm_up.timings[0]
                raise Unavailable(
                    f"{args.url} answers no request ({failed.error}): {failed.message}"
                )
            began_s = time.perf_counter()
            watching = asyncio.create_task(_watch(made[0], self._num))
            try:
                await self._send(made[0], rate, seed)
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _send(self, generator: Generator, rate: float | None, seed: int) -> None:
        """All requests of a run, each when it is due."""
        args, sessions = self._args, self._sessions(seed)
        if self._trace:
            schedule = [each.arrival_s / args.speed for each in self._trace]
            await generator.open_loop(schedule, sessions)
        elif rate is not None:
            turns = 1 if self._dataset else args.turns
            schedule = arrivals(rate / turns, args.burstiness, -(-self._num // turns), seed)
            await generator.open_loop(schedule, sessions)
        else:
            await generator.closed_loop(sessions)


async def _watch(generator: Generator, num: int) -> None:
    """Show how far a run is, on a terminal."""
    with tqdm(total=num, unit="request", leave=False, disable=None) as bar:
        while True:
            timings = generator.timings
            answered = sorted(each.ttft_s for each in timings if not each.error)
            bar.n = len(timings)
            bar.set_postfix_str(
                f"{generator.num_in_flight} in flight, {len(timings) - len(answered)} failed,"
                f" TTFT p50 {1e3 * percentile(answered, 0.5):.0f} ms"
            )
            await asyncio.sleep(REFRESH_S)


def _described(args: argparse.Namespace, rate: float | None) -> dict[str, Any]:
    """The flags that make the load."""
    values = {name: getattr(args, name) for name in LOAD} | {"request_rate": rate}
    return {
        name: value if isinstance(value, int | float) else str(value)
        for name, value in values.items()
        if value not in (None, {})
    }
