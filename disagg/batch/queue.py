"""Runs a server's batches: looks for those that are not finished and that nobody runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import TypeAlias

from disagg.batch.ask import Ask, Patience
from disagg.batch.lines import BatchReply
from disagg.batch.run import AnswerFiles, BatchIsRunning, Counts, run_batch
from disagg.batch.store import (
    FINAL,
    BatchError,
    BatchErrors,
    BatchStore,
    RequestCounts,
    Status,
    StoredBatch,
    UnknownObject,
)
from disagg.errors import RequestError

LOOK_S = 1.0  # between two looks for batches, and at each that runs
SWEEP_S = 60.0
MAX_NUM_RUNNING = 4  # batches at a time in each ingress

# Tenant, and the Unix time until which answers may take -> an `Ask` on the tenant's behalf.
AskFor: TypeAlias = Callable[[str, float], Ask]

log = logging.getLogger(__name__)


class BatchExpired(RequestError):
    code = "batch_expired"


class BatchQueue:
    """The batches that one ingress runs. Create it inside the event loop, and close it there.

    Args:
        ask_for: sends requests with batch priority, so that they harm no SLO.
        num_at_once: returns the number of requests that each batch sends at a time.
        now: returns Unix time in seconds.
    """

    def __init__(
        self,
        store: BatchStore,
        ask_for: AskFor,
        num_at_once: Callable[[], int],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._ask_for = ask_for
        self._num_at_once = num_at_once
        self._now = now
        self._running: dict[str, tuple[str, asyncio.Task[None]]] = {}  # with their tenants
        self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Stop; another ingress, or the next start, goes on with what is not finished."""
        tasks = [self._looking, *(task for _, task in self._running.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self) -> None:
        swept_s = -SWEEP_S
        while True:
            try:
                if time.monotonic() - swept_s >= SWEEP_S:
                    swept_s = time.monotonic()
                    await asyncio.to_thread(self._store.sweep)
                await self._start_some(await asyncio.to_thread(self._store.open_batches))
            except OSError as error:  # for example a disk that is away
                log.warning("Cannot look for batches: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _start_some(self, found: list[tuple[str, str]]) -> None:
        """Start the oldest batch of the tenant that has the fewest here, while there is room."""
        waiting = [each for each in found if each[0] not in self._running]
        while waiting and len(self._running) < MAX_NUM_RUNNING:
            num_running = Counter(tenant for tenant, _ in self._running.values())
            batch_id, tenant = min(waiting, key=lambda each: (num_running[each[1]], each[0]))
            waiting.remove((batch_id, tenant))
            try:
                files = AnswerFiles(*self._store.answers_of(tenant, batch_id))
            except BatchIsRunning:  # in another ingress
                continue
            task = asyncio.create_task(self._run(batch_id, tenant, files))
            self._running[batch_id] = tenant, task

    async def _run(self, batch_id: str, tenant: str, files: AnswerFiles) -> None:
        store = self._store
        try:
            with closing(files):
                batch = await asyncio.to_thread(store.batch, tenant, batch_id)
                if batch.status not in FINAL:
                    await self._answer(batch, tenant, files)
                    await asyncio.to_thread(store.show_answers, tenant, batch)
                await asyncio.to_thread(store.clear, tenant, batch_id)
        except UnknownObject:
            await asyncio.to_thread(store.clear, tenant, batch_id)
        except Exception:  # of the disk
            log.exception("batch %s stopped; it is tried again in %g s", batch_id, SWEEP_S)
            await asyncio.sleep(SWEEP_S)
        finally:
            del self._running[batch_id]

    async def _answer(self, batch: StoredBatch, tenant: str, files: AnswerFiles) -> None:
        """Answer a batch's requests, up to a final status."""
        counts, patience = Counts(), Patience(self._ask_for(tenant, batch.expires_at))

        async def ask(path: str, body: bytes) -> BatchReply:
            try:
                async with asyncio.timeout(batch.expires_at - self._now()):
                    return await patience(path, body)
            except TimeoutError:
                raise BatchExpired("The batch expired before this request was answered.") from None

        batch.status, batch.in_progress_at = "in_progress", batch.in_progress_at or self._unix_s()
        try:
            source = await asyncio.to_thread(self._store.path, tenant, batch.input_file_id)
            running = asyncio.create_task(
                run_batch(
                    source, files, ask, self._num_at_once(), counts=counts, only=batch.endpoint
                )
            )
            try:
                while not running.done():
                    await asyncio.to_thread(self._note, tenant, batch, counts)
                    await asyncio.wait({running}, timeout=LOOK_S)
                await running
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
            has_expired = self._now() >= batch.expires_at
            self._end(batch, counts, "expired" if has_expired else "completed")
        except _Cancelled:
            self._end(batch, counts, "cancelled")
        except RequestError as error:
            batch.errors = BatchErrors([BatchError(error.code, error.message, error.param)])
            self._end(batch, counts, "failed")

    def _note(self, tenant: str, batch: StoredBatch, counts: Counts) -> None:
        """Write how far a batch is. Raises `RequestError` if it is to end."""
        batch.request_counts = _counted(counts)
        self._store.write_batch(tenant, batch)
        if (cancelling_at := self._store.cancelling_at(batch.id)) is not None:
            batch.cancelling_at = cancelling_at
            raise _Cancelled("")
        self._store.check_room(tenant)

    def _end(self, batch: StoredBatch, counts: Counts, status: Status) -> None:
        now = self._unix_s()
        batch.request_counts, batch.status = _counted(counts), status
        batch.finalizing_at = now
        setattr(batch, f"{status}_at", now)

    def _unix_s(self) -> int:
        return int(self._now())


class _Cancelled(RequestError):
    """The tenant cancels a batch."""


def _counted(counts: Counts) -> RequestCounts:
    return RequestCounts(counts.total, counts.completed, counts.failed)
