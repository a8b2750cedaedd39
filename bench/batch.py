"""Tokens/s of the ways to answer many short prompts, in one run: `python -m bench.batch`

`LLM.generate` in this process, `disagg batch` with a model of its own, `disagg batch` against a
server in a process of its own, and that server's `/v1/batches`. All compute the same greedy answers
of demo-small. Each is started, then timed from the first prompt to the last answer, one after
another.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from msgspec.structs import replace

from bench.report import finish, print_table
from disagg import LLM, SamplingParams, local
from disagg.batch.ask import Ask, Patience
from disagg.batch.over_http import asking
from disagg.batch.run import AnswerFiles, run_batch
from disagg.llm.async_llm import num_ahead
from disagg.llm.local_config import local_config

MODEL, MAX_TOKENS = "demo-small", 8
PATH = "/v1/chat/completions"
NUM_AT_ONCE = 256  # as `disagg batch`


def questions(number: int) -> list[list[dict[str, str]]]:
    return [
        [{"role": "user", "content": f"What is {each % 50} + {each % 37}?"}]
        for each in range(number)
    ]


def write_batch(file: Path, number: int) -> None:
    with file.open("w") as lines:
        for each, messages in enumerate(questions(number)):
            body = {"messages": messages, "max_tokens": MAX_TOKENS, "temperature": 0}
            line = {"custom_id": str(each), "method": "POST", "url": PATH, "body": body}
            print(json.dumps(line), file=lines)


def num_tokens_in(output: Path) -> int:
    bodies = (json.loads(line)["response"]["body"] for line in output.read_text().splitlines())
    return sum(body["usage"]["completion_tokens"] for body in bodies)


def by_llm(number: int) -> tuple[float, int]:
    """Seconds and tokens."""
    with LLM(MODEL) as llm:
        began_s = time.perf_counter()
        outputs = llm.chat(questions(number), SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
        took_s = time.perf_counter() - began_s
    return took_s, sum(len(output.outputs[0].token_ids) for output in outputs)


async def _timed(ask: Ask, num_at_once: int, source: Path, output: Path) -> tuple[float, int]:
    began_s = time.perf_counter()
    with closing(AnswerFiles(output, output.with_suffix(".errors"))) as files:
        counts = await run_batch(source, files, Patience(ask), num_at_once)
    assert counts.completed == counts.total, counts
    return time.perf_counter() - began_s, num_tokens_in(output)


async def by_own_model(source: Path, output: Path) -> tuple[float, int]:
    async with local.running(local_config([MODEL], 0, 1, {})) as cluster:
        return await _timed(cluster.post, num_ahead(cluster), source, output)


async def by_server(url: str, source: Path, output: Path) -> tuple[float, int]:
    async with asking(url) as ask:
        return await _timed(ask, NUM_AT_ONCE, source, output)


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
    arguments = parser.parse_args()
    number = 40 if arguments.tiny else arguments.number
    rows = []
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        source = place / "in.jsonl"
        write_batch(source, number)

        def note(way: str, timed: tuple[float, int]) -> None:
            took_s, num_tokens = timed
            rate = {"prompts/s": number / took_s, "tokens/s": num_tokens / took_s}
            rows.append({"way": way, "seconds": took_s, "tokens": num_tokens, **rate})

        note("LLM.chat", by_llm(number))
        note("disagg batch --model", asyncio.run(by_own_model(source, place / "own")))
        with served(place / "files") as url:
            note("disagg batch --url", asyncio.run(by_server(url, source, place / "server")))
            note("/v1/batches", asyncio.run(by_endpoint(url, source, place / "endpoint")))
    print_table(rows)
    finish("batch", rows, number=number)


if __name__ == "__main__":
    main()
