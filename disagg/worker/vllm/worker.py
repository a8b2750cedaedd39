"""A worker whose engine is vLLM. To ingresses it is a worker like any other.

    link server  --Start, Cancel, Resync-->  a task for each request  -->  vLLM's engine
    link server  <--deltas, KV events, load, once a turn of the loop--

Everything runs on the worker's event loop. KV goes from one vLLM to the other by its NixlConnector:
the ticket of a prefill has vLLM's own parameters in it (`tickets.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.adapters import AdapterBoard, AdapterEntry, AdapterReport
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.errors import DisaggError, EngineFailed, Unavailable, request_failed
from disagg.kvtransfer.ticket import KVTicket, Peer
from disagg.links.server import LinkClosed, LinkServer, Received
from disagg.messages import (
    AdapterNews,
    Cancel,
    GenerateRequest,
    KVEvent,
    Release,
    Resync,
    Role,
    StageTimes,
    Start,
    TokenDelta,
    WireError,
    WorkerRecord,
    WorkerStatus,
)
from disagg.time_model import StepFeatures, StepTimeFit, attended
from disagg.worker.liveness import LOOK_S, Liveness
from disagg.worker.streams import TOKEN_NBYTES, LinkId, check_room, sequence_id
from disagg.worker.vllm import tickets
from disagg.worker.vllm.arguments import LEASE_S
from disagg.worker.vllm.engine import (
    EngineOutput,
    EnginePrompt,
    EngineStep,
    ForeignEngine,
    VllmEngine,
)
from disagg.worker.vllm.prefixes import PrefixNames, TheirEvent, salt_of
from disagg.worker.vllm.requests import (
    can_hand_over,
    check_request,
    num_left,
    sampling_arguments,
)

log = logging.getLogger(__name__)

POLL_S = 0.05
TURN_S = 60.0  # vLLM compiles kernels when it first meets a shape


@dataclass(eq=False, slots=True)
class _VllmStream:
    """One request while it is on this worker.

    num_elsewhere: tokens whose KV comes with its ticket.
    num_image: tokens of its images, known with the first output.
    """

    link_id: LinkId
    start: Start
    since: float
    num_elsewhere: int = 0
    num_output: int = 0
    num_image: int = 0
    task: asyncio.Task[None] | None = None

    @property
    def key(self) -> tuple[LinkId, int]:
        return self.link_id, self.start.stream_id

    @property
    def request(self) -> GenerateRequest:
        return self.start.request

    @property
    def nbytes(self) -> int:
        return TOKEN_NBYTES * len(self.request.token_ids) + sum(map(len, self.request.images))

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + self.num_image + self.num_output


@dataclass(slots=True)
class _Pending:
    """What the next turn of the loop publishes."""

    deltas: dict[LinkId, list[TokenDelta]] = field(default_factory=dict)
    kv_events: list[KVEvent] = field(default_factory=list)


class VllmWorker:
    """One vLLM engine behind a link server. Create it with `start`, and call it on its loop."""

    def __init__(
        self,
        engine: ForeignEngine,
        record: WorkerRecord,
        key: bytes,
        clock: Callable[[], float],
        adapters: Iterable[AdapterEntry] | None = None,
        max_requests_nbytes: int = EngineConfig().max_requests_nbytes,
    ) -> None:
        self._engine = engine
        self._max_requests_nbytes = max_requests_nbytes
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._names = PrefixNames()
        self._board = None if adapters is None else AdapterBoard(adapters)
        self._step_times = StepTimeFit()
        self._streams: dict[tuple[LinkId, int], _VllmStream] = {}
        self._tickets: dict[str, float] = {}  # issued, and when their blocks are free again
        self._pending = _Pending()
        self._is_flushing = False
        self._accepting = True
        self._liveness = Liveness(TURN_S)
        self._num_turns = 0  # steps of the engine, and looks at one that has nothing to do
        self._watch: asyncio.Task[None] | None = None
        self._last_step = EngineStep()
        self._num_preempted = 0
        engine.listener.on_step = self._stepped
        engine.listener.on_kv_events = self._cached
        self._server = LinkServer(key=key, record=record, receive=self._receive)

    @classmethod
    async def start(
        cls,
        config: ServeConfig,
        tier: TierConfig,
        role: Role,
        *,
        worker_id: str,
        epoch: int,
        host: str,
        clock: Callable[[], float] = time.time,
    ) -> VllmWorker:
        """Load the model and listen. The arguments are those of `worker.Worker.start`.

        Raises:
            StartupError: vLLM cannot start.
        """
        tier = tier.for_role(role)
        engine: ForeignEngine = await VllmEngine.start(tier, host)
        sizes = engine.sizes
        # No block is read by our transports: the peer says which workers exchange KV.
        peer = Peer(
            worker_id,
            epoch,
            tickets.TRANSPORT,
            sizes.layout,
            sizes.num_blocks,
            sizes.block_nbytes,
            base_address=0,
            stamps_address=0,
            device_id=-1,
            agent=b"",
        )
        record = WorkerRecord(
            worker_id=worker_id,
            role=role,
            model=tier.name,
            host=host,
            port=0,
            epoch=epoch,
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            max_model_len=sizes.max_model_len,
            peer=peer,
            pid=os.getpid(),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        # Ingresses tell it which are served, also those of the configuration.
        adapters = () if tier.engine.enable_lora else None
        key, most = config.cluster_key.encode(), tier.engine.max_requests_nbytes
        worker = cls(engine, record, key, clock, adapters, most)
        try:
            await worker._server.start()
        except BaseException:
            await worker.close()
            raise
        worker._watch = worker._loop.create_task(worker._keep_watch())
        return worker

    @property
    def record(self) -> WorkerRecord:
        """The record that membership publishes about this worker."""
        return self._server.record

    def check_health(self) -> None:
        """Raises `EngineFailed` if the engine is dead or hangs; Serve then replaces the worker."""
        if self._engine.is_dead:
            raise EngineFailed("The vLLM engine of this worker has died; its log says why.")
        if self._liveness.is_dead:
            raise EngineFailed(f"vLLM has not finished a step for {self._liveness.still_s:.0f} s.")

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, let those end that are nearly done, and close.

        vLLM cannot hand a running sequence over: what does not end in half of the time goes on
        elsewhere with its tokens as its prompt. In the other half issued tickets may be used.
        """
        self._accepting = False
        self._flush_soon()
        half_s = timeout_s / 2
        for stream in list(self._streams.values()):
            if self._left_s(stream) > half_s:
                self._end(stream, Unavailable("This worker stops; the request moves."))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._streams or self._tickets:
                    await asyncio.sleep(POLL_S)
                    self._drop_old_tickets()
        await self.close()

    async def close(self) -> None:
        """End everything at once; open streams end with `WorkerLost`."""
        if self._watch is not None:
            self._watch.cancel()
        for stream in list(self._streams.values()):
            self._forget(stream)
        await self._server.close()
        await self._engine.close()

    async def _keep_watch(self) -> None:
        """Close all links if vLLM finishes no step although it has requests: they go on elsewhere.

        Until it finishes one, the worker takes no requests.
        """
        sizes = self._engine.sizes
        largest = StepFeatures(
            sizes.max_num_batched_tokens,
            attended(sizes.max_num_batched_tokens, 0),
            sizes.max_num_seqs,
            sizes.num_blocks * sizes.block_size,
        )
        while True:
            await asyncio.sleep(LOOK_S)
            was_stalled = self._liveness.is_stalled
            self._num_turns += not (self._streams or was_stalled)
            if self._liveness.look(self._num_turns, self._step_times.model.step_s(largest)):
                reason = f"vLLM has not finished a step for {self._liveness.still_s} s"
                log.error("Closing all links: %s.", reason)
                self._server.hang_up(reason)
            elif was_stalled and not self._liveness.is_stalled:
                self._flush_soon()

    # Messages of ingresses.

    def _receive(self, link_id: LinkId, message: Received) -> None:
        match message:
            case Start() if message.is_prefix_request:
                refusal = Unavailable("vLLM gives no ticket for a prefix that it caches.")
                delta = TokenDelta(message.stream_id, (), error=WireError.from_error(refusal))
                self._server.answer(link_id, delta)
            case Start():
                self._start(link_id, message)
            case Cancel(stream_id=stream_id):
                stream = self._streams.get((link_id, stream_id))
                if stream is not None:
                    self._forget(stream)
            case Release(ticket_id=ticket_id):
                self._tickets.pop(ticket_id, None)  # its blocks stay until the lease ends
            case AdapterNews(entries=entries) if self._board is not None:
                self._board.merge(entries)
                self._flush_soon()
            case Resync():
                self._flush()
                self._server.publish_snapshot(link_id, self._names.all(), self._status())
            case LinkClosed():
                for stream in [each for each in self._streams.values() if each.link_id == link_id]:
                    self._forget(stream)

    def _start(self, link_id: LinkId, start: Start) -> None:
        stream = _VllmStream(link_id, start, self._clock())
        self._streams[stream.key] = stream
        stream.task = self._loop.create_task(self._run(stream))
        if self._server.home_ingress:
            self._server.publish_arrivals(self._status())

    async def _run(self, stream: _VllmStream) -> None:
        try:
            if not self._is_accepting:
                raise Unavailable("This worker is stopping or hangs; it takes no new requests.")
            nbytes = sum(each.nbytes for each in self._streams.values())
            check_room(nbytes, len(self._streams), self._max_requests_nbytes)
            check_request(stream.request)
            if stream.start.hand_over and can_hand_over(stream.request):
                await self._prefill(stream)
            else:
                await self._generate(stream)
        except DisaggError as error:
            self._end(stream, error)
        except Exception as error:
            log.exception("A request failed: %s.", stream.request.request_id)
            self._end(stream, request_failed(error))

    async def _prefill(self, stream: _VllmStream) -> None:
        """Compute the prompt and its first token, and leave a ticket.

        The decode worker's prompt has the first token too, and vLLM wants the KV of as many blocks
        as that prompt has. If the token begins a block, one more step is computed here for it, and
        its own token is left out.
        """
        request = stream.request
        num_prompt = len(request.token_ids)
        begins_block = num_prompt % self._engine.sizes.block_size == 0
        prompt = self._prompt(stream, 2 if begins_block else 1, tickets.ASK)
        first: EngineOutput | None = None
        async with contextlib.aclosing(self._engine.generate(prompt)) as outputs:
            async for output in outputs:
                if first is None and output.token_ids:
                    first = output
                    if output.finish_reason == "stop" and len(output.token_ids) == 1:
                        self._give(stream, output)
                        return
                    self._give(stream, _first_token(output))
                params = output.kv_transfer_params
        if first is None or not params:
            raise EngineFailed("vLLM ended a prefill without a token or without its KV.")
        self._give(stream, EngineOutput(), ticket=self._issue(stream, num_prompt, params))

    async def _generate(self, stream: _VllmStream) -> None:
        """Compute the answer, from the KV of a ticket where there is one."""
        request = stream.request
        num_tokens = len(request.token_ids)
        params = tickets.redeem(stream.start.ticket, self.record.peer, num_tokens, self._clock())
        stream.num_elsewhere = num_tokens - 1 if params else 0
        prompt = self._prompt(stream, num_left(request), params)
        async with contextlib.aclosing(self._engine.generate(prompt)) as outputs:
            async for output in outputs:
                if output.token_ids or output.finish_reason is not None:
                    self._give(stream, output)

    def _prompt(self, stream: _VllmStream, max_tokens: int, params: dict[str, Any]) -> EnginePrompt:
        request = stream.request
        return EnginePrompt(
            sequence_id(*stream.key),
            request.token_ids,
            salt_of(request.hash_root),
            sampling_arguments(request, max_tokens, dict(params)),
            request.priority,
            request.adapter,
            request.images,
            request.sampling.pooling,
        )

    def _issue(self, stream: _VllmStream, num_tokens: int, params: dict[str, Any]) -> KVTicket:
        ticket_id = sequence_id(*stream.key)
        self._drop_old_tickets()
        ends_s = self._clock() + LEASE_S
        self._tickets[ticket_id] = ends_s
        return tickets.issue(self.record.peer, ticket_id, num_tokens, ends_s, params)

    # What goes to ingresses.

    def _give(
        self, stream: _VllmStream, output: EngineOutput, ticket: KVTicket | None = None
    ) -> None:
        if stream.key not in self._streams:
            return
        is_first = not stream.num_output and bool(output.token_ids or output.pooled)
        if stream.request.images and output.num_prompt_tokens:
            stream.num_image = output.num_prompt_tokens - len(stream.request.token_ids)
        stream.num_output += len(output.token_ids)
        delta = TokenDelta(
            stream.start.stream_id,
            output.token_ids,
            output.finish_reason,
            output.logprobs,
            # Tokens that a ticket brought were counted by the worker that computed them.
            output.num_cached_tokens if is_first and not stream.num_elsewhere else 0,
            ticket,
            times=self._times(stream) if is_first else None,
            prompt_logprobs=output.prompt_logprobs if is_first else None,
            pooled=output.pooled,
            num_image_tokens=stream.num_image if is_first else 0,
        )
        self._add(stream, delta)

    def _end(self, stream: _VllmStream, error: DisaggError) -> None:
        if stream.key in self._streams:
            told = WireError.from_error(error)
            self._add(stream, TokenDelta(stream.start.stream_id, (), error=told))

    def _add(self, stream: _VllmStream, delta: TokenDelta) -> None:
        self._pending.deltas.setdefault(stream.link_id, []).append(delta)
        if delta.is_last:
            self._forget(stream)
        self._flush_soon()

    def _forget(self, stream: _VllmStream) -> None:
        """Drop a stream. If its request still runs, it is aborted."""
        self._streams.pop(stream.key, None)
        task = stream.task
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        pending, self._pending = self._pending, _Pending()
        self._server.publish(pending.deltas, pending.kv_events, self._status())

    # What the engine says.

    def _stepped(self, step: EngineStep) -> None:
        self._num_turns += 1
        self._last_step = step
        self._num_preempted += step.num_preempted
        if step.seconds > 0.0:
            each = step.num_prompt_tokens / max(step.num_prompts, 1)
            features = StepFeatures(
                step.num_prompt_tokens,
                step.num_prompts * attended(each, 0),
                step.num_decoding,
                self._num_context_tokens(),
            )
            self._step_times.observe(features, step.seconds)
        self._flush_soon()

    def _cached(self, events: list[TheirEvent] | None) -> None:
        if events is None:
            self._pending.kv_events.append(KVEvent("removed", tuple(self._names.clear())))
        else:
            self._pending.kv_events += self._names.apply(events)
        self._flush_soon()

    def _status(self) -> WorkerStatus:
        streams = self._streams.values()
        prefilling = [each for each in streams if not each.num_output]
        num_running = min(self._last_step.num_running, len(streams))
        num_waiting = len(streams) - num_running
        num_blocks = self._engine.sizes.num_blocks
        return WorkerStatus(
            num_running=num_running,
            num_waiting=num_waiting,
            num_uncomputed_tokens=sum(each.num_tokens - each.num_elsewhere for each in prefilling),
            num_context_tokens=self._num_context_tokens(),
            num_free_blocks=round(num_blocks * (1.0 - self._last_step.kv_usage)),
            num_blocks=num_blocks,
            num_holds=len(self._tickets),
            accepting=self._is_accepting,
            step_costs=self._step_times.to_costs(),
            num_preempted=self._num_preempted,
            num_prefilling=max(0, len(prefilling) - num_waiting),
            num_leaving=sum(each.start.hand_over for each in prefilling),
            home_ingress=self._server.home_ingress,
            adapters=None if self._board is None else AdapterReport(self._board.entries),
        )

    @property
    def _is_accepting(self) -> bool:
        return self._accepting and not self._liveness.is_stalled

    def _num_context_tokens(self) -> int:
        return sum(each.num_tokens for each in self._streams.values() if each.num_output)

    def _times(self, stream: _VllmStream) -> StageTimes:
        """vLLM tells no wait apart from the computation."""
        seconds = max(0.0, self._clock() - stream.since)
        return StageTimes(not stream.num_elsewhere, 0.0, 0.0, seconds)

    def _left_s(self, stream: _VllmStream) -> float:
        num_running = max(1, len(self._streams))
        step_s = self._step_times.model.decode_step_s(num_running, self._num_context_tokens())
        return step_s * (num_left(stream.request) - stream.num_output)

    def _drop_old_tickets(self) -> None:
        now = self._clock()
        self._tickets = {name: ends for name, ends in self._tickets.items() if ends > now}


def _first_token(output: EngineOutput) -> EngineOutput:
    logprobs = output.logprobs and output.logprobs[:1]
    return replace(output, token_ids=output.token_ids[:1], finish_reason=None, logprobs=logprobs)
