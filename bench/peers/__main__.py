"""Measures tokens/s of our engine beside other engines, each in its own environment and process.

    python -m bench.peers [--shape 15m 160m smollm2] [--peer NAME...] [--case NAME...] [--tiny]

The cases are one prompt of 1,024 tokens, then 1, 8 and 32 requests at once with 128 tokens in and
128 out, prefill included. Checkpoints are Llama shapes in bf16 with random
weights (`smollm2` has those of SmolLM2-135M-Instruct). Decoding is greedy and ignores the end of a
sequence. All engines have as many threads and the same prompts, and take turns. An engine that took
30 s in a case gets no more turns in it.

An engine that is not installed is installed first (`.peers/`, some GB). One that cannot be
installed, does not run or stops is left out from there on, with the reason (`absent`). `of best` is
our speed relative to the fastest of the others. `RSS MB` is read after all cases. `same first` is
the share of answers whose first token is the same as ours. It is below 1 because prompts and most
weights are random, so near-ties are common.

`--peer generate continuous` installs nothing: both are transformers'. With `--cpu-time` and one
thread, ratios are fair on a busy machine.
"""

from __future__ import annotations

import argparse
import itertools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.peers.checkpoint import kept
from bench.peers.children import NotRunning
from bench.peers.contenders import AUTO, ENGINES, OURS, Contender, start
from bench.report import ENOUGH_S, finish, print_table, take_turns
from bench.shapes import SHAPES

NUM_UNCOUNTED = 8  # tokens of each answer in the turn that does not count
OF_OUR_ENVIRONMENT = [name for name, engine in ENGINES.items() if not engine.environment]

Row = dict[str, Any]
Counts = tuple[int, int, int]  # requests at once, tokens in and tokens out


def cases(scale: int) -> dict[str, tuple[int, int, int]]:
    """Requests at once, tokens in and tokens out."""
    cases = {"prefill": (1, 1024 // scale, 1)}
    for num_seqs in (1, 8, 32):
        cases[f"{num_seqs} at once"] = (max(num_seqs // scale, 1), 128 // scale, 128 // scale)
    return cases


class LeftOut(Exception):
    """A contender failed in its turn; the rest can go on without it."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(reason)
        self.name = name


class Turns:
    """One case: every contender answers the same prompts in the same turn."""

    def __init__(self, shape: str, case: Counts) -> None:
        self.first_tokens: dict[str, list[int]] = {}
        self._vocab = SHAPES[shape][0]
        self._case = case

    def runs(self, contenders: dict[str, Contender]) -> dict[str, Callable[[], float]]:
        return {name: self._run(name, contender) for name, contender in contenders.items()}

    def same_first(self, name: str) -> float:
        """Share of answers that begin as ours; slow ones and fast ones had fewer or more turns."""
        pairs = list(zip(self.first_tokens[name], self.first_tokens[OURS], strict=False))
        return sum(one == other for one, other in pairs) / len(pairs)

    def _run(self, name: str, contender: Contender) -> Callable[[], float]:
        num_seqs, num_in, num_counted = self._case
        self.first_tokens[name] = []
        prompts_rng = random.Random(num_seqs)  # new prompts in each turn: no prefix is cached
        turns = itertools.count()

        def run() -> float:
            """Raises `LeftOut`."""
            is_counted = next(turns) > 0
            num_out = num_counted if is_counted else min(num_counted, NUM_UNCOUNTED)
            prompts = [
                [prompts_rng.randrange(1, self._vocab) for _ in range(num_in)]
                for _ in range(num_seqs)
            ]
            try:
                seconds, outputs = contender.generate(prompts, num_out)
            except NotRunning as error:
                raise LeftOut(name, str(error)) from error
            lengths = [len(output) for output in outputs]
            if lengths != [num_out] * num_seqs:
                raise LeftOut(name, f"{lengths} tokens instead of {num_out} each")
            self.first_tokens[name] += [output[0] for output in outputs]
            return seconds

        return run


def measure(
    shape: str, names: list[str], measured: dict[str, Counts], threads: int, rounds: int, clock: str
) -> tuple[list[Row], list[Row]]:
    """Rows of speed, one a case, and of the contenders."""
    with tempfile.TemporaryDirectory() as scratch:
        contenders, absent = start(names, kept(shape), threads, Path(scratch), clock)
        if OURS in absent:
            raise SystemExit(f"{OURS}: {absent[OURS]}")
        try:
            speeds, same = [], {}
            for case, counts in measured.items():
                turns = Turns(shape, counts)
                seconds = measure_case(turns, contenders, absent, rounds)
                speeds.append(_speeds(shape, case, counts, seconds, names))
                print_table(speeds[-1:])  # all of them take long, and the next one may fail
                same = {name: turns.same_first(name) for name in contenders}
            return speeds, [
                {
                    "shape": shape,
                    "engine": name,
                    "RSS MB": contenders[name].resident_mb() if name in contenders else None,
                    "same first": same.get(name),
                    "absent": absent.get(name),
                }
                for name in names
            ]
        finally:
            for contender in contenders.values():
                contender.close()


def measure_case(
    turns: Turns, contenders: dict[str, Contender], absent: dict[str, str], rounds: int
) -> dict[str, float]:
    """Median seconds of each. Who fails goes to `absent`, and the case begins anew without it."""
    while True:
        try:
            return take_turns(turns.runs(contenders), rounds, ENOUGH_S)
        except LeftOut as failed:
            if failed.name == OURS:
                raise
            contenders.pop(failed.name).close()
            absent[failed.name] = str(failed)


def _speeds(
    shape: str, case: str, counts: Counts, seconds: dict[str, float], names: list[str]
) -> Row:
    num_seqs, num_in, num_out = counts
    num_counted = num_in if num_out == 1 else num_seqs * num_out
    rates = {name: num_counted / seconds[name] for name in seconds}
    others = (rates[name] for name in rates if not name.startswith(OURS))
    best = max(others, default=None)
    return {
        "shape": shape,
        "case": case,
        **{name: rates.get(name) for name in names},
        "of best": rates[OURS] / best if best else None,
        "auto of best": rates[AUTO] / best if best and AUTO in rates else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["15m", "160m"])
    parser.add_argument("--peer", nargs="+", choices=[*ENGINES][1:], default=[*ENGINES][1:])
    parser.add_argument("--case", nargs="+", choices=cases(1), default=[*cases(1)])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="count CPU seconds of each engine's process"
    )
    parser.add_argument("--tiny", action="store_true", help="a rehearsal that installs nothing")
    arguments = parser.parse_args()
    shapes, names, threads = arguments.shape, [OURS, *arguments.peer], arguments.threads
    rounds, scale = arguments.rounds, 1
    if arguments.tiny:
        shapes, names, threads, rounds, scale = ["tiny"], OF_OUR_ENVIRONMENT, 1, 1, 8
    measured = {name: cases(scale)[name] for name in arguments.case}
    speeds: list[Row] = []
    engines: list[Row] = []
    clock = "cpu_s" if arguments.cpu_time else "seconds"
    for shape in shapes:
        of_shape = measure(shape, names, measured, threads, rounds, clock)
        speeds += of_shape[0]
        engines += of_shape[1]
    print_table(speeds)
    print_table(engines)
    finish("peers", speeds, engines=engines, unit="tokens/s", threads=threads, rounds=rounds)


if __name__ == "__main__":
    main()
