"""Turns the pieces of an answer into server-sent events and writes them to the connection."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from disagg.api.apis import Frames
from disagg.api.http.reply import Writer
from disagg.api.http.request_timer import RequestTimer
from disagg.api.running_job import ChoiceDelta, RunningJob
from disagg.config import AUTO
from disagg.token_fast_path import Taken


async def stream_events(
    run: RunningJob,
    frames: Frames,
    timer: RequestTimer,
    begins: Callable[[], None],
    writer: Writer,
) -> AsyncGenerator[bytes, None]:
    """Yield the events of an answer, those of one batch as one bytes object.

    Once the reply has begun, a piece that arrives alone is not yielded but written to the
    connection at once (`token_fast_path.py`).

    Args:
        begins: called before the first event.
    """

    def write(piece: ChoiceDelta) -> Taken:
        timer.gained(piece.num_tokens)
        events = frames.piece(piece)
        return writer.write_now(events) if events else True

    has_begun, is_named = False, run.job.model.name != AUTO
    try:
        async with aclosing(run.batches()) as batches:
            with timer:
                async for batch in batches:
                    timer.observe(batch)
                    if not is_named:
                        is_named = frames.name_models(run)
                    opening = b""
                    if not has_begun:
                        has_begun = True
                        begins()
                        opening = frames.opening()
                    events = opening + b"".join(map(frames.piece, batch))
                    if events:
                        yield events
                        run.on_piece = write
    finally:
        run.on_piece = None  # breaks the reference cycle of callback and run
    yield frames.closing(run)
