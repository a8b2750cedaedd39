"""`disagg`: the command line. Each command has its own module; this file selects it."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from disagg.errors import DisaggError

VERBS = {
    "serve": "disagg.cli.serve",
    "chat": "disagg.tools.chat",
    "batch": "disagg.tools.batch",
    "bench": "disagg.tools.bench.command",
    "top": "disagg.tools.top",
    "why": "disagg.tools.why",
    "plan": "disagg.tools.plan.command",
    "sim": "disagg.tools.sim.command",
    "cascade": "disagg.tools.calibrate.command",
    "config": "disagg.tools.config",
    "doctor": "disagg.tools.doctor.command",
    "collect-env": "disagg.tools.collect_env",
    "completion": "disagg.tools.completion",
}


class _ShowVersion(argparse.Action):
    """Prints the installed version. `importlib.metadata` is imported only then."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        from importlib.metadata import version

        print(f"disagg {version('disagg')}")
        parser.exit()


def main(arguments: list[str] | None = None) -> int:
    """Run one command. Errors meant for the user are printed as sentences, without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    interrupted = signal.getsignal(signal.SIGINT)
    if arguments is None and interrupted is signal.default_int_handler:
        # Ctrl-C during the imports then ends the process without a traceback.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Only the requested command is imported, so that `serve` handles signals as early as possible.
    parser, verbs = parser_of([each for each in VERBS if each in words[:1]] or VERBS)
    parser.set_defaults(words=words)
    chosen, unknown = parser.parse_known_args(words)
    if unknown:  # reported with the usage of the command, which has the flags
        verbs[chosen.verb].error(f"unrecognized arguments: {' '.join(unknown)}")
    if signal.getsignal(signal.SIGINT) is not interrupted:
        signal.signal(signal.SIGINT, interrupted)
    try:
        status: int = chosen.run(chosen)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`: nobody reads on, and nothing is left to be written at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except DisaggError as error:
        print(
            f"disagg: {error.message}{at_fault(error, verbs[chosen.verb])}",
            file=sys.stderr,
        )
        return 2
    return status


def parser_of(
    names: Iterable[str],
) -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """The parser with these commands, and that of each command."""
    parser = argparse.ArgumentParser(
        prog="disagg",
        description="Serve large language models with prefill and decode on separate workers.",
    )
    parser.add_argument(
        "--version", action=_ShowVersion, nargs=0, help="print the version and exit"
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    for name in names:
        verb = importlib.import_module(VERBS[name])
        subparser = verbs.add_parser(name, help=(verb.__doc__ or "").split("\n")[0])
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run)
    return parser, verbs.choices


def at_fault(error: DisaggError, parser: argparse.ArgumentParser) -> str:
    """Name the flag that the error is about; "" if the command has no such flag."""
    actions = list(parser._actions)
    for each in actions:
        if isinstance(each, argparse._SubParsersAction):
            actions += [action for sub in each.choices.values() for action in sub._actions]
        elif each.dest == error.param and each.option_strings and each.help != argparse.SUPPRESS:
            return f" ({each.option_strings[0]})"
    return ""


if __name__ == "__main__":
    sys.exit(main())
