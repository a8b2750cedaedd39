"""Measures what a KV transfer adds to the second token of a long prompt.

    python -m bench.hand_over [--shape 160m] [--prompt 4096] [--dtype bfloat16] [--tiny]

Two engines with equal random weights, one thread and one process each, are connected by NIXL. A
prompt is prefilled in the other process, its blocks are pulled here, and decoding goes on here. In
turns with this, the prompt is computed here alone. Figures are medians of `--rounds`. The ticket
comes with the first token, so no KV moves before. `second token` is the time from the prompt to the
token after the first one, without the request's way. `pull of all here` is the time of the pull as
a share of the time without a transfer.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import msgspec
import torch

from bench.report import finish, print_table
from bench.shapes import SHAPES
from bench.two_engines import READER, SOURCE, HandOvers, Side, serve
from disagg.kvtransfer.ticket import Peer

CPU = torch.device("cpu")
CPU_BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="160m")
    parser.add_argument("--prompt", type=int, default=4096, help="tokens")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    parser.add_argument("--serve", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.shape, arguments.prompt, arguments.rounds = "tiny", 64, 1
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    num_blocks = 2 * arguments.prompt // CPU_BLOCK_SIZE + 8  # one prompt, and what is being freed
    if arguments.serve:
        serve(Side(SOURCE, CPU, arguments.shape, num_blocks, dtype))
        return
    flags = ["--shape", arguments.shape, "--prompt", str(arguments.prompt)]
    flags += ["--dtype", arguments.dtype, "--serve", SOURCE]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.hand_over", *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        side = Side(READER, CPU, arguments.shape, num_blocks, dtype)
        side.transport.add_peer(msgspec.json.decode(process.stdout.readline(), type=Peer))
        row = HandOvers(side, process).row(arguments.prompt, arguments.rounds)
        row["pull of all here"] = row["pull ms"] / row["all here instead ms"]
        print_table([row])
        finish("hand_over", [row], shape=arguments.shape, dtype=arguments.dtype)
        side.transport.close()
    finally:
        process.stdin.close()
        process.wait(60)


if __name__ == "__main__":
    main()
