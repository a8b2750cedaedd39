"""Grammars in GBNF (`root ::= "yes" | "no"`), the notation of llama.cpp and of vLLM's examples.

llguidance reads Lark's notation and ships a converter.
"""

from __future__ import annotations

import re

from disagg.errors import GrammarError

MAX_RULES = 500  # the time of the converter may grow with their square
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)


def as_lark(source: str) -> str:
    """A grammar in Lark's notation.

    Args:
        source: the grammar, in GBNF if it has a rule `root ::= ...`, else in Lark's notation.

    Raises:
        GrammarError: the grammar is GBNF and invalid, or has too many rules.
    """
    if not _ROOT.search(source):
        return source
    if source.count("::=") > MAX_RULES:
        raise GrammarError(f"The grammar has more than {MAX_RULES} rules. Make it smaller.")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(source)
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(f"The grammar is not valid GBNF: {str(error)[:200]}.") from error
