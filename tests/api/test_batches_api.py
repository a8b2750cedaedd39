"""`/v1/files` and `/v1/batches` by OpenAI's client, in front of a stand-in for the workers."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from disagg.api.http.app import HttpApp
from disagg.api.http.batches import BatchApi
from disagg.api.http.in_process import asking_for
from disagg.batch.queue import BatchQueue
from disagg.batch.store import KEPT_S, BatchStore
from disagg.config import HttpConfig
from disagg.messages import GenerateRequest, PutDelta
from tests.api.apps import http_client, make_app, openai_client
from tests.api.fakes import FakeGenerate

CHATS: Any = "/v1/chat/completions"
KEYS: Any = {"red": "key-of-red", "blue": "key-of-blue"}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.batch.queue.LOOK_S", 0.01)


class HeldGenerate(FakeGenerate):
    """Lets some requests through; others wait until they are cancelled, or for `release`."""

    def __init__(self, num_through: int) -> None:
        super().__init__()
        self.num_through = num_through
        self.num_held = 0
        self.release = asyncio.Event()

    async def __call__(self, request: GenerateRequest, put: PutDelta) -> None:
        if self.num_through == 0:
            self.num_held += 1
            try:
                await self.release.wait()
            finally:
                self.num_held -= 1
        else:
            self.num_through -= 1
        await super().__call__(request, put)


class Server:
    """Ingresses over one directory. Their clock is moved by hand."""

    def __init__(self, directory: Path, **config: Any) -> None:
        self.now = 1000.0
        self.directory = directory
        self.config = HttpConfig(api_keys=KEYS, **config)
        self.store = BatchStore(directory, self.config.files_nbytes, lambda: self.now)
        self.queues: list[BatchQueue] = []

    def ingress(self, generate: FakeGenerate) -> HttpApp:
        api = BatchApi(self.store, self.config, lambda: self.now)
        app = make_app(generate, config=self.config, batches=api)
        ask_for = asking_for(app, lambda: self.now)
        self.queues.append(BatchQueue(self.store, ask_for, lambda: 4, lambda: self.now))
        return app

    async def close(self) -> None:
        for queue in self.queues:
            await queue.close()
        self.queues.clear()


@asynccontextmanager
async def server(directory: Path, **config: Any) -> AsyncIterator[Server]:
    made = Server(directory / "files", **config)
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def of_red(
    directory: Path, generate: FakeGenerate
) -> AsyncIterator[tuple[Server, openai.AsyncOpenAI]]:
    """A server with one ingress, and a client of it."""
    async with (
        server(directory) as made,
        openai_client(made.ingress(generate), api_key=KEYS["red"]) as client,
    ):
        yield made, client


def chats(number: int) -> bytes:
    lines = [
        {
            "custom_id": f"c{each}",
            "method": "POST",
            "url": CHATS,
            "body": {"messages": [{"role": "user", "content": f"{each}"}], "max_tokens": 4},
        }
        for each in range(number)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


async def submit(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    asked: Any = {"endpoint": CHATS, "completion_window": "24h", **fields}
    return await client.batches.create(input_file_id=file.id, **asked)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.005)


async def until_counted(client: openai.AsyncOpenAI, batch_id: str, completed: int) -> None:
    while True:
        counts = (await client.batches.retrieve(batch_id)).request_counts
        if counts is not None and counts.completed == completed:
            return
        await asyncio.sleep(0.005)


async def content(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    text = (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.splitlines()]


async def test_a_batch_from_upload_to_answers(tmp_path: Path) -> None:
    generate = FakeGenerate()
    async with of_red(tmp_path, generate) as (_, client):
        bad = b'{"custom_id": "bad", "method": "POST", "url": "/v1/completions", "body": {}}\n'
        batch = await submit(client, chats(9) + bad, metadata={"of": "test"})
        assert (batch.status, batch.metadata) == ("validating", {"of": "test"})
        assert batch.expires_at == batch.created_at + 24 * 3600
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.completed_at == 1000
        assert vars(batch.request_counts) == {"total": 10, "completed": 9, "failed": 1}
        answers = await content(client, batch.output_file_id)
        assert {each["custom_id"] for each in answers} == {f"c{each}" for each in range(9)}
        body = answers[0]["response"]["body"]
        assert body["choices"][0]["message"]["content"]
        (failed,) = await content(client, batch.error_file_id)
        assert (failed["custom_id"], failed["error"]["code"]) == ("bad", "invalid_value")
        output = await client.files.retrieve(batch.output_file_id)
        assert (output.purpose, output.expires_at) == ("batch_output", 1000 + KEPT_S)
    for request in generate.requests:  # batch work of its tenant, which may wait for a day
        assert request.tenant == "red" and math.ceil(request.deadline_unix_s) == batch.expires_at
        assert request.ttft_slo_s == request.tpot_slo_s == math.inf


async def test_a_tenant_sees_only_its_own(tmp_path: Path) -> None:
    async with server(tmp_path) as made:
        app = made.ingress(HeldGenerate(0))
        async with openai_client(app, api_key=KEYS["red"]) as red:
            batch = await submit(red, chats(1))
            assert len((await red.files.list()).data) == len((await red.batches.list()).data) == 1
        async with openai_client(app, api_key=KEYS["blue"]) as blue:
            file_id = batch.input_file_id
            assert not (await blue.files.list()).data and not (await blue.batches.list()).data
            calls: list[Any] = [
                blue.files.retrieve(file_id),
                blue.files.content(file_id),
                blue.files.delete(file_id),
                blue.batches.retrieve(batch.id),
                blue.batches.cancel(batch.id),
                blue.files.retrieve(f"../t{b'red'.hex()}/{file_id}"),
                blue.batches.create(input_file_id=file_id, endpoint=CHATS, completion_window="24h"),
            ]
            for call in calls:
                with pytest.raises(openai.NotFoundError):
                    await call
        async with http_client(app) as nobody:
            assert (await nobody.get("/v1/files")).status_code == 401


async def test_a_cancelled_batch_keeps_what_is_answered(tmp_path: Path) -> None:
    generate = HeldGenerate(3)
    async with of_red(tmp_path, generate) as (_, client):
        batch = await submit(client, chats(20))
        await until_counted(client, batch.id, 3)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelling_at and batch.cancelled_at
        assert len(await content(client, batch.output_file_id)) == 3
        assert generate.num_held == 0, "what ran has ended"
        assert (await client.batches.cancel(batch.id)).status == "cancelled"


async def test_an_expired_batch_says_what_is_not_answered(tmp_path: Path) -> None:
    generate = HeldGenerate(3)
    async with of_red(tmp_path, generate) as (made, client):
        batch = await submit(client, chats(20), completion_window="1h")
        await until_counted(client, batch.id, 3)
        await made.close()  # as a server that was down in the meantime
        made.now += 3600
        app = made.ingress(generate)
        async with openai_client(app, api_key=KEYS["red"]) as later:
            batch = await ended(later, batch.id)
            assert batch.status == "expired"
            assert vars(batch.request_counts) == {"total": 20, "completed": 3, "failed": 17}
            failed = await content(later, batch.error_file_id)
            assert {each["error"]["code"] for each in failed} == {"batch_expired"}
            assert len(await content(later, batch.output_file_id)) == 3


async def test_a_restarted_ingress_goes_on(tmp_path: Path) -> None:
    first, second = HeldGenerate(5), FakeGenerate()
    async with server(tmp_path) as made:
        async with openai_client(made.ingress(first), api_key=KEYS["red"]) as client:
            batch = await submit(client, chats(20))
            await until_counted(client, batch.id, 5)
        await made.close()
        async with openai_client(made.ingress(second), api_key=KEYS["red"]) as client:
            batch = await ended(client, batch.id)
            names = Counter(
                each["custom_id"] for each in await content(client, batch.output_file_id)
            )
    assert names == Counter(f"c{each}" for each in range(20))
    assert len(second.requests) == 15


async def test_any_ingress_answers_and_one_runs(tmp_path: Path) -> None:
    generates = [HeldGenerate(5), HeldGenerate(5)]
    async with server(tmp_path) as made:
        one, other = (made.ingress(each) for each in generates)
        async with (
            openai_client(one, api_key=KEYS["red"]) as client,
            openai_client(other, api_key=KEYS["red"]) as beside,
        ):
            batch = await submit(client, chats(20))
            await until_counted(beside, batch.id, 5)
            assert sorted(each.num_held for each in generates) == [0, 4]
            for each in generates:
                each.release.set()
            batch = await ended(beside, batch.id)
            assert batch.request_counts.completed == 20
    assert sorted(len(each.requests) for each in generates) == [0, 20]


async def test_storage_is_bounded_for_each_tenant(tmp_path: Path) -> None:
    async with server(tmp_path, files_nbytes=200_000) as made:
        app = made.ingress(FakeGenerate())
        async with openai_client(app, api_key=KEYS["red"]) as red:
            with pytest.raises(openai.APIStatusError) as refused:
                await submit(red, b"x" * 300_000)
            assert refused.value.status_code == 413
            batch = await ended(red, (await submit(red, chats(1))).id)
            assert batch.status == "failed" and "files_nbytes" in batch.errors.data[0].message
            for file in (await red.files.list()).data:
                await red.files.delete(file.id)
            await red.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        async with openai_client(app, api_key=KEYS["blue"]) as blue:
            await blue.files.create(file=("in.jsonl", b"{}"), purpose="batch")
        uploads = {path.name for path in made.directory.glob("t*/file-*") if not path.suffix}
        assert len(uploads) == 2, "what was refused is gone"


async def test_what_has_expired_is_deleted(tmp_path: Path) -> None:
    async with of_red(tmp_path, FakeGenerate()) as (made, client):
        hour: Any = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("a", b"{}"), purpose="batch", expires_after=hour)
        batch = await ended(client, (await submit(client, chats(1))).id)
        made.now += 3600
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file.id)
        made.store.sweep()
        assert not (made.directory / f"t{b'red'.hex()}" / file.id).exists()
        assert (await content(client, batch.output_file_id))[0]["custom_id"] == "c0"
        made.now += KEPT_S
        made.store.sweep()
        assert [path for path in made.directory.rglob("*") if path.is_file()] == []


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with of_red(tmp_path, FakeGenerate()) as (_, client):
        ids = [(await client.files.create(file=("a", b"{}"), purpose="batch")).id for _ in range(5)]
        assert [each.id async for each in client.files.list(limit=2)] == ids[::-1]
        assert [each.id async for each in client.files.list(limit=3, order="asc")] == ids
        assert not (await client.files.list(purpose="batch_output")).data
        with pytest.raises(openai.BadRequestError):
            await client.files.list(limit=0)


BOUNDARY = b"--b\r\ncontent-disposition: form-data; name="
FILE = BOUNDARY + b'"file"; filename="a"\r\n\r\n{}\r\n'
PURPOSE = BOUNDARY + b'"purpose"\r\n\r\nbatch\r\n'
FORM = {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("headers", "body", "status", "param"),
    [
        ({"content-type": "application/json"}, b"{}", 415, None),
        ({"content-type": "multipart/form-data"}, b"{}", 415, None),
        (FORM, b"no form", 400, "file"),
        (FORM, FILE + PURPOSE, 400, "file"),
        (FORM, PURPOSE + b"--b--", 400, "file"),
        (FORM, FILE + b"--b--", 400, "purpose"),
        (FORM, FILE + PURPOSE.replace(b"batch", b"vision") + b"--b--", 400, "purpose"),
        (FORM, FILE + PURPOSE.replace(b"batch", b"b" * 5000) + b"--b--", 400, "purpose"),
        (FORM, FILE + FILE + PURPOSE + b"--b--", 400, "file"),
        (FORM, FILE + PURPOSE + b"--b--", 200, None),
    ],
)
async def test_forms_that_are_wrong_leave_nothing(
    tmp_path: Path, headers: dict[str, str], body: bytes, status: int, param: str | None
) -> None:
    async with server(tmp_path) as made, http_client(made.ingress(FakeGenerate())) as client:
        key = {"authorization": f"Bearer {KEYS['red']}"}
        reply = await client.post("/v1/files", content=body, headers=headers | key)
        assert reply.status_code == status, reply.text
        if status != 200:
            assert reply.json()["error"]["param"] == param
        files = [path for path in made.directory.glob("t*/*") if path.is_file()]
        assert len(files) == (2 if status == 200 else 0)


@pytest.mark.parametrize(
    ("change", "status", "param"),
    [
        ({"input_file_id": "file-12"}, 404, "id"),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
    ],
)
async def test_batches_that_are_wrong_are_refused(
    tmp_path: Path, change: dict[str, Any], status: int, param: str
) -> None:
    async with of_red(tmp_path, FakeGenerate()) as (_, client):
        file = await client.files.create(file=("a", b"{}"), purpose="batch")
        asked: Any = {"input_file_id": file.id, "endpoint": CHATS, "completion_window": "24h"}
        with pytest.raises(openai.APIStatusError) as refused:
            await client.batches.create(**asked | change)
        error: Any = refused.value
        assert (error.status_code, error.param) == (status, param)


async def test_a_server_without_a_directory_says_how_to_get_one() -> None:
    async with openai_client(make_app()) as client:
        with pytest.raises(openai.NotFoundError, match="--files-directory"):
            await client.batches.list()
