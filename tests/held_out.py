"""Prompts that the bundled models were not trained on, with the right answers."""

from __future__ import annotations

from pathlib import Path

import msgspec


class HeldOut(msgspec.Struct, frozen=True):
    """One prompt of a row of the tables in docs/demo-models.md."""

    level: str
    prompt: str
    label: str


def held_out() -> list[HeldOut]:
    """Six of each level, as `training/train_demo_models.py --prompts` wrote them."""
    lines = Path(__file__).with_name("held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=HeldOut) for line in lines]
