"""`disagg`: the command line. One module a verb; this file only chooses."""

from __future__ import annotations

import argparse
import importlib
import re
import signal
import sys

from disagg.errors import DisaggError

VERBS = ("serve", "chat", "plan", "sim", "cascade", "doctor")


def main(arguments: list[str] | None = None) -> int:
    """Run one verb. Errors meant for the user are printed as sentences, without a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    interrupted = signal.getsignal(signal.SIGINT)
    if arguments is None and interrupted is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports: no traceback
    parser = argparse.ArgumentParser(
        prog="disagg",
        description="Large language models served with prefill and decode on separate workers.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    # Only the verb that was asked for is imported: `serve` answers signals from then on.
    for name in [each for each in VERBS if each in words[:1]] or VERBS:
        verb = importlib.import_module(f"disagg.cli.{name}")
        subparser = verbs.add_parser(name, help=(verb.__doc__ or "").split("\n")[0])
        verb.add_arguments(subparser)
        subparser.set_defaults(run=verb.run)
    parser.set_defaults(words=words)
    chosen = parser.parse_args(words)
    if signal.getsignal(signal.SIGINT) is not interrupted:
        signal.signal(signal.SIGINT, interrupted)
    try:
        status: int = chosen.run(chosen)
    except DisaggError as error:
        print(
            f"disagg: {error.message}{_at_fault(error, verbs.choices[chosen.verb])}",
            file=sys.stderr,
        )
        return 2
    return status


def _at_fault(error: DisaggError, parser: argparse.ArgumentParser) -> str:
    """The flag that the error is about; "" where the verb takes it without a flag."""
    if not error.param or re.search(rf"\s\[?{error.param}\s", f"{parser.format_usage()} "):
        return ""
    return f" (--{error.param.replace('_', '-')})"


if __name__ == "__main__":
    sys.exit(main())
