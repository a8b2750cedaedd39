"""Mistakes that are planted in the code, of which tests show that their oracles notice them."""

from __future__ import annotations

import importlib
import inspect
from textwrap import dedent
from typing import Any, NamedTuple

import pytest


class Edit(NamedTuple):
    """A change in the source of one function.

    bug: what is wrong then; some bugs take several edits.
    place: "module:function" or "module:Class.method".
    right: what its source has once; `wrong` takes its place. Both are indented as in a function.
    """

    bug: str
    place: str
    right: str
    wrong: str


def bugs(*edits: Edit) -> dict[str, list[Edit]]:
    """The edits of each bug."""
    found: dict[str, list[Edit]] = {}
    for edit in edits:
        found.setdefault(edit.bug, []).append(edit)
    return found


def plant(patch: pytest.MonkeyPatch, *edits: Edit) -> None:
    """Give the functions the code that they have with these edits, until the patch is undone.

    The functions stay the same objects, so all who have imported them have the bug, under whatever
    name, also who does so later; and nobody keeps it.
    """
    for place in dict.fromkeys(edit.place for edit in edits):
        module, _, path = place.partition(":")
        *classes, name = path.split(".")
        owner: Any = importlib.import_module(module)
        for each in classes:
            owner = getattr(owner, each)
        function = _function(inspect.getattr_static(owner, name))
        source = dedent(inspect.getsource(function))
        for edit in edits:
            if edit.place == place:
                assert edit.wrong != edit.right, f"{edit.bug}: nothing is edited"
                assert source.count(edit.right) == 1, f"{place} does not have {edit.right!r} once"
                source = source.replace(edit.right, edit.wrong)
        made: dict[str, Any] = {}
        exec(compile(source, place, "exec"), function.__globals__, made)  # noqa: S102
        patch.setattr(function, "__code__", _function(made[name]).__code__)


def _function(found: Any) -> Any:
    return found.fget if isinstance(found, property) else found


NAMES_WITHOUT_CHAIN = (
    Edit("names without chain", "disagg.blocks:hash_block", "parent + raw", "raw"),
    Edit("names without chain", "disagg.blocks:hash_blocks", "parent + tokens", "tokens"),
)
BLOCKS_ARE_PUBLISHED_BEFORE_THEY_ARE_FULL = (
    Edit(
        "published before they are full",
        "disagg.engine.sched.block_tables:publish",
        "    sequence.publish_at = (num_full + 1) * block_size\n",
        "    if num_full < len(hashes) and sequence.num_computed > num_full * block_size:\n"
        "        pool.publish(sequence.block_ids[num_full], hashes[num_full])\n"
        "    sequence.publish_at = 0  # look again after every step\n",
    ),
)
