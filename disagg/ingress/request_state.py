"""One request on its way over workers: its tokens so far, and the rest of its route."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from disagg.blocks import hash_block
from disagg.errors import DisaggError, Overloaded
from disagg.ingress.admission_queue import Charge
from disagg.ingress.decisions import WorkerVisit
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest, Prefetch, TokenDelta
from disagg.router.fleet import Reservation
from disagg.router.route import Candidate

# Pause before workers that refused a request are tried again. It grows each time, because a full
# worker stays full for as long as its requests take.
LEAST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0


class Visit(NamedTuple):
    """One worker of a route.

    With `hand_over` it stops after the first token and issues a ticket; otherwise it generates the
    whole answer.
    """

    reservation: Reservation
    hand_over: bool = False


class RequestState:
    """Tokens, route and errors of one request. Changed only by `Dispatcher`."""

    def __init__(self, request: GenerateRequest) -> None:
        self.visits: deque[Visit] = deque()  # the rest of the route
        self.ticket: KVTicket | None = None  # the KV for the next worker
        self.prefix_source: str | None = None  # worker from which to pull a cached prefix first
        self.excluded: set[str] = set()  # workers that failed this request
        self.num_moves = 0
        self.because = ""
        self.is_finished = False
        self.worker_id = ""  # the current or last worker
        self.visited: list[WorkerVisit] = []  # by this route
        self.wait_s = 0.0  # the wait predicted when its route was chosen
        # Start of the wait for the first token, and the route with the predicted times.
        self.awaited: tuple[float, Candidate] | None = None
        self.charge: Charge | None = None  # its tenant's charge; set when it is sent to a worker
        self.is_turned_away = False  # whether all workers so far refused it as overloaded
        self.request = request  # with the tokens so far, but for the last ones
        self.model = request.model
        self._generated: list[int] = []  # tokens that follow those of `request`
        self._is_first = True
        self._num_refusals = 0  # consecutive refusals since its answer has begun

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self._generated)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.request.num_prompt_tokens

    def grow(self, block_size: int | None) -> GenerateRequest:
        """The request for the next worker, with all tokens so far and hashes of full blocks."""
        if self._generated and block_size is not None:
            self.request = append_tokens(self.request, self._generated, block_size)
            self._generated = []
        return self.request

    def prefix_request(self, block_size: int) -> GenerateRequest:
        """The request for a ticket of a cached prefix: no tokens, only hashes of full blocks."""
        request = self.grow(block_size)
        num_blocks = (len(request.token_ids) - 1) // block_size
        return msgspec.structs.replace(
            request,
            token_ids=(),
            draft_token_ids=(),
            block_hashes=request.block_hashes[:num_blocks],
        )

    def prefetch(self, ticket: KVTicket) -> Prefetch:
        """The message that makes the next worker pull the blocks of an early ticket."""
        hashes = self.request.block_hashes[: len(ticket.block_ids)]
        return Prefetch(ticket, hashes, self.request.traceparent)

    def take(self, delta: TokenDelta) -> TokenDelta | None:
        """Record a worker's delta. Returns the delta for the client, or None if it gets none."""
        self._generated += delta.token_ids
        self.is_finished = delta.finish_reason is not None
        if delta.ticket is not None:
            self.ticket = delta.ticket
        elif delta.token_ids:
            self.ticket = None  # the worker that generates has used it
        if not delta.token_ids and not self.is_finished:
            return None
        num_cached_tokens = delta.num_cached_tokens if self._is_first else 0
        self._is_first = False
        is_plain = delta.ticket is None and delta.error is None
        if is_plain and num_cached_tokens == delta.num_cached_tokens:
            return delta
        return TokenDelta(
            delta.stream_id,
            delta.token_ids,
            delta.finish_reason,
            delta.logprobs,
            num_cached_tokens,
            prompt_logprobs=delta.prompt_logprobs,
            pooled=delta.pooled,
            num_image_tokens=delta.num_image_tokens,
        )

    @property
    def pause_s(self) -> float:
        """How long to wait before workers that refused the request are tried again."""
        return min(MOST_PAUSE_S, LEAST_PAUSE_S * 2.0 ** min(self._num_refusals, 10))

    def move(self, error: DisaggError) -> None:
        is_full, has_begun = isinstance(error, Overloaded), self.num_output_tokens > 0
        self.is_turned_away = is_full and not has_begun
        if is_full and has_begun:  # this is not a failure: the request waits for room
            self._num_refusals += 1
        else:
            self.num_moves += 1
            self._num_refusals = 0
        self.because = f"{error.code}: {error.message}"
        self.excluded.add(self.worker_id)


def append_tokens(
    request: GenerateRequest, token_ids: list[int], block_size: int
) -> GenerateRequest:
    """`request` with more tokens and the hashes of the blocks that they fill, if it has no images.

    Its draft loses these tokens, or all tokens if it had proposed others.
    """
    tokens = (*request.token_ids, *token_ids)
    draft, num_new = request.draft_token_ids, len(token_ids)
    draft = draft[num_new:] if draft[:num_new] == tuple(token_ids) else ()
    hashes = list(request.block_hashes)
    end = 0 if request.images else len(tokens) - block_size + 1
    for start in range(len(hashes) * block_size, end, block_size):
        parent = hashes[-1] if hashes else request.hash_root
        hashes.append(hash_block(parent, tokens[start : start + block_size]))
    return msgspec.structs.replace(
        request, token_ids=tokens, block_hashes=tuple(hashes), draft_token_ids=draft
    )
