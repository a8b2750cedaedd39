"""Which tests ran at the same time as one that failed: `python -m tests.beside PARTS`

The parts of `make test` run beside each other. A test that fails there and passes alone waited for
something that another one held, most often a core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

TIMES = "DISAGG_TEST_TIMES"  # the variable that names the file of a part
MOST_SHOWN = 12


class Ran(NamedTuple):
    """A test that ran; seconds are those of `time.monotonic()`."""

    test: str
    began_s: float
    ended_s: float


def note(file: str, test: str, began_s: float, ended_s: float) -> None:
    with open(file, "a", encoding="utf-8") as times:
        times.write(json.dumps(Ran(test, began_s, ended_s)) + "\n")


def beside(parts: Path) -> list[tuple[Ran, list[Ran]]]:
    """Each failed test, with those of other parts that ran meanwhile, the longest first.

    Args:
        parts: a directory for each part, with its times and its cache of pytest.
    """
    ran = {
        file.parent: [Ran(*json.loads(line)) for line in file.read_text().splitlines()]
        for file in sorted(parts.glob("*/times"))
    }
    found = []
    for part, own in ran.items():
        cache = part / "cache/v/cache/lastfailed"
        failed = json.loads(cache.read_text()) if cache.exists() else {}
        others = [test for other, tests in ran.items() if other != part for test in tests]
        others.sort(key=lambda test: test.began_s - test.ended_s)
        for test in own:
            if test.test in failed:
                same = [o for o in others if o.began_s < test.ended_s and test.began_s < o.ended_s]
                found.append((test, same))
    return found


def main() -> None:
    for failed, others in beside(Path(sys.argv[1])):
        print(f"{failed.test} failed in {failed.ended_s - failed.began_s:.1f} s, beside these:")
        for other in others[:MOST_SHOWN]:
            print(f"    {other.test} ({other.ended_s - other.began_s:.1f} s)")


if __name__ == "__main__":
    main()
