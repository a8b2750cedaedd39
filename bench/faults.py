"""Tests the real system under faults. Prints a table with one row a gate, and a line of JSON.

    python -m bench.faults [GATE ...] [--short]

Ray Serve, HAProxy, links, NIXL, Redis and HTTP are real. The model is a fake whose tokens depend on
every byte of KV (tests/faults/fake_model.py), so a wrong block shows in the text. Each fault proves
that it took effect (tests/faults/faults.py). Every answer of every gate is compared with the right
one. HAProxy, Serve's controller, the raylet's agent and the command are killed under a whole
`disagg serve` with a bundled model. Without names all gates run at the size of their goals, which
takes about an hour, half of it the soak. `--short` is a rehearsal. The exit status is 1 unless
every gate holds.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from bench import faults_command, faults_memory
from bench.faults_churn import churn, quiet
from bench.faults_gates import CREW, LONE, REHEARSAL, RUSH, RUSH_SLO_S, Gates, Sizes, row
from bench.report import finish, print_table
from tests.faults.oracles import Oracle
from tests.faults.system import Pool, System, running_system
from tests.worker.rehearsal import play_many

POOLS = (
    # Few blocks, so that caches overflow and requests wait; tokens that take their time, so that
    # prompts are worth computing elsewhere.
    Pool(CREW, 1, 4, engine=(("num_gpu_blocks_override", 512),), token_s=0.0003),
    Pool(LONE, 0, 1),
    Pool(
        RUSH,
        1,
        1,
        engine=(("max_num_seqs", 8),),
        step_s=0.03,
        token_s=0.0003,
        settings=(("ttft_slo_s", RUSH_SLO_S),),
    ),
)
Rows = list[dict[str, Any]]
GATES: dict[str, Callable[[Gates], Awaitable[Rows]]] = {
    "decode_killed": Gates.decode_killed,
    "prefill_killed": Gates.prefill_killed,
    "only_decode_killed": Gates.only_decode_killed,
    "decode_frozen": Gates.decode_frozen,
    "redis_down": Gates.redis_down,
    "streams_dropped": Gates.streams_dropped,
    "scale_downs": Gates.scale_downs,
    "rolling_update": Gates.rolling_update,
    "overload": Gates.overload,
    "soak": faults_memory.soak,
}
NUM_END_TO_END = 2000


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = (*IN_PROCESS, *GATES, *faults_command.NAMES)
    parser.add_argument("gates", nargs="*", metavar="GATE", help=", ".join(names))
    parser.add_argument("--short", action="store_true", help="a rehearsal")
    parser.add_argument("--seed", type=int, default=0, help="of property_steps and churn")
    parser.add_argument("--soak-minutes", type=float, help="instead of 30")
    arguments = parser.parse_args()
    unknown = set(arguments.gates) - set(names)
    if unknown:
        parser.error(f"no gate is named {', '.join(sorted(unknown))}")
    wanted = arguments.gates or names
    sizes = REHEARSAL if arguments.short else Sizes()
    if arguments.soak_minutes is not None:
        sizes = replace(sizes, soak_s=60 * arguments.soak_minutes)
    began_s = time.monotonic()
    rows: Rows = []
    for name in (each for each in IN_PROCESS if each in wanted):
        gate_began_s = time.monotonic()
        try:
            found = IN_PROCESS[name](sizes, arguments.seed)
        except Exception as error:
            found = broken(name, error)
        rows += timed(found, gate_began_s)
    in_system = [name for name in GATES if name in wanted]
    if in_system:
        with running_system(*POOLS) as system:
            rows += asyncio.run(pass_gates(system, in_system, sizes))
    on_command = [name for name in faults_command.NAMES if name in wanted]
    if on_command:
        rows += asyncio.run(pass_command_gates(on_command))
    print_table(rows)
    is_held = all(each["held"] == "yes" for each in rows)
    minutes = round((time.monotonic() - began_s) / 60, 1)
    finish("faults", rows, held=is_held, rehearsal=arguments.short, minutes=minutes)
    return int(not is_held)


async def pass_gates(system: System, names: list[str], sizes: Sizes) -> Rows:
    gates, rows = Gates(system, sizes), []
    for name in names:
        began_s = time.monotonic()
        try:
            await asyncio.to_thread(system.wait_whole)
            found = await GATES[name](gates)
            seconds = await asyncio.to_thread(Oracle(system, CREW).check_rest)
            print(f"all blocks and holds back after {seconds:.1f} s", flush=True)
        except Exception as error:
            found = broken(name, error)
        rows += timed(found, began_s)
        print_table(found)
    counts = gates.tally.counts
    num, wrong, endless = counts.total(), counts["wrong"], counts["without end"]
    is_enough = num >= NUM_END_TO_END or sizes.is_rehearsal or len(names) < len(GATES)
    return [
        *rows,
        row("wrong tokens end to end", "0", f"{wrong} of {num} requests", not wrong and is_enough),
        row("requests without a terminal event", "0", f"{endless} of {num}", not endless),
    ]


async def pass_command_gates(names: list[str]) -> Rows:
    """Those that need the command itself, with its own model."""
    gates, rows = faults_command.CommandGates(), []
    for name in names:
        began_s = time.monotonic()
        try:
            found = await gates.run(name)
        except Exception as error:
            found = broken(name, error)
        rows += timed(found, began_s)
        print_table(found)
    counts = gates.counts
    num, bad = counts.total(), counts["wrong"] + counts["hung"]
    return [*rows, row("wrong or hung where the command was hit", "0", f"{bad} of {num}", not bad)]


def broken(name: str, error: Exception) -> Rows:
    """The row of a gate that broke: it must not hide what the others say."""
    traceback.print_exception(error)
    return [row(name, "an answer", f"broke: {error!r}"[:200], False)]


def timed(rows: Rows, began_s: float) -> Rows:
    """The rows of one gate, the first of which says how many minutes it took."""
    rows[0]["minutes"] = f"{(time.monotonic() - began_s) / 60:.1f}"
    return rows


def property_steps(sizes: Sizes, seed: int) -> Rows:
    """Plays of fleets of two prefill and two decode workers with faults, from `seed` on.

    Every answer is compared with that of one engine, and every block is counted
    (tests/worker/fleet.py). A step is one drawn action. The gate is not held either if a kind of
    fault took effect too seldom for the result to mean much.
    """
    with quiet():  # most pulls fail here
        tally = play_many(sizes.num_steps, seed)
    print_table([{"took effect": what, "times": n} for what, n in tally.met.most_common()])
    failures = {what: seeds for what, seeds in tally.failures.items() if seeds}
    for what, seeds in failures.items():
        print(f"{what}: plays {', '.join(map(str, seeds[:20]))}")
    measured = f"{tally.num_steps} steps, {tally.num_plays} plays, {tally.num_requests} requests"
    measured += "".join(f"; {len(seeds)} x {what}" for what, seeds in failures.items())
    if tally.missing:
        measured += f"; too seldom: {', '.join(tally.missing)}"
    is_held = not failures and not tally.missing
    return [row("wrong tokens in the property test", "0 in 100,000 steps", measured, is_held)]


def churn_gate(sizes: Sizes, seed: int) -> Rows:
    found = churn(*sizes.churn, seed)
    print_table([{"figure": name, "": each} for name, each in found.items()])
    figures = [found[key] for key in ("without_terminal_event", "requests", "joins", "leaves")]
    measured = "{} of {} ({} joins, {} leaves)".format(*figures)
    goal = "0 of 1536 (250 joins, 150 leaves)"
    return [row("requests without a terminal event in churn", goal, measured, found["is_held"])]


# Gates that need no cluster.
IN_PROCESS: dict[str, Callable[[Sizes, int], Rows]] = {
    "property_steps": property_steps,
    "churn": churn_gate,
}


if __name__ == "__main__":
    sys.exit(main())
