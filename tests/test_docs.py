"""What the documents name exists: tests, files, links and commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from disagg.cli.main import main

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [*sorted((ROOT / "disagg").rglob("*.py")), *DOCUMENTS]


def _tests_named(text: str) -> list[tuple[str, str]]:
    """Files and functions; a function without a file belongs to the file named before it."""
    named, file = [], ""
    for match in re.finditer(r"(tests/[\w/]+\.py)?(?:::(\w+))?", text):
        file = match[1] or file
        if match[1] or match[2]:
            named.append((file, match[2] or ""))
    return named


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_exist(document: Path) -> None:
    missing = []
    for line in document.read_text().splitlines():
        for file, name in _tests_named(line):
            path = ROOT / file
            if not path.is_file() or (name and f"def {name}(" not in path.read_text()):
                missing.append(f"{file}::{name}")
    assert not missing, missing


def _anchors(document: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {each.replace(" ", "-") for each in plain}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    text = re.sub(r"```.*?```|`[^`]*`", "", document.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken, broken


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = set(re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE))
    assert "serve" in verbs
    named = {
        (path.name, verb)
        for path in SOURCES
        for verb in re.findall(r"`disagg\s+([a-z]+)", path.read_text())
    }
    assert not [each for each in named if each[1] not in verbs]
