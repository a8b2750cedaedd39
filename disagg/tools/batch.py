"""Answer all requests of a file, by a server or by a model in this process.

The file has OpenAI's batch format: a line for each request to /v1/chat/completions, /v1/completions
or /v1/responses. Answers are appended to the output as they come. After an interruption the same
command goes on; what failed is tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from time import monotonic

from tqdm import tqdm

from disagg.batch.ask import Patience
from disagg.batch.over_http import asking
from disagg.batch.run import AnswerFiles, Counts, run_batch
from disagg.cli.engine_arguments import (
    add_model_arguments,
    add_setting,
    engine_settings,
    number,
)
from disagg.config import EngineConfig
from disagg.errors import StartupError, Unauthorized, Unavailable
from disagg.llm.own_fleet import answering
from disagg.tools.server import add_api_key

NUM_AT_ONCE = 256  # requests to a server: it has places for more, or makes some wait
SAY_S, DRAW_S = 10.0, 0.2  # seconds between lines of progress, and between its pictures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", help="file with a request in each line (JSON)")
    parser.add_argument(
        "--output", "-o", required=True, metavar="FILE", help="file to which answers are appended"
    )
    parser.add_argument(
        "--errors",
        metavar="FILE",
        help="file for requests that failed, written anew (default: OUTPUT with .errors.jsonl)",
    )
    server = parser.add_argument_group("by a server (batch work waits behind its other requests)")
    server.add_argument("--url", help="URL of a server with OpenAI's API")
    add_api_key(server)
    server.add_argument(
        "--concurrency",
        type=number,
        default=NUM_AT_ONCE,
        help=f"number of requests that are sent at a time (default: {NUM_AT_ONCE})",
    )
    own = parser.add_argument_group("by models in this process")
    own.add_argument("--model", nargs="+", help="models, as `disagg serve` takes them")
    add_model_arguments(own)
    for name in ("tensor_parallel_size", "max_num_seqs", "max_num_batched_tokens", "num_threads"):
        add_setting(own, EngineConfig, name)


def run(arguments: argparse.Namespace) -> int:
    """Returns 1 if a request failed. Raises `DisaggError` if the batch could not run or go on."""
    if (arguments.url is None) == (arguments.model is None):
        raise StartupError(
            "Give either the URL of a server (--url) or models for this process (--model).",
            param="url",
        )
    source, output = Path(arguments.input), Path(arguments.output)
    errors = Path(arguments.errors or output.with_suffix(".errors.jsonl"))
    if len({path.resolve() for path in (source, output, errors)}) < 3:
        raise StartupError("Input, output and errors must be different files.", param="output")
    counts = Counts()
    try:
        if not source.is_file():
            raise StartupError(f"There is no file {source}.")
        asyncio.run(_run(arguments, source, (output, errors), counts))
    except OSError as error:
        raise StartupError(f"The batch stopped: {error}.") from error
    except KeyboardInterrupt:
        print(f"\nInterrupted. {_so_far(counts)}", file=sys.stderr)
        return 130
    except Unavailable as error:
        raise Unavailable(f"{error.message} {_so_far(counts)}") from error
    kept = f", {counts.num_kept:,} of them by an earlier run" if counts.num_kept else ""
    failed = f"; {counts.failed:,} failed: see {errors}" if counts.failed else ""
    print(f"{counts.completed:,} of {counts.total:,} requests are answered{kept}{failed}.")
    return int(counts.failed > 0)


def _so_far(counts: Counts) -> str:
    answered = f"{counts.completed:,} of {counts.total or '?'}"
    return f"{answered} requests are answered; the same command goes on."


async def _run(
    arguments: argparse.Namespace, source: Path, into: tuple[Path, Path], counts: Counts
) -> None:
    async with _answering(arguments) as (ask, num_at_once):
        showing = asyncio.create_task(_show(counts, ask))
        try:
            with closing(AnswerFiles(*into)) as files:
                await run_batch(source, files, ask, num_at_once, counts=counts)
        finally:
            showing.cancel()
            await asyncio.gather(showing, return_exceptions=True)


@asynccontextmanager
async def _answering(arguments: argparse.Namespace) -> AsyncIterator[tuple[Patience, int]]:
    """Who answers, and how many requests it gets at a time."""
    if arguments.url is None:
        async with answering(arguments.model, engine_settings(arguments)) as own:
            yield own
        return
    async with asking(arguments.url, arguments.api_key) as ask:
        reply = await ask.once("/tokenize", b"{}")  # raises Unavailable if there is no server
        if reply.status in (401, 403):
            raise Unauthorized(f"{arguments.url} does not accept the API key.", param="api_key")
        yield ask, arguments.concurrency


async def _show(counts: Counts, patience: Patience) -> None:
    """Progress, rate and time left: a bar on a terminal, elsewhere a line now and then."""
    began_s = said_s = monotonic()
    with tqdm(unit="request", disable=None) as bar:

        def draw() -> str:
            bar.total, bar.initial, bar.n = counts.total, counts.num_kept, counts.done
            notes = (
                f"{counts.failed} failed" if counts.failed else "",
                f"{patience.num_waiting} wait for the server" if patience.num_waiting else "",
            )
            more = ", ".join(filter(None, notes))
            bar.set_postfix_str(more)
            return more

        try:
            while True:
                await asyncio.sleep(DRAW_S)
                more = draw()
                if bar.disable and monotonic() - said_s >= SAY_S and counts.done:
                    said_s = monotonic()
                    _say(counts, said_s - began_s, more)
        finally:
            draw()


def _say(counts: Counts, took_s: float, more: str) -> None:
    rate = max(counts.done - counts.num_kept, 1) / took_s
    left_s = (counts.total - counts.done) / rate
    print(
        f"{counts.done:,} of {counts.total:,} requests, {rate:.1f}/s, {left_s:.0f} s left"
        + (f" ({more})" if more else ""),
        file=sys.stderr,
        flush=True,
    )
