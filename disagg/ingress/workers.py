"""The interface between dispatch and workers, implemented by `links/fleet_links.py` and the
simulator."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Prefetch, TokenDelta
from disagg.token_fast_path import TokenCallback


class Workers(Protocol):
    """The workers of all pools, by id."""

    def stream(
        self,
        worker_id: str,
        request: GenerateRequest,
        *,
        timeout_s: float,
        hand_over: bool = False,
        ticket: KVTicket | None = None,
        on_token: TokenCallback | None = None,
    ) -> AsyncGenerator[TokenDelta, None]:
        """Run the request there; closing the iterator cancels it.

        Args:
            on_token: may be given deltas at once; what it takes is not yielded.

        Raises, here or while iterating:
            WorkerLost: the link ended; everything that arrived before was yielded.
            DeadlineExceeded: `timeout_s` passed before the last delta.
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """Tell the ticket's source that it can free the blocks: the ticket will not be used."""
        ...

    def introduce(self, worker_id: str, source_id: str) -> None:
        """Tell a worker how to reach another one, before a ticket of that one is sent to it."""
        ...

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        """Make the worker pull the finished blocks of a prompt that it will get later."""
        ...
