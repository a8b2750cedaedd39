"""The deltas of one stream of a link, buffered until their reader takes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from disagg.errors import DeadlineExceeded
from disagg.messages import TokenDelta
from disagg.token_fast_path import TokenCallback


class DeltaStream:
    """The deltas of one stream, merged while the reader is busy.

    Args:
        on_token: is given deltas while the reader waits.
    """

    __slots__ = ("_error", "_loop", "_on_token", "_rest", "_waiter", "deltas")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_token: TokenCallback | None = None
    ) -> None:
        self.deltas: list[TokenDelta] = []
        self._on_token = on_token
        self._rest: Awaitable[None] | None = None  # of what `on_token` began, for the reader
        self._error: Exception | None = None
        self._loop = loop
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        if self._error is not None:  # a delta may be lost, and no later one may hide that
            return
        on_token, waiter = self._on_token, self._waiter
        if on_token is not None and waiter is not None and not waiter.done():
            try:
                taken = on_token(delta)
            except Exception as error:  # the failure of one request, and not of its link
                self.fail(error)
                return
            if taken is True:
                return
            if taken is not False:
                self._rest = taken
                self._wake()
                return
        self.deltas.append(delta)
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after all deltas before it. Only the first error counts."""
        self._error = self._error or error
        self._wake()

    def expire(self) -> None:
        self.fail(
            DeadlineExceeded(
                "The request's deadline passed before its answer was complete; ask for fewer"
                " tokens or allow more time."
            )
        )

    async def wait(self) -> None:
        """Wait until there is something to take. Raises the error that ended the stream."""
        while self._rest is not None or not self.deltas:
            if self._rest is not None:
                rest, self._rest = self._rest, None
                await rest
                continue
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter

    def take(self) -> TokenDelta:
        """All deltas since the last call, merged."""
        deltas, self.deltas = self.deltas, []
        return deltas[0] if len(deltas) == 1 else merge(deltas)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one stream as one."""
    first, last = deltas[0], deltas[-1]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(item for delta in deltas for item in delta.logprobs or ())
    scored = (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
    return TokenDelta(
        stream_id=first.stream_id,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=last.finish_reason,
        logprobs=logprobs,
        num_cached_tokens=max(delta.num_cached_tokens for delta in deltas),  # only one says it
        ticket=last.ticket,
        error=last.error,
        early_ticket=last.early_ticket,
        times=next((delta.times for delta in deltas if delta.times is not None), None),
        prompt_logprobs=next(scored, None),
    )
