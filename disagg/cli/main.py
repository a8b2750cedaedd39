"""`disagg`: the command line. One module a verb; this file only chooses."""

from __future__ import annotations

import argparse
import sys

from disagg.cli import cascade, chat, doctor, plan, serve, sim
from disagg.errors import DisaggError


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Errors meant for the user are printed as sentences, without a traceback."""
    parser = argparse.ArgumentParser(
        prog="disagg",
        description="Large language models served with prefill and decode on separate workers.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for verb in (serve, chat, plan, sim, cascade, doctor):
        name = verb.__name__.rsplit(".", 1)[-1]
        subparser = verbs.add_parser(name, help=(verb.__doc__ or "").split("\n")[0])
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run)
    chosen = parser.parse_args(arguments)
    try:
        status: int = chosen.run(chosen)
    except DisaggError as error:
        at_fault = f" (--{error.param.replace('_', '-')})" if error.param else ""
        print(f"disagg: {error.message}{at_fault}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
