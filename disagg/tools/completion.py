"""Print a script with which a shell completes commands, flags and their values.

For the start file of the shell. bash and zsh: eval "$(disagg completion bash)", or zsh. fish:
disagg completion fish | source.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping

from disagg.cli.main import VERBS, parser_of

Parsers = Mapping[str, argparse.ArgumentParser]

_BASH = """\
_disagg() {
    local current=${COMP_WORDS[COMP_CWORD]} verb=${COMP_WORDS[1]} words=
    case "$verb ${COMP_WORDS[COMP_CWORD-1]}" in
        %s
        *) [[ $current == -* ]] && case $verb in
            %s
        esac;;
    esac
    [[ $COMP_CWORD == 1 ]] && words=%s
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _disagg disagg
"""
_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    parsers = parser_of(VERBS)[1]
    if arguments.shell == "fish":
        print("\n".join(_fish(parsers)))
    else:
        print((_ZSH if arguments.shell == "zsh" else "") + _bash(parsers), end="")
    return 0


def _bash(parsers: Parsers) -> str:
    flags: list[str] = []
    values: list[str] = []
    for verb, parser in parsers.items():
        names: list[str] = []
        for action in _actions(parser):
            names += action.option_strings
            words = " ".join(map(str, action.choices or ()))
            values += (
                f"{shlex.quote(f'{verb} {before}')}) words={shlex.quote(words)};;"
                for before in (action.option_strings or [verb] if words else ())
            )
        flags.append(f"{verb}) words={shlex.quote(' '.join(names))};;")
    indent = "\n" + 8 * " "
    return _BASH % (
        indent.join(values),
        (indent + "    ").join(flags),
        shlex.quote(" ".join(VERBS)),
    )


def _fish(parsers: Parsers) -> Iterator[str]:
    yield "complete -c disagg -f -n __fish_use_subcommand -a " + shlex.quote(" ".join(VERBS))
    for verb, parser in parsers.items():
        within = f"complete -c disagg -n '__fish_seen_subcommand_from {verb}'"
        for action in _actions(parser):
            words = " ".join(map(str, action.choices or ()))
            values = f" -a {shlex.quote(words)}" if words else ""
            for flag in action.option_strings:
                kind = "" if action.nargs == 0 else " -r" + (" -f" if words else "")
                name = f"{'-l' if flag[:2] == '--' else '-s'} {flag.lstrip('-')}"
                yield f"{within} {name}{kind}{values}"
            if values and not action.option_strings:
                yield f"{within} -f{values}"


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those that help shows, also of a command's own commands."""
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action
        if isinstance(action, argparse._SubParsersAction):
            for other in action.choices.values():
                yield from _actions(other)
