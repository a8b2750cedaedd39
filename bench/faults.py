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

from bench import faults_command, faults_long, faults_memory
from bench.__main__ import run
from bench.faults_gates import CREW, LONE, REHEARSAL, Gates, Sizes, row
from bench.report import finish, print_table
from tests.faults.oracles import Oracle
from tests.faults.system import Pool, System, running_system

POOLS = (
    # Few blocks, so that caches overflow and requests wait; tokens that take their time, so that
    # prompts are worth computing elsewhere.
    Pool(CREW, 1, 4, engine=(("num_gpu_blocks_override", 512),), token_s=0.0003),
    Pool(LONE, 0, 1),
    Pool(
        faults_long.RUSH,
        1,
        1,
        engine=(("max_num_seqs", 8),),
        step_s=0.03,
        token_s=0.0003,
        settings=(("ttft_slo_s", faults_long.RUSH_SLO_S),),
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
    "overload": faults_long.overload,
    "soak": faults_memory.soak,
}
IN_PROCESS = ("property_steps", "churn")
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
        rows += timed(in_process(name, sizes), gate_began_s)
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
        except Exception as error:  # one gate that breaks must not hide what the others say
            traceback.print_exc()
            found = [row(name, "an answer", f"broke: {error!r}"[:200], False)]
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
            traceback.print_exc()
            found = [row(name, "an answer", f"broke: {error!r}"[:200], False)]
        rows += timed(found, began_s)
        print_table(found)
    counts = gates.counts
    num, bad = counts.total(), counts["wrong"] + counts["hung"]
    return [*rows, row("wrong or hung where the command was hit", "0", f"{bad} of {num}", not bad)]


def timed(rows: Rows, began_s: float) -> Rows:
    """The rows of one gate, the first of which says how many minutes it took."""
    rows[0]["minutes"] = f"{(time.monotonic() - began_s) / 60:.1f}"
    return rows


def in_process(name: str, sizes: Sizes) -> Rows:
    """Gates that need no cluster; benches of their own."""
    is_short = sizes.is_rehearsal
    if name == "property_steps":
        found = run(name, ["--steps", "2000"] if is_short else [])
        figures = [found.get(key) for key in ("steps", "wrong_tokens", "leaked_blocks")]
        measured = "{} steps, {} wrong, {} leaks".format(*figures)
        is_held = "failed" not in found
        return [row("wrong tokens in the property test", "0 in 100,000 steps", measured, is_held)]
    few = ["--requests", "100", "--joins", "16", "--leaves", "10"]
    found = run("faults_churn", few if is_short else [])
    figures = [found.get(key) for key in ("without_terminal_event", "requests", "joins", "leaves")]
    measured = "{} of {} ({} joins, {} leaves)".format(*figures)
    goal = "0 of 1536 (250 joins, 150 leaves)"
    is_held = found.get("is_held") is True  # nothing is there if it ended early
    return [row("requests without a terminal event in churn", goal, measured, is_held)]


if __name__ == "__main__":
    sys.exit(main())
