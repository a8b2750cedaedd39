"""Prompts that the bundled models were not trained on, with the right answers."""

from __future__ import annotations

from pathlib import Path

import msgspec

NUM_PER_LEVEL = 6
# The rows recall-1000 and recall-1500.
LONG_RECALL = slice(2 * NUM_PER_LEVEL, 4 * NUM_PER_LEVEL)


class HeldOut(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As `disagg cascade calibrate` reads prompts."""

    prompt: str
    label: str


def held_out() -> list[HeldOut]:
    """`NUM_PER_LEVEL` of each row of the tables in docs/models.md, in their order.

    `training/train_demo_models.py --prompts` has written them.
    """
    lines = Path(__file__).with_name("held_out.jsonl").read_text(encoding="utf-8").splitlines()
    return [msgspec.json.decode(line, type=HeldOut) for line in lines]
