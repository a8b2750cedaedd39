"""Searches for wrong tokens under faults: the property test with many randomised steps.

    python -m bench.property_steps [--steps 100000] [--seed 0]

Each play is a fleet of two prefill and two decode workers with faults (tests/worker/fleet.py).
Every answer is compared with that of one engine, and every block is counted. A step is one drawn
action. The exit status is 1 if a check failed, or if a kind of fault took effect too seldom for the
result to mean much. `--seed SEED --steps 1` repeats a play that failed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time

from bench.report import finish, print_table
from tests.worker.rehearsal import play_many


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.property_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first play")
    arguments = parser.parse_args()
    log = logging.getLogger("disagg")
    level = log.level
    log.setLevel(logging.ERROR)  # most pulls fail here
    began_s = time.perf_counter()
    tally = play_many(arguments.steps, arguments.seed)
    log.setLevel(level)
    failures = tally.failures
    print_table([{"took effect": what, "times": n} for what, n in tally.met.most_common()])
    for what, seeds in failures.items():
        if seeds:
            print(f"{what}: plays {', '.join(map(str, seeds[:20]))}")
    finish(
        "property_steps",
        [],
        steps=tally.num_steps,
        plays=tally.num_plays,
        requests=tally.num_requests,
        faults=dict(tally.met.most_common()),
        too_seldom=tally.missing,
        wrong_tokens=len(failures["wrong tokens"]),
        leaked_blocks=len(failures["blocks lost"]),
        never_ended=len(failures["never ended"]),
        other_failures=len(failures["other"]),
        seconds=round(time.perf_counter() - began_s, 1),
    )
    return int(any(failures.values()) or bool(tally.missing))


if __name__ == "__main__":
    sys.exit(main())
