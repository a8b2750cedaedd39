"""Very many plays, one after another: what they met, and whether any oracle spoke up."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field

from tests.worker.fleet import BlocksLost, NeverEnded, WrongTokens, assert_equivalent
from tests.worker.plays import Dice, play_in_trouble

# What must have happened this often in 100,000 steps; else the plays prove little.
LEAST_PER_100_000_STEPS = {
    "pulled": 500,
    "pull torn": 50,
    "granted": 300,
    "prefetched": 300,
    "wire broke": 50,
    "source gone": 50,
    "pull hung": 50,
    "hung with a dead source": 3,
    "word lost": 50,
    "word late": 50,
    "word doubled": 50,
    "hold expired": 300,
    "hold broken": 300,
    "released in vain": 200,
    "ticket shown twice": 300,
    "ticket: late": 200,
    "ticket: lose": 200,
    "ticket: spoil": 200,
    "ticket: give back": 200,
    "ticket: leave": 200,
    "cancelled": 100,
    "moved, cancelled": 300,
    "moved, worker_lost": 300,
    "engine_failed": 100,
    "moved, unavailable": 200,
    "worker died": 100,
    "engine broke": 300,
    "drained": 300,
    "left in mid-answer": 100,
    "link cut": 100,
    "preempted": 100,
    "draft accepted": 500,
    "draft refused": 300,
    "store away": 100,
    "hit in the store": 100,
    "hit in host memory": 100,
    "deadline_exceeded": 300,
    "stop": 100,
    "length": 3000,
    "gone": 300,
}


@dataclass
class Tally:
    """
    num_steps: drawn actions; the turns in which a play comes to rest do not count.
    met: how often a fault took effect, and how requests ended.
    failures: seeds of the plays that an oracle did not let pass, by what it found.
    """

    num_plays: int = 0
    num_steps: int = 0
    num_requests: int = 0
    met: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[int]] = field(
        default_factory=lambda: {
            "wrong tokens": [],
            "blocks lost": [],
            "never ended": [],
            "other": [],
        }
    )

    @property
    def missing(self) -> dict[str, int]:
        """What happened too seldom, and how often that was. Short runs are given their spread."""
        goals = {
            what: least * self.num_steps / 100_000
            for what, least in LEAST_PER_100_000_STEPS.items()
        }
        return {
            what: self.met[what]
            for what, goal in goals.items()
            if self.met[what] < goal - 3 * math.sqrt(goal)
        }


def play_many(num_steps: int, first_seed: int = 0) -> Tally:
    """Plays of consecutive seeds, until they have so many steps."""
    tally = Tally()
    for seed in itertools.count(first_seed):
        if tally.num_steps >= num_steps:
            return tally
        play = play_in_trouble(Dice(seed), num_trips=range(10, 25))
        tally.num_plays += 1
        tally.num_steps += len(play.schedule)
        tally.num_requests += len(play.trips)
        try:
            fleet = assert_equivalent(play)
        except WrongTokens:
            tally.failures["wrong tokens"].append(seed)
        except BlocksLost:
            tally.failures["blocks lost"].append(seed)
        except NeverEnded:
            tally.failures["never ended"].append(seed)
        except (AssertionError, LookupError, ValueError):
            tally.failures["other"].append(seed)
        else:
            tally.met.update(fleet.met)
            tally.met.update(fleet.ends)
    raise AssertionError("the seeds have no end")
