"""A planted bug is wherever its function is known, and leaves with the patch."""

from __future__ import annotations

import re

import pytest

from disagg.blocks import hash_block as known_here
from disagg.blocks import hash_root
from tests.engine.test_planted_bugs import AHEAD, BUGS
from tests.planted import NAMES_WITHOUT_CHAIN, Edit, plant
from tests.worker.test_planted_worker_bugs import IN_QUIET, IN_TROUBLE

ROOTS = [hash_root("toy", size) for size in (1, 2)]


def names() -> set[bytes]:
    return {known_here(root, [7]) for root in ROOTS}


def test_it_is_there_under_another_name_and_goes_also_when_a_test_is_interrupted() -> None:
    right = names()
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        plant(patch, *NAMES_WITHOUT_CHAIN)
        assert len(names()) == 1, "the roots are in none of them"
        raise KeyboardInterrupt
    assert len(right) == 2 and names() == right


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("parent + raw", "parent + raw", "nothing is edited"),
        ("parent + row", "row", "does not have 'parent + row' once"),
        ("raw", "row", "does not have 'raw' once"),
    ],
)
def test_an_edit_that_does_not_fit_fails(
    right: str, wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        plant(monkeypatch, Edit("bug", "disagg.blocks:hash_block", right, wrong))


@pytest.mark.parametrize("bugs", [BUGS, AHEAD, IN_TROUBLE, IN_QUIET])
def test_every_bug_fits_the_code_of_today(bugs: dict[str, list[Edit]]) -> None:
    """Whether it is noticed is seen by `make test-bench`, and not after every change."""
    for edits in bugs.values():
        with pytest.MonkeyPatch.context() as patch:
            plant(patch, *edits)
