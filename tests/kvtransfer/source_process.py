"""A source in a process of its own, for tests: `python -m tests.kvtransfer.source_process`.

Prints its peer as one line of JSON, then answers every command on stdin with one line: "ticket ID
BLOCK..." with a ticket, "released" with the tickets that readers gave back so far, "churn" with
"ok", after which blocks 0 to 23 are used again and again in between commands. Of several ranks,
each has a transport of its own here.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time

import msgspec

from disagg.kvtransfer.nixl_transport import NixlTransport
from disagg.kvtransfer.transport import TicketReleased
from tests.kvtransfer.memory import Memory, peer_of, rank_memories


def main(epoch: int, block_nbytes: int, ucx: dict[str, str], num_ranks: int) -> None:
    if num_ranks == 1:
        memories = [Memory("source", epoch=epoch, block_nbytes=block_nbytes)]
    else:
        memories = rank_memories("source", num_ranks, epoch=epoch)
    memory = memories[0]
    side, *others = (
        NixlTransport(each.slab, each.stamps, clock=time.monotonic, interface="lo", ucx=ucx)
        for each in memories
    )
    released: list[str] = []
    between_steps = threading.Lock()

    def churn() -> None:
        rng = random.Random(epoch)
        while True:
            with between_steps:
                block_id = rng.randrange(24)
                memory.reuse(block_id)
                for each in memories[1:]:
                    each.fill(block_id)

    def answer(command: str, arguments: list[str]) -> object:
        if command == "ticket":
            return memory.ticket(arguments[0], map(int, arguments[1:]))
        if command == "released":
            events = side.poll()
            released.extend(e.ticket_id for e in events if isinstance(e, TicketReleased))
            return released
        threading.Thread(target=churn, daemon=True).start()
        return "ok"

    peer = peer_of([each.peer for each in (side, *others)])
    print(msgspec.json.encode(peer).decode(), flush=True)
    for line in sys.stdin:
        command, *arguments = line.split()
        with between_steps:
            reply = answer(command, arguments)
        print(msgspec.json.encode(reply).decode(), flush=True)
    for each in (side, *others):
        each.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4]))
