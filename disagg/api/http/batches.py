"""`/v1/files` and `/v1/batches`: OpenAI's batches. `disagg.batch` stores and runs them.

A tenant sees only its own. Everything that touches the disk runs in threads.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from disagg.api.apis import HttpRoute, Method
from disagg.api.http.reply import Reply, Stream, Writer
from disagg.api.http.request import Bodies, HttpRequest
from disagg.api.http.uploads import Form
from disagg.api.json_body import Body, read_body
from disagg.api.openai.fields import Metadata
from disagg.api.refusals import UnknownUrl, invalid_value, missing_parameter
from disagg.batch.store import KEPT_S, BatchStore
from disagg.config import HttpConfig

CHUNK_NBYTES = 1 << 20  # of a file that is written or read in one call of a thread
CHECK_NBYTES = 16 << 20  # after so much of an upload it is checked whether there is room
MAX_LISTED = 100


class BatchRequest(Body, kw_only=True):
    """The body of `POST /v1/batches`."""

    input_file_id: Annotated[str, Meta(max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses"]
    completion_window: Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,2}h\Z")] = "24h"
    metadata: Metadata | None = None


class BatchApi:
    def __init__(self, store: BatchStore, config: HttpConfig, now: Callable[[], float]) -> None:
        self._store = store
        self._config = config
        self._now = now
        self._bodies = Bodies(config.max_requests_nbytes)

    @property
    def routes(self) -> list[HttpRoute]:
        """A path with an id comes after those that have more behind it."""
        return [
            HttpRoute("/v1/files", self.files, {"GET": None, "POST": None}),
            HttpRoute("/v1/files/{id}/content", self.content, {"GET": None}),
            HttpRoute("/v1/files/{id}", self.file, {"GET": None, "DELETE": None}),
            HttpRoute("/v1/batches", self.batches, {"GET": None, "POST": BatchRequest}),
            HttpRoute("/v1/batches/{id}/cancel", self.cancel, {"POST": None}),
            HttpRoute("/v1/batches/{id}", self.batch, {"GET": None}),
        ]

    async def files(self, request: HttpRequest) -> Reply:
        if request.method == "POST":
            return await self._upload(request)
        purpose = request.in_query("purpose")

        def list_files() -> Reply:
            files = self._store.files(request.tenant)
            return _page(request, (each for each in files if purpose in (None, each.purpose)))

        return await asyncio.to_thread(list_files)

    async def file(self, request: HttpRequest) -> Reply:
        store, tenant, file_id = self._store, request.tenant, request.in_path
        if request.method == "DELETE":
            await asyncio.to_thread(store.delete_file, tenant, file_id)
            return _json({"id": file_id, "object": "file", "deleted": True})
        return _json(await asyncio.to_thread(store.file, tenant, file_id))

    async def content(self, request: HttpRequest) -> Stream:
        store, named = self._store, (request.tenant, request.in_path)
        stored = await asyncio.to_thread(store.file, *named)
        path = await asyncio.to_thread(store.path, *named)

        async def pieces(writer: Writer) -> AsyncGenerator[bytes, None]:
            with await asyncio.to_thread(path.open, "rb") as file:
                yield await asyncio.to_thread(file.read, CHUNK_NBYTES)
                while piece := await asyncio.to_thread(file.read, CHUNK_NBYTES):
                    yield piece

        length = (b"content-length", b"%d" % stored.bytes)
        headers = [(b"content-type", b"application/jsonl"), length]
        return Stream(pieces, lambda error: b"", headers)

    async def batches(self, request: HttpRequest) -> Reply:
        store, tenant = self._store, request.tenant
        if request.method != "POST":
            return await asyncio.to_thread(lambda: _page(request, store.batches(tenant)))
        request.check_json()
        body = await request.read_body(1 << 16, self._bodies, self._config.default_timeout_s)
        self._bodies.give_back(request.num_body_bytes)
        request.num_body_bytes = 0
        wanted = read_body(body, BatchRequest)

        def create() -> Reply:
            store.file(tenant, wanted.input_file_id)
            store.check_room(tenant)
            expires_at = int(self._now()) + 3600 * int(wanted.completion_window[:-1])
            fields = msgspec.structs.asdict(wanted)
            return _json(store.new_batch(tenant, expires_at=expires_at, **fields))

        return await asyncio.to_thread(create)

    async def batch(self, request: HttpRequest) -> Reply:
        return _json(await asyncio.to_thread(self._store.batch, request.tenant, request.in_path))

    async def cancel(self, request: HttpRequest) -> Reply:
        def cancel() -> Reply:
            self._store.cancel(self._store.batch(request.tenant, request.in_path))
            return _json(self._store.batch(request.tenant, request.in_path))

        return await asyncio.to_thread(cancel)

    async def _upload(self, request: HttpRequest) -> Reply:
        store, tenant = self._store, request.tenant
        await asyncio.to_thread(store.check_room, tenant)
        path = await asyncio.to_thread(store.new_file, tenant)
        try:
            with await asyncio.to_thread(path.open, "wb") as target:
                form = Form(request.headers.get(b"content-type", b""), target)
                await self._read_form(request, form)
            filename, kept_s = form.check(), _kept_s(form.fields)
            stored = await asyncio.to_thread(store.keep_file, path, filename, "batch", kept_s)
        except BaseException:  # also if the client has gone
            with suppress(OSError):
                path.unlink()
            raise
        return _json(stored)

    async def _read_form(self, request: HttpRequest, form: Form) -> None:
        nbytes, checked = 0, 0
        async for part in _join(request.parts(self._config.files_nbytes)):
            nbytes += len(part)
            await asyncio.to_thread(form.write, part)
            if nbytes - checked >= CHECK_NBYTES:
                checked = nbytes
                await asyncio.to_thread(self._store.check_room, request.tenant)
        await asyncio.to_thread(self._store.check_room, request.tenant)


async def _join(parts: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """`parts` in pieces of about `CHUNK_NBYTES`."""
    piece = bytearray()
    async for part in parts:
        piece += part
        if len(piece) >= CHUNK_NBYTES:
            yield bytes(piece)
            piece.clear()
    yield bytes(piece)


def _kept_s(fields: dict[str, str]) -> int:
    """How long an upload is kept. Raises `InvalidRequest` for fields that are wrong."""
    purpose = fields.get("purpose")
    if purpose is None:
        raise missing_parameter("purpose")
    if purpose != "batch":
        raise invalid_value("purpose", f"it must be batch, not {purpose[:64]!r}.")
    wanted = fields.get("expires_after[seconds]", str(KEPT_S))
    if not re.fullmatch(r"[0-9]{1,8}", wanted) or not 3600 <= int(wanted) <= KEPT_S:
        raise invalid_value("expires_after[seconds]", f"it must be from 3600 to {KEPT_S}.")
    return int(wanted)


def _page(request: HttpRequest, found: Iterator[Any]) -> Reply:
    """A page of a list, which is newest first. Raises `InvalidRequest`."""
    limit = request.in_query("limit") or "20"
    if not re.fullmatch(r"[0-9]{1,5}", limit) or int(limit) < 1:
        raise invalid_value("limit", f"it must be from 1 to {MAX_LISTED}.")
    if request.in_query("order") == "asc":
        found = reversed(list(found))
    after = request.in_query("after")
    if after is not None:
        found = iter(list(found))
        for each in found:
            if each.id == after:
                break
    number = min(int(limit), MAX_LISTED)
    page = list(islice(found, number + 1))
    shown = page[:number]
    return _json(
        {
            "object": "list",
            "data": shown,
            "first_id": shown[0].id if shown else None,
            "last_id": shown[-1].id if shown else None,
            "has_more": len(page) > number,
        }
    )


def _json(value: Any) -> Reply:
    return Reply(msgspec.json.encode(value))


def no_files() -> list[HttpRoute]:
    """The paths of a server that keeps no files."""

    async def refuse(request: HttpRequest) -> Reply:
        raise UnknownUrl(
            "This server keeps no files, so it runs no batches: start it with --files-directory"
            " (http.files_directory)."
        )

    methods: dict[Method, None] = {"GET": None, "POST": None, "DELETE": None}
    paths = ("/v1/files", "/v1/batches", "/v1/files/{id}", "/v1/batches/{id}")
    return [HttpRoute(path, refuse, methods, is_shown=False) for path in paths]
