"""The part of a worker that runs in the engine's thread: streams, KV import, KV export, draining.

It decides where a request enters (KV import or engine) and what happens between two steps. It is
deterministic and has no thread, socket or clock, so tests run whole fleets of it in one thread.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import msgspec

from disagg import telemetry
from disagg.adapters import AdapterBoard, AdapterEntry, AdapterReport
from disagg.blocks import BlockHash
from disagg.engine.engine_thread import StepResult
from disagg.engine.sched.sequence import Sequence, rename_blocks
from disagg.errors import DisaggError, TransferFailed, Unavailable, request_failed
from disagg.kvtransfer.ticket import Peer
from disagg.kvtransfer.transport import PullDone, TicketReleased
from disagg.messages import (
    KVEvent,
    Prefetch,
    Start,
    StepCosts,
    TokenDelta,
    WireError,
    WorkerStatus,
)
from disagg.time_model import StepTimeFit, TransferTimeModel
from disagg.worker.kv_export import KVExport
from disagg.worker.kv_import import KVImport
from disagg.worker.parts import Parts
from disagg.worker.streams import LinkId, Streams, check_room, is_of_link, record_pull, sequence_id
from disagg.worker.tiers import KVOffload

log = logging.getLogger(__name__)


class WorkerCore:
    """The engine of a worker with its streams, KV import and KV export.

    Every method is called in the thread that owns the engine. `now`: Unix seconds.

    accepting: if False, new requests are refused with `Unavailable`; running ones continue.
    """

    def __init__(self, parts: Parts) -> None:
        self.accepting = True
        self._engine = parts.engine
        self._max_requests_nbytes = parts.max_requests_nbytes
        self._transport = parts.transport
        self._step_times = StepTimeFit(parts.first_times)
        parts.engine.scheduler.step_budget.times = lambda: self._step_times.model
        prior = parts.transfer_prior
        self._transfer_times = (
            TransferTimeModel(prior.latency_s, prior.bytes_per_s, is_measured=True)
            if prior is not None
            else TransferTimeModel()
        )
        self._streams = Streams()
        self._board = AdapterBoard(parts.adapters)
        self._adapter_report: AdapterReport | None = None
        if parts.engine.adapters is not None:
            parts.engine.adapters.watch(self._streams.is_open)
            self._adapter_report = AdapterReport(self._board.entries)
            for adapter in self._board.served():
                parts.engine.adapters.load(adapter)
        self._kv_export = KVExport(parts.engine, parts.transport.peer, parts.stamps.generations)
        self._kv_import = KVImport(
            parts.engine,
            parts.transport,
            self._transfer_s,
            parts.tiers(),
            lambda: self._step_times.model.prefill_s,
        )
        self._host, self._cold = parts.host_tier, parts.cold_tier
        self._offload = KVOffload(parts.engine, self._host, self._cold, parts.read_blocks)
        self._block_nbytes = parts.transport.peer.block_nbytes
        self._leave_by_s: float | None = None  # while it drains

    @property
    def is_idle(self) -> bool:
        """Whether no stream is open and no blocks are held for another worker."""
        return not self._streams.num_open and not self._kv_export.num_holds

    @property
    def step_costs(self) -> StepCosts:
        """What it has learned of its steps; the same object until it has learned more."""
        return self._step_times.to_costs()

    def start(self, link_id: LinkId, start: Start, now: float) -> None:
        """Start a request. A refusal is the only delta of its stream."""
        sequence = self._streams.open(link_id, start, now)
        if sequence.num_output_tokens:  # it was rerouted, and its client waits for the next token
            sequence.stream_since = now, sequence.num_tokens
        with self._ending(sequence):
            if not self.accepting:
                raise _refusal()
            check_room(self._streams.nbytes, self._streams.num_open, self._max_requests_nbytes)
            rename_blocks(sequence, start.request.block_size, self._engine.pool.block_size)
            traceparent = start.request.traceparent
            self._kv_import.admit(sequence, start.ticket, now, traceparent)

    def prefix_ticket(self, link_id: LinkId, start: Start, now: float) -> TokenDelta:
        """Answer a request for a cached prefix: one delta, with a ticket or an error."""
        try:
            if not self.accepting:
                raise _refusal()
            name = sequence_id(link_id, start.stream_id)
            ticket = self._kv_export.prefix_ticket(name, start.request, now)
        except DisaggError as error:
            return TokenDelta(start.stream_id, (), error=WireError.from_error(error))
        return TokenDelta(start.stream_id, (), ticket=ticket)

    def prefetch(self, message: Prefetch, now: float) -> None:
        """Pull the blocks of an early ticket, whose request will be sent here later."""
        if self.accepting:
            self._kv_import.prefetch(message, now)

    def learn_adapters(self, entries: Iterable[AdapterEntry]) -> None:
        """Take over what an ingress knows of LoRA adapters, and begin to load new ones."""
        for entry in self._board.merge(entries):
            if entry.is_served and self._engine.adapters is not None:
                self._engine.adapters.load(entry.adapter)

    def _report_adapters(self) -> AdapterReport | None:
        adapters, before = self._engine.adapters, self._adapter_report
        if adapters is None or before is None:
            return None
        report = AdapterReport(self._board.entries, *adapters.report())
        if report != before:  # the same object otherwise, so that comparing it costs nothing
            self._adapter_report = report
        return self._adapter_report

    def drain(self, leave_by_s: float) -> None:
        """Empty the worker, which is about to stop, without computing any token twice.

        New requests and those that have not begun are refused, so that their ingress reroutes them.
        Sequences that are predicted to finish in time may finish. The others are handed over after
        one more token, with a ticket for their KV, as after a prefill.

        Args:
            leave_by_s: Unix seconds; sequences that would end later are handed over.
        """
        self.accepting = False
        self._leave_by_s = leave_by_s

    def cancel(self, link_id: LinkId, stream_id: int, now: float) -> None:
        """Cancel a stream and its sequence in any state. No delta follows."""
        self._cancel(sequence_id(link_id, stream_id), now)

    def release(self, ticket_id: str) -> None:
        """Free the blocks of a ticket of this worker that will not be used."""
        self._kv_export.release(ticket_id)

    def close_link(self, link_id: LinkId, now: float) -> None:
        """Cancel all streams of a link. Its tickets may be lost, so their holds are shortened."""
        for name in self._streams.of_link(link_id):
            self._cancel(name, now)
        self._kv_export.hurry(lambda ticket_id: is_of_link(ticket_id, link_id), now)

    def add_peers(self, peers: Iterable[Peer]) -> None:
        """Add workers whose KV may be pulled."""
        for peer in peers:
            try:
                self._transport.add_peer(peer)
            except TransferFailed as error:
                # No request fails: tickets of this worker are refused, and prompts computed here.
                log.warning("Cannot pull from %s: %s", peer.worker_id, error.message)

    def forget_peers(self, gone: Iterable[str]) -> None:
        """Forget workers that have left.

        If another ingress still uses one of them, its next request brings the address again.
        """
        for worker_id in gone:
            self._transfer_times.forget(worker_id)
            self._transport.forget_peer(worker_id)

    def advance(self, now: float) -> bool:
        """Advance imports, exports and the drain between two steps. True: call again soon."""
        self._engine.scheduler.step_budget.now_s = now
        for event in self._transport.poll():
            match event:
                case PullDone():
                    self._pull_ended(event, now)
                case TicketReleased(ticket_id=ticket_id):
                    self._kv_export.release(ticket_id)
        has_freed = self._kv_export.advance(now)
        is_busy = self._kv_import.advance(now)
        is_stuck = self._kv_import.is_stuck and not self._engine.last_plan.sequences
        if (self._engine.is_stuck or is_stuck) and not has_freed:
            self._kv_export.break_oldest()  # two workers must not wait for each other's blocks
        if self._leave_by_s is not None:
            self._empty(self._leave_by_s - now)
        return is_busy

    def take(self, result: StepResult, now: float) -> dict[LinkId, list[TokenDelta]]:
        """Turn the result of a step into deltas by link. Updates the time model."""
        if result.features is not None:
            self._step_times.observe(result.features, result.seconds)
        ended = (event for event in result.events if event.is_last)
        self._offload.save(result.kv_events, ended)
        deltas = self._streams.deltas(
            result.events,
            lambda sequence: self._kv_export.leave(sequence, now),
            lambda sequence: self._cancel(sequence.request_id, now),
            now,
            result.seconds,
        )
        self._add_early(deltas)
        if result.failure is not None:  # no request may wait for a failed engine
            self.accepting = False
            for link_id, last in self._streams.fail_all(result.failure).items():
                deltas.setdefault(link_id, []).extend(last)
        return deltas

    def take_host_events(self) -> tuple[KVEvent, ...]:
        """KV events of the host tier since the last call: blocks cached and evicted there."""
        return self._host.take_events() if self._host is not None else ()

    def host_hashes(self) -> tuple[BlockHash, ...]:
        """The hashes of all blocks cached in the host tier."""
        return self._host.hashes() if self._host is not None else ()

    def status(self, status: WorkerStatus | None = None, home_ingress: str = "") -> WorkerStatus:
        """The worker's status. `status` is the engine's part, by default its current one."""
        status = status or self._engine.status()
        return msgspec.structs.replace(
            status,
            num_waiting=status.num_waiting + self._kv_import.num_arriving,
            num_holds=self._kv_export.num_holds,
            requests_nbytes=self._streams.nbytes,
            accepting=self.accepting,
            step_costs=self.step_costs,
            transfers=self._transfer_times.figures(),
            store=self._cold.counts() if self._cold is not None else None,
            host=self._host.counts() if self._host is not None else None,
            holds=self._kv_export.counts,
            pulls=self._kv_import.pull_counts,
            home_ingress=home_ingress,
            num_spans_dropped=telemetry.num_dropped(),
            adapters=self._report_adapters(),
        )

    def check(self) -> None:
        """Recount every block and hold. Raises `AssertionError`."""
        if self._host is not None:
            self._host.check()
        self._engine.check([*self._kv_export.holders(), *self._kv_import.holders()])

    def close(self) -> None:
        """Close the transport and the tiers, after the engine has stopped."""
        self._transport.close()
        if self._engine.adapters is not None:
            self._engine.adapters.close()
        if self._host is not None:
            self._host.close()
        if self._cold is not None:
            self._cold.close()

    def _empty(self, left_s: float) -> None:
        """Refuse waiting sequences, and hand over those that would not finish in `left_s`."""
        scheduler = self._engine.scheduler
        for sequence in [*scheduler.waiting, *self._kv_import.take_waiting()]:
            self._engine.end(sequence, _refusal())
        running = scheduler.running
        num_context_tokens = sum(sequence.num_computed for sequence in running)
        step_s = self._step_times.model.decode_step_s(len(running), num_context_tokens)
        for sequence in [*running, *scheduler.imported]:
            most_steps = sequence.max_num_tokens - len(sequence.tokens)
            if not sequence.hand_over and most_steps * step_s > left_s:
                scheduler.hand_over(sequence)

    def _transfer_s(self, source_id: str, num_blocks: int) -> float:
        return self._transfer_times.transfer_s(source_id, num_blocks * self._block_nbytes)

    @contextmanager
    def _ending(self, sequence: Sequence) -> Iterator[None]:
        """A context in which a failure ends this request, and never the worker."""
        try:
            yield
        except DisaggError as error:
            self._engine.end(sequence, error)
        except Exception as error:
            self._engine.end(sequence, request_failed(error))

    def _cancel(self, name: str, now: float) -> None:
        self._streams.cancel(name, now)
        if not self._kv_import.cancel(name) and self._engine.abort(name) is None:
            self._kv_export.release(name)  # only its ticket is left, and will not be used

    def _add_early(self, deltas: dict[LinkId, list[TokenDelta]]) -> None:
        """Add early tickets for the finished blocks of prompts that will be handed over."""
        plan = self._engine.last_plan
        for sequence in plan.sequences[plan.num_decodes :]:
            if not sequence.hand_over or not self._streams.is_open(sequence):
                continue
            try:
                ticket = self._kv_export.early_ticket(sequence)
            except Exception:  # all blocks are pulled after the prefill instead
                log.exception("Could not make an early ticket for %s.", sequence.request_id)
                continue
            if ticket is not None:
                link_id, delta = self._streams.early_delta(sequence, ticket)
                deltas.setdefault(link_id, []).append(delta)

    def _pull_ended(self, done: PullDone, now: float) -> None:
        pulled, sequence = self._kv_import.pull_ended(done, now)
        if sequence is not None:
            nbytes = done.nbytes + pulled.early_nbytes if done.error is None else 0
            self._streams.pulled(sequence, done.seconds, nbytes, done.lane)
        record_pull(pulled.traceparent, done, now)
        if done.error is None:
            source_id = pulled.ticket.source_id
            # Predictions use the bytes of one rank, because ranks pull in parallel.
            nbytes = done.num_blocks * self._block_nbytes
            self._transfer_times.observe(source_id, nbytes, done.seconds, done.lane)
        else:
            then = "is pulled later" if pulled.is_early else "is computed here instead"
            log.warning("A KV pull failed; %s %s: %s", pulled.ticket.ticket_id, then, done.error)


def _refusal() -> Unavailable:
    return Unavailable("This worker is stopping and takes no new requests.")
