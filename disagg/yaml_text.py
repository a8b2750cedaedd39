"""YAML for people: tuples in one line, texts of several lines as blocks, and no aliases."""

from __future__ import annotations

from typing import Any

import yaml


class _PlainDumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True  # write repeated parts out


def _text(dumper: _PlainDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _items(dumper: _PlainDumper, items: tuple[Any, ...]) -> yaml.SequenceNode:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=True)


_PlainDumper.add_representer(str, _text)
_PlainDumper.add_representer(tuple, _items)


def to_yaml(*documents: Any) -> str:
    text: str = yaml.dump_all(documents, Dumper=_PlainDumper, sort_keys=False, width=100)
    return text
