"""Joins texts of metrics of several ingresses to one, in Prometheus's format or OpenMetrics'."""

from __future__ import annotations

import re
from collections.abc import Iterable

_EOF = "# EOF\n"
_SERIES = re.compile(r'[\w:]+(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?')


def join_expositions(texts: Iterable[bytes]) -> bytes:
    """One text with all families, and each series once: as the first text has it that has it.

    Every ingress shows all workers, so their series are in each text. What an ingress counts itself
    has its id as a label.
    """
    heads: dict[str, dict[str, str]] = {}  # the comments of a family, by their kind
    series: dict[str, dict[str, str]] = {}  # the lines of a family, by name and labels
    ends = False
    for text in texts:
        family = ""
        for line in text.decode().splitlines(keepends=True):
            if line == _EOF:
                ends = True
            elif line.startswith("# "):
                _, kind, family, *_ = line.split(" ", 3)
                heads.setdefault(family, {}).setdefault(kind, line)
            elif match := _SERIES.match(line):
                series.setdefault(family, {}).setdefault(match[0], line)
    families = ((*head.values(), *series.get(name, {}).values()) for name, head in heads.items())
    return "".join([*(line for family in families for line in family), _EOF * ends]).encode()
