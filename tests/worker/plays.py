"""What is to happen to a fleet: requests, their ways, and trouble; drawn beforehand."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, TypeVar

from hypothesis import strategies as st

from disagg.kv_groups import KVGroups, Window
from disagg.kvtransfer.ticket import KVTicket
from disagg.messages import GenerateRequest
from tests.engine.fake_runner import draft_of
from tests.engine.workload import STOP_IDS
from tests.generate_requests import new_request

T = TypeVar("T")

# What becomes of a ticket: it is used, used late, lost on the way, changed on the way; or the
# client has gone, and the ticket is given back or not even that.
TICKETS = ("use", "use", "use", "late", "lose", "spoil", "give back", "leave")

NUM_WORKERS = 4  # 0 and 1 prefill, 2 and 3 decode, unless a trip says otherwise


@dataclass(frozen=True)
class Trip:
    """A request, and the way that it is to take."""

    at: int  # place in the schedule
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int = 0
    first: int = 0
    second: int = 2
    hand_over: bool = True
    ticket: str = "use"  # or one of TICKETS
    deadline_s: float = 1e9
    draft: tuple[int, int] = (0, 0)  # right tokens, and wrong ones after them
    prefix_source: int | None = None  # who is asked before for what it has of the prompt


@dataclass(frozen=True)
class Play:
    block_size: int
    num_blocks: tuple[int, ...]
    trips: tuple[Trip, ...]
    schedule: bytes = b""
    fates: bytes = b""
    max_num_seqs: int = 3
    max_num_batched_tokens: int = 12
    caching: bool = True
    store_nbytes: int = 0  # 0: no cold tier
    host_blocks: int = 0  # 0: no host tier
    windows: tuple[Window, ...] = (None,)


class Dice:
    """Where plays come from: seeded, which is fast; or Hypothesis, which can shrink them."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def pick(self, options: SequenceOf[T]) -> T:
        return self._rng.choice(options)

    def octets(self, least: int, most: int) -> bytes:
        return self._rng.randbytes(self._rng.randint(least, most))


class DrawnDice(Dice):
    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw

    def pick(self, options: SequenceOf[T]) -> T:
        return self._draw(st.sampled_from(options))

    def octets(self, least: int, most: int) -> bytes:
        return self._draw(st.binary(min_size=least, max_size=most))


def play_in_trouble(
    dice: Dice,
    *,
    num_trips: SequenceOf[int] = range(2, 11),
    of_windows: SequenceOf[tuple[Window, ...]] = ((None,),),
) -> Play:
    """Everything goes wrong, in caches that are too small, with prefixes that many share."""

    def tokens(least: int, most: int) -> tuple[int, ...]:
        return tuple(4 + octet % 3 for octet in dice.octets(least, most))

    block_size = dice.pick([4, 2, 1])
    prefixes = [tokens(2, 14) for _ in range(dice.pick([1, 2, 3, 4]))]
    trips = [
        Trip(
            at=dice.pick(range(120)),
            prompt=dice.pick(prefixes) + tokens(1, 6),
            max_tokens=dice.pick([4, 2, 7, 1]),
            seed=dice.pick([0, 1]),
            first=dice.pick([0, 1, 0, 1, 2, 3]),
            second=dice.pick([2, 3, 2, 3, 0, 1]),
            hand_over=dice.pick([True, True, True, False]),
            ticket=dice.pick(TICKETS),
            deadline_s=dice.pick([1e9] * 8 + [0.5, 3.0, 30.0]),
            draft=dice.pick([(0, 0)] * 4 + [(0, 3), (1, 1), (2, 3), (3, 0), (6, 1), (9, 0)]),
            prefix_source=dice.pick([None, None, *range(NUM_WORKERS)]),
        )
        for _ in range(dice.pick(num_trips))
    ]
    longest = max(len(trip.prompt) + trip.max_tokens for trip in trips)
    windows = dice.pick(of_windows)
    least = KVGroups(windows, block_size).num_at_most(longest)
    return Play(
        windows=windows,
        block_size=block_size,
        num_blocks=tuple(least + dice.pick(range(5)) for _ in range(NUM_WORKERS)),
        trips=tuple(trips),
        schedule=dice.octets(90, 200),
        fates=dice.octets(20, 40) if dice.pick([True, True, False]) else b"",
        max_num_seqs=dice.pick([1, 2, 3]),
        max_num_batched_tokens=dice.pick(range(3, 17)),
        caching=dice.pick([True, True, True, False]),
        store_nbytes=dice.pick([0, 1 << 20, 10 * 8 * block_size]),
        host_blocks=dice.pick([0, 4, 12, 60]),
    )


def play_in_quiet(dice: Dice) -> Play:
    """Room for everybody, prompts that share nothing, and nothing worse than a drain."""
    trips = [
        Trip(
            at=dice.pick(range(30)),
            prompt=(10 + i, *(4 + octet % 3 for octet in dice.octets(0, 16))),
            max_tokens=dice.pick([4, 2, 7, 1]),
            first=dice.pick([0, 1]),
            second=dice.pick([2, 3]),
            hand_over=dice.pick([True, True, False]),
            ticket=dice.pick(["use", "late"]),
        )
        for i in range(dice.pick(range(1, 9)))
    ]
    return Play(
        block_size=dice.pick([4, 2, 1]),
        num_blocks=(200,) * NUM_WORKERS,
        trips=tuple(trips),
        schedule=bytes(_turn_or_drain(octet) for octet in dice.octets(0, 60)),
        max_num_batched_tokens=dice.pick(range(3, 17)),
    )


def _turn_or_drain(octet: int) -> int:
    """An action of `Fleet.run`.

    The last worker is not drained: whom it refuses goes to the first one, and if that issued the
    ticket itself, it computes again what of the prompt fills no block.
    """
    worker = octet % NUM_WORKERS
    is_drain = octet > 250 and worker < NUM_WORKERS - 1
    return (31 if is_drain else 0) + 32 * worker


def request_of(
    trip: Trip, request_id: str, block_size: int, windows: tuple[Window, ...] = (None,)
) -> GenerateRequest:
    return new_request(
        trip.prompt,
        block_size=block_size,
        request_id=request_id,
        max_tokens=trip.max_tokens,
        seed=trip.seed,
        stop_token_ids=tuple(sorted(STOP_IDS)),
        temperature=0.0,
        deadline_unix_s=trip.deadline_s,
        draft_token_ids=draft_of(trip.prompt, *trip.draft, trip.seed, windows),
    )


def spoiled(ticket: KVTicket, kind: int) -> KVTicket:
    """A ticket that nobody issued, in one of the ways that a reader must notice.

    Generations are those of the past: those of the future may come true before they are read.
    """
    ids, generations = ticket.block_ids, ticket.generations
    changes: list[dict[str, Any]] = [
        {"epoch": ticket.epoch + 1},
        {"layout": "another model's"},
        {"source_id": "nobody"},
        {"ticket_id": ""},
        {"generations": tuple(generation - 1 for generation in generations)},
        {"generations": generations[1:]},
        {"generations": (*generations, 1)},
        {"block_ids": (-1, *ids[1:])},
        {"block_ids": (1 << 31, *ids[1:])},
        {"block_ids": (*ids, *ids), "generations": (*generations, *generations)},
        {"num_tokens": 0},
        {"num_tokens": -1},
        {"num_tokens": 1 << 40},
    ]
    return dataclasses.replace(ticket, **changes[kind % len(changes)])
