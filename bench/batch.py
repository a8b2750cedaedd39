"""Tokens/s of the ways to answer many short prompts, in one run: `python -m bench.batch`

`LLM.chat` in this process, `disagg batch` with a model of its own, `disagg batch` against a server
in a process of its own, that server's `/v1/batches`, and a whole job of Ray Data; with --peers
Ray's `ray.data.llm` too, with vLLM in its own environment. All compute the same greedy answers of
demo-small. Each is started, then timed from the first prompt to the last answer, one after another;
of a job of Ray Data the time of one with a batch of rows is taken off, which is that of its start.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from msgspec.structs import replace

from bench.peers.environments import ROOT, VLLM_VARIABLES, python_of
from bench.ray_data import PARAMS, messages_of
from bench.report import finish, print_table
from disagg import LLM, SamplingParams, local
from disagg.batch.ask import Patience
from disagg.batch.over_http import asking
from disagg.batch.run import AnswerFiles, run_batch
from disagg.config import ASSETS
from disagg.llm.own_fleet import answering, local_config

MODEL = "demo-small"
PATH = "/v1/chat/completions"
NUM_AT_ONCE = 256  # as `disagg batch`
FEW = 64  # rows of a job of Ray Data that does little but begin


def write_batch(file: Path, number: int) -> None:
    with file.open("w") as lines:
        for each in range(number):
            body = {"messages": messages_of(each), **PARAMS}
            line = {"custom_id": str(each), "method": "POST", "url": PATH, "body": body}
            print(json.dumps(line), file=lines)


def num_tokens_in(output: Path) -> int:
    bodies = (json.loads(line)["response"]["body"] for line in output.read_text().splitlines())
    return sum(body["usage"]["completion_tokens"] for body in bodies)


def by_llm(number: int) -> tuple[float, int]:
    """Seconds and tokens."""
    with LLM(MODEL) as llm:
        began_s = time.perf_counter()
        outputs = llm.chat(list(map(messages_of, range(number))), SamplingParams(**PARAMS))
        took_s = time.perf_counter() - began_s
    return took_s, sum(len(output.outputs[0].token_ids) for output in outputs)


async def _timed(
    answering: AbstractAsyncContextManager[tuple[Patience, int]], source: Path, output: Path
) -> tuple[float, int]:
    async with answering as (ask, num_at_once):
        began_s = time.perf_counter()
        with closing(AnswerFiles(output, output.with_suffix(".errors"))) as files:
            counts = await run_batch(source, files, ask, num_at_once)
        assert counts.completed == counts.total, counts
        return time.perf_counter() - began_s, num_tokens_in(output)


@contextlib.asynccontextmanager
async def by_server(url: str) -> AsyncIterator[tuple[Patience, int]]:
    async with asking(url) as ask:
        yield ask, NUM_AT_ONCE


def by_ray_data(engine: str, python: str, model: str, number: int) -> tuple[float, int]:
    """Without its start, if there are more rows than `FEW`."""
    variables = VLLM_VARIABLES if engine == "vllm" else {}

    def job(num: int) -> tuple[float, int]:
        words = [python, "-m", "bench.ray_data", engine, model, str(num)]
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **variables}, stdout=subprocess.PIPE, check=True
        )
        # Ray prints there, too, and also later.
        (said,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith(b"{"))
        return said["took_s"], said["num_tokens"]

    start_s, few_tokens = job(min(number, FEW))
    if number <= FEW:
        return start_s, few_tokens
    took_s, num_tokens = job(number)
    return took_s - start_s, num_tokens - few_tokens


async def by_endpoint(url: str, source: Path, output: Path) -> tuple[float, int]:
    """Until its status says so, which is looked at ten times a second."""
    async with aiohttp.ClientSession(base_url=url, raise_for_status=True) as session:

        async def got(path: str, **body: Any) -> Any:
            method = "POST" if body else "GET"
            async with session.request(method, path, **body) as reply:
                return await reply.json()

        began_s = time.perf_counter()
        form = aiohttp.FormData({"purpose": "batch"})
        content = await asyncio.to_thread(source.read_bytes)
        form.add_field("file", content, filename="in.jsonl")
        file = await got("/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": PATH, "completion_window": "24h"}
        batch = await got("/v1/batches", json=wanted)
        while batch["status"] != "completed":
            await asyncio.sleep(0.1)
            batch = await got(f"/v1/batches/{batch['id']}")
        took_s = time.perf_counter() - began_s
        async with session.get(f"/v1/files/{batch['output_file_id']}/content") as reply:
            await asyncio.to_thread(output.write_bytes, await reply.read())
    return took_s, num_tokens_in(output)


async def _serve(directory: str, ready: Connection) -> None:
    config = local_config([MODEL], 0, 1, {})
    config = replace(config, http=replace(config.http, files_directory=directory))
    async with local.running(config) as cluster:
        server = uvicorn.Server(uvicorn.Config(cluster.ingress.app, port=0, log_level="error"))
        serving = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        ready.send(server.servers[0].sockets[0].getsockname()[1])
        await serving


def _run_server(directory: str, ready: Connection) -> None:
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(directory, ready))


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """The URL of an ingress and a worker in a process of their own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_run_server, args=(str(directory), there))
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.terminate()
        process.join()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.batch", description=__doc__)
    parser.add_argument("--number", type=int, default=10_000, help="prompts of each way")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    parser.add_argument("--peers", action="store_true", help="also ray.data.llm, with vLLM")
    arguments = parser.parse_args()
    number = 40 if arguments.tiny else arguments.number
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = place / "in.jsonl"
        write_batch(source, number)

        def note(way: str, timed: tuple[float, int]) -> None:
            took_s, num_tokens = timed
            row = {"way": way, "seconds": took_s, "tokens": num_tokens}
            rows.append({**row, "tokens/s": num_tokens / took_s})
            print(rows[-1], file=sys.stderr, flush=True)

        note("LLM.chat", by_llm(number))
        note(
            "disagg batch --model",
            asyncio.run(_timed(answering([MODEL], {}), source, place / "own")),
        )
        with served(place / "files") as url:
            note(
                "disagg batch --url", asyncio.run(_timed(by_server(url), source, place / "server"))
            )
            note("/v1/batches", asyncio.run(by_endpoint(url, source, place / "endpoint")))
        note("disagg.data", by_ray_data("disagg", sys.executable, MODEL, number))
        if arguments.peers:
            vllm = str(python_of("vllm"))
            note("ray.data.llm", by_ray_data("vllm", vllm, str(ASSETS / MODEL), number))
    print_table(rows)
    finish("batch", rows, number=number)


if __name__ == "__main__":
    main()
