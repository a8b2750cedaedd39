"""What is imported is not looked at for garbage, and what comes later is."""

from __future__ import annotations

import gc
import weakref
from importlib import import_module
from pathlib import Path

import pytest

from disagg.imports import uncollected_imports


class Garbage:
    """Refers to itself."""

    def __init__(self) -> None:
        self.own = self


def test_imported_objects_stay_and_later_garbage_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "large_library.py").write_text("TABLE = [[]]\n")
    monkeypatch.syspath_prepend(tmp_path)
    with uncollected_imports():
        assert not gc.isenabled()
        table = import_module("large_library").TABLE
    assert gc.isenabled()
    assert gc.is_tracked(table) and not any(each is table for each in gc.get_objects())
    seen = weakref.ref(Garbage())
    gc.collect()
    assert seen() is None


def test_nothing_is_frozen_where_nothing_is_imported() -> None:
    num_frozen = gc.get_freeze_count()
    gc.disable()
    try:
        with uncollected_imports():
            import_module("gc")
        assert gc.get_freeze_count() == num_frozen
        assert not gc.isenabled(), "as it was"
    finally:
        gc.enable()
