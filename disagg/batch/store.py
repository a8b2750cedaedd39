"""Files and batches of a server, in a directory that its ingresses share.

    TENANT/file-ID           what was uploaded, or answered
    TENANT/file-ID.json      what is known of it (`StoredFile`); one without it is being written
    TENANT/batch_ID.json     a batch (`StoredBatch`)
    TENANT/batch_ID.answers  and `.errors`: its answers until it is finished
    open/batch_ID            the name of its tenant's directory, until it is finished
    open/batch_ID.cancel     it is to end

There is no other state: any ingress answers for all, and a restarted one finds everything. The
ingress that holds the lock of a batch's answers runs it (`AnswerFiles`), and it alone writes the
batch. Nothing here is async: call it in a thread.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import field

from disagg.errors import RequestError, RequestTooLarge

Status: TypeAlias = Literal[
    "validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
FINAL: tuple[Status, ...] = ("completed", "failed", "expired", "cancelled")
KEPT_S = 30 * 86_400  # files and finished batches, after they were made
ABANDONED_S = 3600.0  # an upload that was not written to for so long
LEAST_NBYTES = 64 << 10  # that a file or batch counts at least, so that there are not too many

Stored = TypeVar("Stored", "StoredFile", "StoredBatch")


class UnknownObject(RequestError):
    http_status = 404
    code = "not_found"


class StoredFile(msgspec.Struct, kw_only=True):
    """OpenAI's file object."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"] = "processed"


class BatchError(msgspec.Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(msgspec.Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(msgspec.Struct, kw_only=True):
    """OpenAI's batch object."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: Status = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = field(default_factory=RequestCounts)
    metadata: dict[str, str] | None = None


class BatchStore:
    """
    Args:
        directory: is made if there is none.
        max_nbytes: what each tenant may store.
        now: returns Unix time in seconds.
    """

    def __init__(
        self, directory: Path, max_nbytes: int, now: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._max_nbytes = max_nbytes
        self._now = now

    # Files

    def new_file(self, tenant: str) -> Path:
        """A new empty file, which nobody sees before `keep_file`."""
        path = self._of(tenant) / _new_id("file-")
        path.touch(mode=0o600, exist_ok=False)
        return path

    def keep_file(
        self,
        path: Path,
        filename: str,
        purpose: Literal["batch", "batch_output"],
        kept_s: int = KEPT_S,
    ) -> StoredFile:
        """Show a file that is written, for `kept_s`."""
        made = int(self._now())
        file = StoredFile(
            id=path.name,
            bytes=path.stat().st_size,
            created_at=made,
            expires_at=made + kept_s,
            filename=filename,
            purpose=purpose,
        )
        _write(path.with_name(f"{path.name}.json"), file)
        return file

    def file(self, tenant: str, file_id: str) -> StoredFile:
        """Raises `UnknownObject`."""
        found = self._read(tenant, file_id, StoredFile)
        if found.expires_at <= self._now():
            raise _unknown(file_id)
        return found

    def path(self, tenant: str, file_id: str) -> Path:
        """Where the content of a file is. Raises `UnknownObject`."""
        return self._of(tenant) / self.file(tenant, file_id).id

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Raises `UnknownObject`."""
        path = self.path(tenant, file_id)
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def files(self, tenant: str) -> Iterator[StoredFile]:
        """All of a tenant, newest first."""
        for file in self._all(tenant, "file-*.json", StoredFile):
            if file.expires_at > self._now():
                yield file

    def check_room(self, tenant: str) -> None:
        """Raises `RequestTooLarge` if a tenant has stored all that it may."""
        nbytes = 0
        with os.scandir(self._of(tenant)) as entries:
            for entry in entries:
                if not entry.name.startswith("file-") or not entry.name.endswith(".json"):
                    nbytes += max(LEAST_NBYTES, entry.stat().st_size)
        if nbytes > self._max_nbytes:
            raise RequestTooLarge(
                f"Your files and batches would take {nbytes:,} bytes, and at most"
                f" {self._max_nbytes:,} are kept (http.files_nbytes); delete files that you do not"
                " need."
            )

    # Batches

    def new_batch(self, tenant: str, **fields: Any) -> StoredBatch:
        """A new batch, which an ingress will run."""
        batch = StoredBatch(id=_new_id("batch_"), created_at=int(self._now()), **fields)
        self.write_batch(tenant, batch)
        mark = self._mark(batch.id)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _replace(mark, self._of(tenant).name.encode())
        return batch

    def batch(self, tenant: str, batch_id: str) -> StoredBatch:
        """Raises `UnknownObject`."""
        return self._with_cancel(self._read(tenant, batch_id, StoredBatch))

    def batches(self, tenant: str) -> Iterator[StoredBatch]:
        """All of a tenant, newest first."""
        return map(self._with_cancel, self._all(tenant, "batch_*.json", StoredBatch))

    def write_batch(self, tenant: str, batch: StoredBatch) -> None:
        """For whoever runs it."""
        _write(self._of(tenant) / f"{batch.id}.json", batch)

    def cancel(self, batch: StoredBatch) -> None:
        """Have whoever runs a batch end it."""
        if self._mark(batch.id).exists():
            self._cancel_mark(batch.id).touch()

    def cancelling_at(self, batch_id: str) -> int | None:
        """When a batch was cancelled."""
        try:
            return int(self._cancel_mark(batch_id).stat().st_mtime)
        except FileNotFoundError:
            return None

    def answers_of(self, tenant: str, batch_id: str) -> tuple[Path, Path]:
        """The answers and errors of a batch that is not finished."""
        path = self._of(tenant) / batch_id
        return path.with_suffix(".answers"), path.with_suffix(".errors")

    def show_answers(self, tenant: str, batch: StoredBatch) -> None:
        """Show the files of a batch that has ended, and write it. It may be done twice."""
        number = batch.id.removeprefix("batch_")
        batch.output_file_id, batch.error_file_id = (
            self._show(path, f"file-{number}{digit}", f"{batch.id}_{word}.jsonl")
            for path, digit, word in zip(
                self.answers_of(tenant, batch.id), "01", ("output", "error"), strict=True
            )
        )
        self.write_batch(tenant, batch)

    def clear(self, tenant: str, batch_id: str) -> None:
        """Nobody is to run a batch any more: it is finished, or gone."""
        for path in self.answers_of(tenant, batch_id):
            path.unlink(missing_ok=True)
        for mark in (self._mark(batch_id), self._cancel_mark(batch_id)):
            mark.unlink(missing_ok=True)

    def _show(self, path: Path, file_id: str, filename: str) -> str | None:
        if not path.exists() or not path.stat().st_size:
            return None
        shown = path.with_name(file_id)
        if not shown.exists():
            os.link(path, shown)
        self.keep_file(shown, filename, "batch_output")
        return file_id

    def open_batches(self) -> list[tuple[str, str]]:
        """The ids and tenants of batches that are not finished, oldest first."""
        found = []
        for mark in sorted((self._directory / "open").glob("batch_*")):
            try:
                if mark.suffix == "":
                    found.append((mark.name, bytes.fromhex(mark.read_text()[1:]).decode()))
            except FileNotFoundError:  # it was finished meanwhile
                continue
        return found

    def sweep(self) -> None:
        """Delete what has expired, and what was not written to its end."""
        now = self._now()
        unfinished = {batch_id for batch_id, _ in self.open_batches()}
        for path in sorted(self._directory.glob("t*/*")):  # a file before what is known of it
            if path.name.partition(".")[0] in unfinished:
                continue
            try:
                if self._ends(path) <= now:
                    path.unlink()
            except FileNotFoundError:
                continue

    def _ends(self, path: Path) -> float:
        """When a file is to be deleted."""
        about = path if path.suffix else path.with_name(f"{path.name}.json")
        if about.suffix == ".json" and about.exists():
            raw = about.read_bytes()
            if path.name.startswith("file-"):
                return msgspec.json.decode(raw, type=StoredFile).expires_at
            return msgspec.json.decode(raw, type=StoredBatch).created_at + KEPT_S
        return path.stat().st_mtime + ABANDONED_S

    def _with_cancel(self, batch: StoredBatch) -> StoredBatch:
        at = self.cancelling_at(batch.id)
        if batch.status not in FINAL and at is not None:
            batch.status, batch.cancelling_at = "cancelling", at
        return batch

    def _mark(self, batch_id: str) -> Path:
        return self._directory / "open" / batch_id

    def _cancel_mark(self, batch_id: str) -> Path:
        return self._directory / "open" / f"{batch_id}.cancel"

    def _of(self, tenant: str) -> Path:
        path = self._directory / f"t{tenant.encode().hex()}"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def _read(self, tenant: str, name: str, kind: type[Stored]) -> Stored:
        if not re.fullmatch(r"(file-|batch_)[0-9a-f]{1,64}", name):
            raise _unknown(name)
        try:
            raw = (self._of(tenant) / f"{name}.json").read_bytes()
            return msgspec.json.decode(raw, type=kind)
        except (FileNotFoundError, msgspec.DecodeError):
            raise _unknown(name) from None

    def _all(self, tenant: str, pattern: str, kind: type[Stored]) -> Iterator[Stored]:
        for path in sorted(self._of(tenant).glob(pattern), reverse=True):
            try:
                yield msgspec.json.decode(path.read_bytes(), type=kind)
            except FileNotFoundError:
                continue


def _new_id(prefix: str) -> str:
    """Ids sort by the time at which they were made."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(8)}"


def _unknown(name: str) -> UnknownObject:
    return UnknownObject(f"There is no file or batch {name[:64]!r} of yours.", param="id")


def _write(path: Path, value: msgspec.Struct) -> None:
    _replace(path, msgspec.json.encode(value))


def _replace(path: Path, content: bytes) -> None:
    """Readers see the old or the new content, and never a part."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    new.write_bytes(content)
    new.replace(path)
