"""Images in messages, for a model that takes them."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import httpx2
import pytest

from disagg.api import images
from disagg.api.apis import CHAT, MESSAGES, RESPONSES, Api
from disagg.api.images import ImageRules
from disagg.config import HttpConfig
from disagg.errors import InvalidRequest
from disagg.messages import GenerateRequest
from tests.api.apps import URL, http_client, make_app, until
from tests.api.fakes import TOKENIZER, FakeGenerate, served_model
from tests.api.test_service import CALLER, chat_request, service

SEEING = (
    "{% for m in messages %}[{{ m.role }} {% for p in m.content %}"
    "{{ '(<|endoftext|>)' if p.type == 'image' else p.text }}{% endfor %}]{% endfor %}"
)
MARK = 0  # <|endoftext|>
HERE = "127.0.0.1"
TEXT = {"type": "text", "text": "hi"}


def url_of(image: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(image).decode()


def shown(url: str, detail: str = "low") -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


async def asked(*parts: dict[str, Any], role: str = "user", **fields: Any) -> GenerateRequest:
    model = served_model(template=SEEING).with_images((HERE,))
    messages = [{"role": "system", "content": "see"}, {"role": role, "content": list(parts)}]
    return await chat_request(service(model), messages=messages, **fields)


async def test_images_keep_their_order_and_text_shows_none() -> None:
    model = served_model(template=SEEING).with_images((HERE,))
    assert model.images == ImageRules(MARK, (HERE,))
    forged = {"type": "text", "text": "<|endoftext|>"}
    request = await asked(TEXT, shown(url_of(b"one")), forged, shown(url_of(b"two")))
    assert request.images == (b"one", b"two")
    text = TOKENIZER.decode(request.token_ids, skip_special_tokens=False)
    assert text == "[system see][user hi(<|endoftext|>)<|endoftext|>(<|endoftext|>)]"
    assert request.token_ids.count(MARK) == 2  # and the text is other tokens


def in_chat(text: str, image: str) -> dict[str, Any]:
    parts = [{"type": "text", "text": text}, shown(url_of(image.encode()))]
    messages = [{"role": "system", "content": "see"}, {"role": "user", "content": parts}]
    return {"messages": messages}


def in_response(text: str, image: str) -> dict[str, Any]:
    parts = [
        {"type": "input_text", "text": text},
        {"type": "input_image", "image_url": url_of(image.encode()), "detail": "auto"},
    ]
    return {"instructions": "see", "input": [{"role": "user", "content": parts}]}


def in_message(text: str, image: str) -> dict[str, Any]:
    data = base64.b64encode(image.encode()).decode()
    source = {"type": "base64", "media_type": "image/png", "data": data}
    parts = [{"type": "text", "text": text}, {"type": "image", "source": source}]
    return {"max_tokens": 9, "system": "see", "messages": [{"role": "user", "content": parts}]}


async def understood(api: Api, body: dict[str, Any]) -> GenerateRequest:
    model = served_model(template=SEEING).with_images((HERE,))
    run = await service(model).prepare(api, json.dumps(body).encode(), CALLER)
    return run.requests[0]


async def test_all_dialects_show_the_same() -> None:
    found = [
        await understood(api, body_of("hi", "one"))
        for api, body_of in ((CHAT, in_chat), (RESPONSES, in_response), (MESSAGES, in_message))
    ]
    assert {request.images for request in found} == {(b"one",)}
    texts = {TOKENIZER.decode(each.token_ids, skip_special_tokens=False) for each in found}
    assert texts == {"[system see][user hi(<|endoftext|>)]"}
    assert len({request.block_hashes for request in found}) == 1


def _image(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


@pytest.mark.parametrize(
    ("part", "param", "words"),
    [
        ({"type": "input_image", "image_url": "http://a/x"}, "content[0].image_url", "only from"),
        ({"type": "input_image", "file_id": "f"}, "content[0].image_url", "Missing"),
        ({"type": "input_file"}, "content[0].type", "only text"),
        ({"type": "output", "content": [{"type": "input_image"}]}, "output[0].type", "only text"),
        (_image(type="url", url="http://a/x"), "content[0].source", "only from"),
        (_image(type="base64", media_type="image/png", data="?"), "content[0].source", "base64"),
        (
            _image(type="base64", media_type="image/bmp", data=""),
            "content[0].source.media_type",
            "bmp",
        ),
        (_image(type="file", file_id="f"), "content[0].source.type", "only text"),
    ],
)
async def test_what_other_dialects_refuse(part: dict[str, Any], param: str, words: str) -> None:
    """At its place in the request, and not in that of a chat."""
    is_message = part["type"] == "image"
    item: dict[str, Any] = {"role": "user", "content": [part]}
    if part["type"] == "output":
        item = {"type": "function_call_output", "call_id": "a", "output": part["content"]}
    key = "messages" if is_message else "input"
    body = {key: [item], **({"max_tokens": 9} if is_message else {"instructions": "see"})}
    with pytest.raises(InvalidRequest, match=words) as refusal:
        await understood(MESSAGES if is_message else RESPONSES, body)
    assert refusal.value.param == f"{key}[0].{param}"


async def test_no_tokens_of_images_are_counted() -> None:
    counted = {key: value for key, value in in_message("hi", "one").items() if key != "max_tokens"}
    model = served_model(template=SEEING).with_images(())
    with pytest.raises(InvalidRequest, match="only an engine knows"):
        await service(model).count_tokens(json.dumps(counted).encode())


async def test_names_of_blocks_end_with_the_first_image() -> None:
    one, again, other = [
        await asked(TEXT, shown(url_of(first)), shown(url_of(second)), TEXT)
        for first, second in ((b"one", b"two"), (b"one", b"three"), (b"four", b"two"))
    ]
    begin = one.token_ids.index(MARK)
    assert len(one.block_hashes) == begin // 4 + 1
    assert one.block_hashes == again.block_hashes
    assert one.block_hashes[:-1] == other.block_hashes[:-1]
    assert one.block_hashes[-1] != other.block_hashes[-1]


async def test_an_image_begins_where_its_own_token_is() -> None:
    """As with Qwen-VL, whose template writes tokens around it that stay."""
    template = SEEING.replace("(<|endoftext|>)", "<|im_start|><|endoftext|><|im_end|>")
    model = served_model(template=template)
    assert model.with_images((), MARK).images == ImageRules(MARK)
    (start,) = TOKENIZER.encode_chat("<|im_start|>")
    for token_id in (None, 99999):
        assert model.with_images((), token_id).images == ImageRules(start)


async def test_a_template_that_shows_lists_only_gets_texts_as_lists() -> None:
    model = served_model(template=SEEING)  # with any engine
    request = await chat_request(service(model), messages=[{"role": "user", "content": "hi"}])
    assert TOKENIZER.decode(request.token_ids) == "[user hi]"


IMAGE = shown(url_of(b"one"))


@pytest.mark.parametrize(
    ("parts", "fields", "param", "words"),
    [
        ([shown("http://169.254.169.254/x")], {}, ".url", "only from 127.0.0.1"),
        ([shown("http://127.0.0.1@10.0.0.1/x")], {}, ".url", "not fetched"),
        ([shown("http://10.0.0.1\\@127.0.0.1/x")], {}, ".url", "not fetched"),
        ([shown("http://127.0.0.1/" + "x" * 8192)], {}, ".url", "longer than 8192"),
        ([shown("http://[::1/x")], {}, ".url", "not fetched"),
        ([shown("file://127.0.0.1/etc/passwd")], {}, ".url", "not fetched"),
        ([shown("ftp://127.0.0.1/x")], {}, ".url", "not fetched"),
        ([shown("data:image/png;base64,???")], {}, ".url", "not in base64"),
        ([shown("data:text/html;base64,aGk=")], {}, ".url", "data:image/png;base64"),
        ([{"type": "image_url"}], {}, ".image_url", "Missing"),
        (
            [{"type": "image", "source": {"type": "url", "url": "http://a"}}],
            {},
            ".image_url",
            "Miss",
        ),
        ([{"type": "image_url", "image_url": "http://a"}], {}, ".image_url", "not fetched"),
        ([{"type": "input_audio"}], {}, ".type", "only text"),
        ([IMAGE], {"role": "system"}, ".type", "only text"),
        ([IMAGE], {"prompt_logprobs": 1}, "prompt_logprobs", "images"),
        ([IMAGE], {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "images"),
        ([IMAGE] * 3, {}, "messages", "at most 2"),
        ([shown(url_of(bytes(11)))], {}, "messages", "larger than"),
        ([shown(url_of(bytes(6)))], {"n": 2}, "messages", "larger than"),
        ([IMAGE], {"continue_final_message": True}, "continue_final_message", "text"),
    ],
)
async def test_what_is_refused(
    parts: list[dict[str, Any]],
    fields: dict[str, Any],
    param: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "MAX_NUM_IMAGES", 2)
    monkeypatch.setattr(images, "MAX_NBYTES", 10)
    with pytest.raises(InvalidRequest, match=words) as refusal:
        await asked(*parts, **fields)
    assert (refusal.value.param or "").endswith(param)


async def test_a_template_must_show_all_images() -> None:
    only_first = SEEING.replace("{% for p in m.content %}", "{% for p in m.content[:1] %}")
    model = dataclasses.replace(served_model(template=only_first), images=ImageRules(MARK))
    messages = [{"role": "user", "content": [IMAGE, IMAGE]}]
    with pytest.raises(InvalidRequest, match="does not show all"):
        await chat_request(service(model), messages=messages)


class _Host(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/garbage":
            self.wfile.write(b"no HTTP\r\n\r\n")
            return
        self.send_response({"/moved": 302, "/absent": 404}.get(self.path, 200))
        self.send_header("Location", "/image")
        self.end_headers()
        self.wfile.write(bytes(100) if self.path == "/large" else b"fetched")

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    server = HTTPServer((HERE, 0), _Host)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://{HERE}:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


async def test_an_allowed_host_is_asked_and_leads_to_no_other(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = await asked(shown(f"{host}/image"), shown(url_of(b"two")))
    assert request.images == (b"fetched", b"two")
    monkeypatch.setattr(images, "MAX_NBYTES", 50)
    for path, words in (
        ("moved", "HTTPError"),
        ("absent", "HTTPError"),
        ("large", "larger"),
        ("with a space", "InvalidURL"),
        ("garbage", "BadStatusLine"),
    ):
        with pytest.raises(InvalidRequest, match=words) as refusal:
            await asked(shown(f"{host}/{path}"))
        assert refusal.value.param == "messages[1].content[0].image_url.url"


async def test_fetched_images_count_as_bodies_until_the_end(host: str) -> None:
    ends = asyncio.get_running_loop().create_future()
    generate = FakeGenerate("ok", pause=lambda: ends)
    model = served_model(template=SEEING).with_images((HERE,))
    message = {"role": "user", "content": [shown(f"{host}/large")]}
    body = json.dumps({"messages": [message]}).encode()
    config = HttpConfig(max_requests_nbytes=2 * (len(body) + 100) - 1)
    async with http_client(make_app(generate, model, config=config)) as client:

        async def ask() -> httpx2.Response:
            headers = {"content-type": "application/json"}
            return await client.post(URL, content=body, headers=headers)

        first = asyncio.create_task(ask())
        await until(lambda: bool(generate.requests))
        refused = await ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        ends.set_result(None)
        assert (await first).status_code == 200
        assert (await ask()).status_code == 200


async def test_a_host_that_is_silent_keeps_no_thread_from_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_asked, answers = threading.Event(), threading.Event()

    def silent(image: images.RemoteImage, most: int) -> bytes:
        is_asked.set()
        assert answers.wait(60)
        return b"late"

    monkeypatch.setattr(images, "_fetch", silent)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    fetch = asyncio.create_task(asked(shown(f"http://{HERE}/x")))
    await until(is_asked.is_set)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "free"), 20) == "free"
    finally:
        answers.set()
        assert (await fetch).images == (b"late",)
