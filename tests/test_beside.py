from __future__ import annotations

import json
from pathlib import Path

from tests.beside import beside, note


def test_a_failed_test_is_shown_with_those_of_other_parts_that_ran_meanwhile(
    tmp_path: Path,
) -> None:
    for part, test, began_s, ended_s in [
        ("one", "passed", 0.0, 1.0),
        ("one", "failed", 1.0, 3.0),
        ("two", "before", 0.0, 1.0),
        ("two", "into", 0.5, 1.5),
        ("two", "within", 1.7, 2.0),
        ("two", "after", 3.0, 4.0),
    ]:
        (tmp_path / part).mkdir(exist_ok=True)
        note(str(tmp_path / part / "times"), test, began_s, ended_s)
    cache = tmp_path / "one/cache/v/cache"
    cache.mkdir(parents=True)
    (cache / "lastfailed").write_text(json.dumps({"failed": True}))
    ((failed, others),) = beside(tmp_path)
    assert failed.test == "failed"
    assert [other.test for other in others] == ["into", "within"]  # the longest first
