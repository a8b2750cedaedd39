"""Measures what each part of a large fleet costs an ingress and a worker, in bytes and CPU time.

    python -m bench.scale [--tiny]

Messages are encoded and decoded as on a link, without sockets. `router us` is the time of the
router's fleet view and prefix index for a message, in a fleet of `NUM_WORKERS`. A worker has
`NUM_SOURCES` measured pairs. No frame may hold the ingress's loop for more than 5 ms. Figures are
CPU time of the thread. docs/scale.md adds them up for fleets of 100 to 10,000 workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec

from bench.report import finish, print_table
from bench.routing import NUM_BLOCKS, decide, new_fleet, new_request, new_status
from disagg.links.frames import frame
from disagg.links.reports import PART_NAMES, LinkReports, restored
from disagg.messages import (
    HoldCounts,
    KVEvent,
    Peers,
    PullCounts,
    Snapshot,
    StepFrame,
    TokenDelta,
    TransferFigure,
    WorkerStatus,
    decode_to_ingress,
    decode_to_worker,
    encode,
)
from disagg.router.fleet import Fleet

NUM_WORKERS, NUM_SOURCES, NUM_TURNS = 1024, 32, 2000
EVENT_BLOCKS = 8
AGENT_NBYTES = 800  # of a NIXL agent's metadata, about
GOAL_MS = 5.0


def timed_us(call: Callable[[int], Any], num_turns: int) -> float:
    """Median time of a call."""
    took_s = []
    for turn in range(num_turns):
        began_s = time.thread_time()
        call(turn)
        took_s.append(time.thread_time() - began_s)
    return sorted(took_s)[num_turns // 2] * 1e6


def full_status(rng: random.Random) -> WorkerStatus:
    """As a decode worker says it that has pulled from many."""
    figures = (TransferFigure(f"m-prefill-{n:08x}", 1e-3, 1e10, "rc") for n in range(NUM_SOURCES))
    return msgspec.structs.replace(
        new_status(rng),
        transfers=tuple(figures),
        pulls=(PullCounts("rc", 10_000, nbytes=1 << 40, seconds=1.0),),
        holds=HoldCounts(10_000),
    )


class Costs:
    """Rows of the table, and the fleet that they are measured on."""

    def __init__(self, num_workers: int, num_turns: int) -> None:
        self.rng = random.Random(1)
        self.num_turns = num_turns
        self.fleet: Fleet = new_fleet(num_workers, new_request(8192), self.rng, float("inf"))
        self.names = list(self.fleet.view().workers)
        self.rows: list[dict[str, Any]] = []

    def add(
        self,
        part: str,
        message: Any,
        decode: Callable[[bytes], Any],
        take: Callable[[int], Any] | None = None,
    ) -> None:
        raw = encode(message)
        few = max(3, self.num_turns // 50) if len(raw) > 10_000 else self.num_turns
        self.rows.append(
            {
                "part": part,
                "bytes": len(frame(raw)),
                "encode us": timed_us(lambda _: encode(message), few),
                "decode us": timed_us(lambda _: decode(raw), few),
                "router us": timed_us(take, few) if take is not None else 0.0,
            }
        )

    def reports(self) -> None:
        last = full_status(self.rng)
        statuses = [
            msgspec.structs.replace(last, num_context_tokens=n, num_running=n % 32)
            for n in range(64)
        ]

        def take(turn: int) -> None:
            name = self.names[turn % len(self.names)]
            self.fleet.worker_stepped(name, (), statuses[turn % 64])

        whole = StepFrame(1, (), (), last)
        self.add("report, all of it", whole, decode_to_ingress, take)
        with closing(asyncio.new_event_loop()) as loop:
            reports = LinkReports(loop, lambda report: None)
            reports.restart(last)
            changed = reports.after_step((), statuses[1])
        assert changed is not None and changed.status is not None and changed.kept

        def merge(raw: bytes) -> None:
            step = decode_to_ingress(raw)
            assert isinstance(step, StepFrame) and step.status is not None
            restored(step.status, step.kept, last)

        self.add("report, what has changed", StepFrame(1, (), *changed), merge, take)

    def names_of(self, number: int) -> tuple[bytes, ...]:
        return tuple(self.rng.randbytes(16) for _ in range(number))

    def caches(self) -> None:
        event = KVEvent("stored", self.names_of(EVENT_BLOCKS))
        events = [KVEvent("stored", self.names_of(EVENT_BLOCKS)) for _ in range(self.num_turns)]
        index = self.fleet.index
        self.add(
            f"{EVENT_BLOCKS} blocks cached",
            StepFrame(1, (), (event,)),
            decode_to_ingress,
            lambda turn: index.apply(self.names[0], (events[turn],)),
        )
        parts = [
            KVEvent("stored", self.names_of(PART_NAMES)) for _ in range(self.num_turns // 50 + 3)
        ]
        self.add(
            f"{PART_NAMES} blocks of a snapshot",
            StepFrame(1, (), (parts[0],)),
            decode_to_ingress,
            lambda turn: index.apply(self.names[1], (parts[turn],)),
        )
        names = self.names_of(NUM_BLOCKS)
        whole = Snapshot(1, names, new_status(self.rng))
        self.add(
            f"{NUM_BLOCKS} blocks, at once",
            whole,
            decode_to_ingress,
            lambda _: index.snapshot(self.names[2], names),
        )

    def others(self) -> None:
        record = self.fleet.view().workers[self.names[0]].record
        peer = msgspec.convert(
            msgspec.to_builtins(record.peer) | {"agent": bytes(AGENT_NBYTES)}, type(record.peer)
        )
        self.add("address of a peer", Peers((peer,)), decode_to_worker)
        delta = TokenDelta(7, (1234,))
        self.add("a token of one stream", StepFrame(1, (delta,)), decode_to_ingress)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    arguments = parser.parse_args()
    num_workers, num_turns = (40, 100) if arguments.tiny else (NUM_WORKERS, NUM_TURNS)
    costs = Costs(num_workers, num_turns)
    costs.reports()
    costs.caches()
    costs.others()
    print_table(costs.rows)
    size = (64, 100) if arguments.tiny else (8192, 200)
    decisions = [decide(num_workers, *size, case, float("inf")) for case in ("quiet", "all spoke")]
    print_table(decisions)
    finish("scale", costs.rows, decisions=decisions, workers=num_workers, goal_ms=GOAL_MS)


if __name__ == "__main__":
    main()
