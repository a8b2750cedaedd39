"""Each program in examples/ runs, and prints what it is there to show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"ray_data"}  # on a Ray of its own, in tests/bench/test_ray_data.py
PRINTED = {  # regular expressions of whole outputs
    "batch": r"3 of 3 requests are answered\.\n1 Paris\n2 5\n3 5\n",
    "load_test": r"(?s)(20 of 20 requests answered in .*?){2}"
    r"\s+plain\.json  prefix\.json .*median_ttft_ms .*\n",
    "offline": r"What is the capital of France\? Paris\nWhat is 2 \+ 3\? 5\n"
    r"It must say yes or no: (yes|no)\nWithout a chat template: 5\n",
    "streaming": r"(What is (the capital of France|2 \+ 3)\? '\w*'\n)+",
    "tools": r'call -> get_weather \{"city": "Rome"\}\nanswer -> .*sunny.*\n',
}


def test_there_are_no_others() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == PRINTED.keys() | ELSEWHERE


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, str(ROOT / "examples" / f"{name}.py")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    assert re.fullmatch(PRINTED[name], ended.stdout), ended.stdout
