"""Fetches models by their names on the Hugging Face Hub, such as `Qwen/Qwen3-8B`.

The library `huggingface_hub` does the work. It has the usual cache, so files that other programs
fetched are used, and the usual environment variables (HF_TOKEN, HF_HOME, HF_ENDPOINT,
HF_HUB_OFFLINE). A cached model is served without asking the hub. config.json is fetched first, so
that an unsupported model is refused before its weights are fetched.
"""

from __future__ import annotations

import errno
import glob
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from disagg.errors import ModelError, StartupError
from disagg.models.checkpoint import (
    MAX_TEXT_NBYTES,
    WEIGHTS_INDEX,
    WHOLE_WEIGHTS,
    checkpoint_files,
    indexed_files,
    read_text,
)
from disagg.models.description import MODELOPT_CONFIG, TEMPLATE_FILES, describe_model
from disagg.models.fetched import FETCHED, MIB, NUM_PROGRESS_LINES, Say, fetch
from disagg.models.pooling import POOLING_FILES

DEFAULT_REVISION = "main"
# The hub's own rule for names.
_REPOSITORY = re.compile(
    r"(?!.*(?:--|\.\.|\.git$))[A-Za-z0-9](?:[\w.-]{0,94}\w)?/[A-Za-z0-9](?:[\w.-]{0,94}\w)?",
    re.ASCII,
)
_REVISION = re.compile(r"(?!.*(?:\.\.|//))\w[\w./+@-]*")  # "refs/pr/3" is one, a path is none
_TOKENIZER = "tokenizer.json"
_SETTINGS = frozenset(
    {
        "config.json",
        "generation_config.json",
        _TOKENIZER,
        "tokenizer_config.json",
        "chat_template.json",
        MODELOPT_CONFIG,
        *TEMPLATE_FILES.values(),
        *POOLING_FILES,
    }
)
_SAY_AGAIN_S = 0.5  # least time between two looks at the sizes on the disk
_NO_PLACE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


class _Stopped(Exception):
    """Raised if a signal arrives while files are fetched."""


def is_repository(model: str) -> bool:
    """Whether `model` has the form of a hub's model name, `organisation/name`, and is no path."""
    return _REPOSITORY.fullmatch(model) is not None and not Path(model).exists()


def snapshot_of(repository: str, revision: str | None = None) -> Path | None:
    """The directory of a model in this machine's cache; None if it is missing or incomplete.

    Raises:
        ModelError: `revision` is not a valid name.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        raise ModelError(
            f"{revision!r} is not a valid name of a branch, a tag or a commit", param="revision"
        )
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(repository, "config.json", revision=revision)
    if not isinstance(found, str):
        return None
    directory = Path(found).parent
    return directory if _is_whole(directory) else None


def _is_whole(directory: Path) -> bool:
    try:
        checkpoint_files(directory)
    except ModelError:
        return False
    return (directory / _TOKENIZER).is_file()


def fetch_model(
    model: str, revision: str | None, say: Say, is_stopped: Callable[[], bool] = lambda: False
) -> bool:
    """Download a model that is not on this machine yet, if it is named and not a path.

    The arguments and errors are those of `fetch_repository`. Returns False if it was stopped.
    """
    if model in FETCHED and not Path(model).exists():
        return fetch(model, say, is_stopped)
    return not is_repository(model) or fetch_repository(model, revision, say, is_stopped)


def fetch_repository(
    repository: str, revision: str | None, say: Say, is_stopped: Callable[[], bool]
) -> bool:
    """Fetch the files that serving a model needs, unless they are in the cache.

    Args:
        revision: a branch, a tag or a commit; None: `DEFAULT_REVISION`.
        say: called with messages about the progress.
        is_stopped: called after each part; returns whether to stop.

    Returns:
        False if it was stopped. Complete files are kept; the next call fetches the others.

    Raises:
        ModelError: the model exists but cannot be served.
        StartupError: the model cannot be fetched or stored.
    """
    if snapshot_of(repository, revision) is not None:
        return True
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    with _failing_in_words(repository, revision):
        known = HfApi().model_info(repository, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in known.siblings or ()}
        _check_settings(repository, sizes)

        def fetched(name: str) -> Path:
            return Path(hf_hub_download(repository, name, revision=known.sha))

        config = fetched("config.json")
        if MODELOPT_CONFIG in sizes:
            fetched(MODELOPT_CONFIG)
        describe_model(config.parent)
        index: Iterable[str] = ()
        if WHOLE_WEIGHTS not in sizes and WEIGHTS_INDEX in sizes:
            index = _indexed(fetched(WEIGHTS_INDEX))
        names = needed_files(sizes, index)
        # The tokenizer comes last and shows that everything is there, because without an index
        # nothing tells how many files of weights there are. The other settings come before the
        # weights, so that they are there even if another program fetched the tokenizer.
        for name in sorted(_SETTINGS.intersection(names) - {_TOKENIZER}):
            if is_stopped():
                return False
            fetched(name)
        total_nbytes = sum(sizes[name] for name in names)
        progress = _Progress(repository, config.parent.parent.parent / "blobs", total_nbytes, say)
        _check_room(Path(constants.HF_HUB_CACHE), progress.left_nbytes, repository)
        say(
            "fetch",
            f"fetching {repository} ({total_nbytes / MIB:,.0f} MiB in {len(names)} files)"
            f" from {constants.ENDPOINT}",
            model=repository,
            url=constants.ENDPOINT,
        )
        try:
            with _stoppable(max(sizes[name] for name in names)):
                directory = snapshot_download(
                    repository,
                    revision=revision,
                    allow_patterns=[glob.escape(name) for name in names if name != _TOKENIZER],
                    tqdm_class=_bar(progress, is_stopped),
                )
        except _Stopped:
            return False
        hf_hub_download(repository, _TOKENIZER, revision=Path(directory).name)
    say("fetched", f"{repository} is in {directory}", model=repository, file=directory)
    return True


def fetch_config(repository: str, revision: str | None = None) -> Path:
    """Fetch config.json, which is all that planning needs, and ModelOpt's if there is one.

    Returns their directory.

    Raises:
        StartupError: it cannot be fetched or stored.
    """
    directory = snapshot_of(repository, revision)
    if directory is not None:
        return directory
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    with _failing_in_words(repository, revision):
        config = Path(hf_hub_download(repository, "config.json", revision=revision))
        with suppress(EntryNotFoundError):
            hf_hub_download(repository, MODELOPT_CONFIG, revision=revision)
        return config.parent


def needed_files(names: Iterable[str], index: Iterable[str]) -> list[str]:
    """The files of a repository that serving needs.

    Args:
        index: files of weights that `model.safetensors.index.json` names, if it is used.

    Raises:
        ModelError: there are no weights in a supported format.
    """
    every = set(names)
    weights = {WHOLE_WEIGHTS} & every or {*index, WEIGHTS_INDEX} & every
    if weights <= {WEIGHTS_INDEX}:
        weights = {name for name in every if name.endswith(".safetensors") and "/" not in name}
    if not weights:
        others = sorted({Path(name).suffix for name in every} & {".bin", ".gguf", ".pth", ".pt"})
        raise ModelError(
            f"there are no *.safetensors files{', only ' + ', '.join(others) if others else ''};"
            " download a GGUF file and give its path, or choose a repository with safetensors",
            param="model",
        )
    return sorted(weights | (_SETTINGS & every))


def _indexed(file: Path) -> list[str]:
    try:
        return indexed_files(read_text(file))
    except ValueError as error:
        raise ModelError(f"its {WEIGHTS_INDEX} is broken: {error}") from error


def _check_settings(repository: str, sizes: Mapping[str, int]) -> None:
    """Raise `ModelError` if the repository lacks a file without which no model can be served."""
    if "config.json" not in sizes and any(name.endswith(".gguf") for name in sizes):
        raise ModelError(
            f"it has GGUF files and no config.json; download one of them (`hf download {repository}"
            " FILE.gguf`) and give its path"
        )
    for name in ("config.json", _TOKENIZER):
        if name not in sizes:
            raise ModelError(f"it has no {name}, without which no model is served")
    for name in sorted({*_SETTINGS, WEIGHTS_INDEX}.intersection(sizes)):
        if sizes[name] > MAX_TEXT_NBYTES:
            raise ModelError(
                f"its {name} has {sizes[name] / 1e9:.1f} GB, but such files have only some MB"
            )


def _check_room(cache: Path, wanted_nbytes: int, repository: str) -> None:
    cache.mkdir(parents=True, exist_ok=True)
    free_nbytes = shutil.disk_usage(cache).free
    if free_nbytes < wanted_nbytes:
        raise StartupError(
            f"{repository} has {wanted_nbytes / 1e9:.1f} GB, but {cache} has only"
            f" {free_nbytes / 1e9:.1f} GB left; free space there, or set another directory with"
            " HF_HOME.",
            param="model",
        )


class _Progress:
    """Reports in a few lines how much is on the disk."""

    def __init__(self, repository: str, blobs: Path, total_nbytes: int, say: Say) -> None:
        self._repository, self._blobs, self._say = repository, blobs, say
        self._total_nbytes = max(total_nbytes, 1)
        self._before_nbytes = sum(size for _, size in self._sizes())
        self._num_lines, self._next_s, self._lock = 0, 0.0, threading.Lock()

    @property
    def left_nbytes(self) -> int:
        """The bytes that are still to be fetched.

        Incomplete files of a killed process are not used again, so they do not count as fetched.
        """
        whole_nbytes = sum(size for name, size in self._sizes() if "incomplete" not in name)
        return max(0, self._total_nbytes - whole_nbytes)

    def look(self) -> None:
        with self._lock:
            if time.monotonic() < self._next_s:
                return
            self._next_s = time.monotonic() + _SAY_AGAIN_S
            fetched = sum(size for _, size in self._sizes()) - self._before_nbytes
            num_lines = min(fetched, self._total_nbytes) * NUM_PROGRESS_LINES // self._total_nbytes
            if num_lines <= self._num_lines:
                return
            self._num_lines = num_lines
            total = f"{self._total_nbytes / MIB:,.0f}"
            self._say(
                "fetch",
                f"fetched {fetched / MIB:,.0f} of {total} MiB",
                model=self._repository,
                fetched_nbytes=fetched,
                total_nbytes=self._total_nbytes,
            )

    def _sizes(self) -> Iterator[tuple[str, int]]:
        for file in self._blobs.iterdir() if self._blobs.is_dir() else ():
            try:
                yield file.name, file.stat().st_size
            except FileNotFoundError:  # it is complete now, and was renamed
                continue


def _bar(progress: _Progress, is_stopped: Callable[[], bool]) -> type[Any]:
    """A class for the library's progress bars. It shows nothing, reports, and may stop."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            if is_stopped():
                raise _Stopped
            progress.look()
            return None

    return Bar


@contextmanager
def _stoppable(largest_nbytes: int) -> Iterator[None]:
    """Fetch files over HTTP, in the thread that calls the bar, so that the bar can stop them.

    Xet calls bars from its own thread and ignores their exceptions, so after a signal it would
    still fetch all files that have begun, which are many GB.
    """
    from huggingface_hub import constants

    was = constants.HF_HUB_DISABLE_XET  # the library reads it for each file
    if largest_nbytes <= constants.MAX_HTTP_DOWNLOAD_SIZE:  # larger files need Xet
        constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = was


@contextmanager
def _failing_in_words(repository: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import constants, errors

    where = f"{repository} of {constants.ENDPOINT}"
    without = (
        f" Without a network, run `hf download {repository}` on another machine and copy the files"
        f" into {constants.HF_HUB_CACHE}, or give the path of a directory."
    )
    try:
        yield
    except errors.GatedRepoError as error:
        raise StartupError(
            f"{where} requires that you accept its terms. Accept them on"
            f" {constants.ENDPOINT}/{repository}, and set HF_TOKEN.",
            param="model",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise StartupError(
            f"{where} has no revision {revision or DEFAULT_REVISION!r}.", param="revision"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise StartupError(
            f"There is no model directory {repository!r} here, and no such model on"
            f" {constants.ENDPOINT}. If the model is private, set HF_TOKEN.",
            param="model",
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise StartupError(
            f"{where} is not in the cache, and HF_HUB_OFFLINE forbids fetching it.{without}",
            param="model",
        ) from error
    except ModelError as error:
        raise ModelError(f"{repository}: {error.message}", param="model") from error
    except StartupError:
        raise
    except Exception as error:  # the errors of the library's HTTP client differ between versions
        message = f"{where} cannot be fetched: {error}.{without}"
        if getattr(error, "errno", None) in _NO_PLACE:
            message = (
                f"{repository} cannot be stored in {constants.HF_HUB_CACHE}: {error}. Free space"
                " there, or set another directory with HF_HOME."
            )
        raise StartupError(message, param="model") from error
