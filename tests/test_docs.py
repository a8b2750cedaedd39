"""What the documents name exists: tests, files, links and commands. The site is built of them."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from disagg.cli.main import main
from tests import reference_pages
from tests.contract.contract import routes

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
# The notebook names files that have left the tree since.
OF_TODAY = [path for path in DOCUMENTS if path.parent.name != "notebook"]
TESTS = [*(ROOT / "tests").rglob("test_*.py")]
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tests_that_are_named_without_a_file_exist(document: Path) -> None:
    there = {name for path in TESTS for name in re.findall(r"def (test_\w+)\(", path.read_text())}
    named = set(re.findall(r"`(test_\w+)`", document.read_text()))
    modules = {path.stem for path in TESTS}
    assert not named - there - modules, named - there - modules


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


def test_pages_that_sources_name_exist() -> None:
    rooms = ("bench", "csrc", "deploy", "disagg", "tests", "training")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*") if path.is_file()]
    missing = []
    for path in sources:
        if path.suffix not in {".cpp", ".h", ".md", ".py", ".sh", ".yaml", ".yml"}:
            continue
        named = re.findall(r"(?<!/)\b(docs/[\w/-]+\.md)(?:#([\w-]+))?", path.read_text())
        for page, anchor in named:
            target = ROOT / page
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                missing.append(f"{page}#{anchor} in {path.relative_to(ROOT)}")
    assert not missing, missing


def test_commands_that_are_named_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    verbs = set(re.findall(r"^    ([a-z-]+)\b", capsys.readouterr().out, re.MULTILINE))
    assert "serve" in verbs
    named = {
        (path.name, verb)
        for path in SOURCES
        for verb in re.findall(r"`disagg\s+([a-z-]+)", path.read_text())
    }
    assert not [each for each in named if each[1] not in verbs]


@functools.cache
def _help(*words: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def _commands(document: Path) -> list[str]:
    """What stands in code: spans, and the lines of blocks, each with what continues it."""
    text = document.read_text()
    blocks = re.findall(r"```.*?\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return spans + [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]


FILE = re.compile(r"(?<![\w./*-])\w[\w./*-]*\.(?:cpp|h|mjs|py|service|sh)(?![\w.-])")
MODULE = re.compile(r"(?<![\w./])(?:bench|training)(?:\.[a-z_]+)+(?![\w/])")


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_are_named_exist(document: Path) -> None:
    """Sources, from the root of the repository or of the package."""
    missing = [
        name
        for name in FILE.findall("\n".join(_commands(document)))
        if not any(list(place.glob(name)) for place in (ROOT, ROOT / "disagg"))
    ]
    assert not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_benches_that_are_named_exist(document: Path) -> None:
    """As modules; one that has left the tree is named with a commit, as `planner` of 2dae8188."""
    names = set(MODULE.findall("\n".join(_commands(document))))
    paths = {name: ROOT / name.replace(".", "/") for name in names}
    missing = [
        n for n, path in paths.items() if not (path.is_dir() or path.with_suffix(".py").is_file())
    ]
    assert not missing, missing


NAMED_IN = re.compile(r"`([A-Za-z_][\w.]*)` (?:of|in) `([\w/]+\.py)`")


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_names_that_are_said_to_be_in_a_file_are_there(document: Path) -> None:
    """`Class.method` in `file.py`: the page of who changes the code is made of these."""
    missing = []
    for name, file in NAMED_IN.findall(re.sub(r"\s+", " ", document.read_text())):
        paths = [place / file for place in (ROOT, ROOT / "disagg") if (place / file).is_file()]
        source = paths[0].read_text() if paths else ""
        missing += [
            f"{name} in {file}"
            for part in name.split(".")
            if not re.search(rf"(?:def|class) {part}\b|^\s*{part}\b(?:: | =)", source, re.M)
        ]
    assert not missing, missing


FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@pytest.mark.parametrize("document", OF_TODAY, ids=lambda path: str(path.relative_to(ROOT)))
def test_flags_that_are_named_exist(document: Path) -> None:
    """Those of a `disagg` command at that command, others in the sources of some command here."""
    sources = (
        path for room in ("disagg", "bench", "training") for path in (ROOT / room).rglob("*.py")
    )
    known = {
        flag for path in sources for flag in re.findall(r'"(--[a-z][\w-]*)"', path.read_text())
    }
    helps = "".join(map(_help, ("serve", "sim", "plan", "bench")))
    known |= {*FLAG.findall(helps)} | {f"--no-{flag[2:]}" for flag in known}
    missing = []
    for command in _commands(document):
        verb = re.match(r"(?:\$ )?disagg ([a-z-]+)(?: ([a-z]+) )?", command)
        flags = set(FLAG.findall(command))
        if verb and flags:
            text = _help(verb[1])
            if verb[2] and re.search(rf"^    {verb[2]}$", text, re.MULTILINE):  # an action
                text += _help(verb[1], verb[2])
            flags -= set(FLAG.findall(text))
        elif command.startswith("--"):
            flags -= known
        else:  # of another program's command
            continue
        missing += [f"{flag} of {command}" for flag in flags]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_routes_that_are_named_exist(document: Path) -> None:
    named = re.findall(r"(?<![\w-])/(?:v1|debug)/[\w/]*", "\n".join(_commands(document)))
    named += re.findall(r":\d+(/[a-z][\w/]*)", "\n".join(_commands(document)))
    behind = tuple(path for path in routes() if path.endswith("/"))
    assert not [path for path in named if path not in routes() and not path.startswith(behind)]


def test_the_reference_is_made_from_the_code_of_today() -> None:
    pages = reference_pages.pages()
    written = {name: (reference_pages.PLACE / name).read_text() for name in pages}
    assert written == pages, "run python -m tests.reference_pages"


def test_the_site_has_no_dead_link_and_asks_no_other_host(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    zensical = Path(sys.executable).with_name("zensical")
    built = subprocess.run([zensical, "build", "--strict"], cwd=tmp_path, capture_output=True)
    assert built.returncode == 0, built.stdout.decode() + built.stderr.decode()
    pages = [path.read_text() for path in (tmp_path / "site").rglob("*.html")]
    assert len(pages) > 25
    fetched = re.compile(r"<(?:script|img|iframe)[^>]* src=\"?https?:|<link[^>]* href=\"?https?:")
    assert not [found for page in pages for found in fetched.findall(page)]


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert not [page for page in pages if f": {page}\n" not in navigation]
