"""The interface of dispatch to workers. `links/fleet_links.py` and the simulator implement it."""

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
        """Run a request on a worker. Closing the iterator cancels it.

        Args:
            hand_over: whether the worker stops after the first token and issues a ticket.
            ticket: the KV that the worker should pull.
            on_token: may be called with deltas at once; deltas that it takes are not yielded.

        Raises, here or while iterating:
            WorkerLost: the link ended, after all deltas that arrived were yielded.
            DeadlineExceeded: `timeout_s` passed before the last delta.
        """
        ...

    def release(self, ticket: KVTicket) -> None:
        """Tell the ticket's source to free the blocks, because the ticket will not be used."""
        ...

    def introduce(self, worker_id: str, source_id: str) -> None:
        """Tell a worker how to reach `source_id`, before it gets a ticket of that worker."""
        ...

    def prefetch(self, worker_id: str, asked: Prefetch) -> None:
        """Make a worker pull the finished blocks of a prompt that it will get later."""
        ...
