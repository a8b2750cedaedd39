"""Two load tests of a fleet in this process, one with a shared prefix, and a report of both."""

import asyncio
import socket
import sys

import uvicorn

from disagg import local
from disagg.config_checks import parse_config

CONFIG = {"tiers": [{"model": "demo-small"}], "transport": "local", "cluster_key": "of an example"}
LOAD = ["--num-prompts", "20", "--max-concurrency", "4", "--input-len", "300", "--output-len", "16"]


async def disagg(*words: str) -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "disagg.cli.main", *words)
    assert await process.wait() == 0


async def main() -> None:
    async with local.running(parse_config(CONFIG)) as cluster:
        port = socket.create_server(("127.0.0.1", 0))  # connections wait until it is served
        server = uvicorn.Server(uvicorn.Config(cluster.ingress.app, log_level="error"))
        serving = asyncio.create_task(server.serve([port]))
        url = f"http://127.0.0.1:{port.getsockname()[1]}"
        await disagg("bench", "--url", url, *LOAD, "--output", "plain.json")
        shared = ["--prefix-len", "200", "--output", "prefix.json"]
        await disagg("bench", "--url", url, *LOAD, *shared)
        server.should_exit = True
        await serving
    await disagg("bench", "compare", "plain.json", "prefix.json", "--html", "report.html")


asyncio.run(main())
