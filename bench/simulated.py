"""What the benches of simulated fleets have in common: flags, and the made-up load of a case.

Router, admission, scheduler and autoscaler are real; engines and network are simulated (`disagg
sim`), so the figures do not depend on the machine, and equal arguments give equal ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from disagg.host import usable_cores
from disagg.tools.sim.loads import LOADS


def parse(
    name: str, doc: str, loads: Sequence[str], num_requests: int, tiny: int
) -> argparse.Namespace:
    """The flags of a bench of simulations.

    Args:
        tiny: number of requests of a rehearsal, which has the first load alone.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=loads, metavar="LOAD")
    parser.add_argument("--num-requests", type=int, default=num_requests)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--tiny", action="store_true", help="a rehearsal: figures mean nothing")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.loads, arguments.num_requests = arguments.loads[:1], tiny
        arguments.processes = 1
    return arguments
