"""Grammars in GBNF (`root ::= "yes" | "no"`), the notation of llama.cpp and of vLLM's examples.

llguidance reads Lark's notation and ships a converter.
"""

from __future__ import annotations

import re

from disagg.errors import GrammarError

MAX_RULES = 500  # the time of the converter may grow with their square
_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)


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
        return gbnf_to_lark(_ESCAPE.sub(_written_out, source))
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(f"The grammar is not valid GBNF: {str(error)[:200]}.") from error


def _written_out(escape: re.Match[str]) -> str:
    """The character of an escape such as `\\u00e9`.

    The converter (llguidance 1.9) drops the zeros, so that the next characters become digits.
    """
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is half a character")
    return rf"\x{code:02x}" if code < 0x80 else chr(code)  # ASCII may have a meaning of its own
