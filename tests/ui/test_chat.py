"""Chat: an answer through a remote prefill with its way, stop, edit, two models, a lost server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, Request, expect

from tests.links.fakes import until
from tests.tiny_model import write_tiny_model
from tests.ui.visit import LONG, Server, served_tiny, visited


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that goes on for thousands of tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_model_len=8192)


async def ask(page: Page, text: str, max_tokens: int | None = None) -> None:
    if max_tokens is not None:
        await page.locator("#settings summary").click()
        await page.get_by_label("Max tokens").fill(str(max_tokens))
        await page.locator("#settings summary").click()
    await page.get_by_label("Message").fill(text)
    await page.keyboard.press("Enter")


def num_running(server: Server) -> int:
    reports = server.cluster.ingress.fleet.reports()
    return sum(status.num_running + status.num_waiting for _, status in reports)


async def test_an_answer_shows_its_way_through_two_workers(browser: Browser, model: Path) -> None:
    async with served_tiny(model) as server, visited(browser, server) as page:
        await ask(page, LONG, max_tokens=12)
        chain = page.locator(".chain")
        await expect(chain.locator(".chip.prefill")).to_contain_text("prefill")
        await expect(chain.locator(".chip.decode")).to_contain_text("decode")
        ((pulls,),) = [
            status.pulls for _, status in server.cluster.ingress.fleet.reports() if status.pulls
        ]
        moved = pulls.nbytes
        await expect(chain.locator(".moved")).to_contain_text(f"{moved / 1e3:.0f}\u202fkB")
        for stage in ("queue", "prefill", "KV transfer", "decode"):
            await expect(page.locator(".stages ul")).to_contain_text(stage)
        await page.get_by_text("Why: remote prefill").click()
        await expect(page.locator("tr.chosen")).to_contain_text("✓ prefill")
        await expect(page.locator(".sums")).to_contain_text("12 tokens")


async def test_stop_ends_the_request_on_the_workers(browser: Browser, talker: Path) -> None:
    async with served_tiny(talker) as server, visited(browser, server) as page:
        await ask(page, LONG)
        await expect(page.locator(".pace")).to_contain_text("tokens/s")
        assert num_running(server)
        await page.get_by_role("button", name="Stop").click()
        await expect(page.locator(".answer")).to_contain_text("Stopped.")
        await until(lambda: not num_running(server))
        await expect(page.locator(".chain .chip.prefill")).to_be_visible()
        await expect(page.get_by_role("button", name="Send")).to_be_visible()


async def test_a_message_is_edited(browser: Browser, model: Path) -> None:
    async with served_tiny(model) as server, visited(browser, server) as page:
        await ask(page, "first", max_tokens=4)
        await expect(page.locator(".way")).to_have_count(1)
        await ask(page, "second")
        await expect(page.locator(".way")).to_have_count(2)
        await page.get_by_role("button", name="Edit").first.click()
        await expect(page.locator("article")).to_have_count(0)
        await expect(page.get_by_label("Message")).to_have_value("first")
        await expect(page.get_by_label("compare")).to_be_hidden()  # there is one model


async def test_two_models_answer_side_by_side(
    browser: Browser, model: Path, tmp_path: Path
) -> None:
    """Each goes on with what it said itself."""
    other = write_tiny_model(tmp_path / "other", seed=7)
    async with served_tiny(model, other) as server, visited(browser, server) as page:
        sent: dict[str, Any] = {}

        def note(request: Request) -> None:
            if request.url.endswith("chat/completions"):
                sent[request.post_data_json["model"]] = request.post_data_json["messages"]

        page.on("request", note)
        await page.get_by_label("compare").check()
        for name, with_it in (("tiny", "other"), ("other", "tiny")):
            await page.get_by_label("Model").select_option(name)
            await expect(page.locator("#other")).to_have_value(with_it)
        await page.locator("#settings summary").click()
        await page.get_by_label("Temperature").fill("0")
        await page.locator("#settings summary").click()
        await ask(page, "first", max_tokens=5)
        await expect(page.locator(".two .answer .way")).to_have_count(2)
        await ask(page, "second")
        await expect(page.locator(".two .answer .way")).to_have_count(4)
        said = {}
        for name in ("tiny", "other"):
            question, answer, _ = sent[name]
            body = {"model": name, "messages": [question], "temperature": 0, "max_tokens": 5}
            async with httpx.AsyncClient(base_url=server.url) as client:
                reply = (await client.post("/v1/chat/completions", json=body)).json()
            said[name] = reply["choices"][0]["message"]["content"]
            assert answer == {"role": "assistant", "content": said[name]}
        assert said["tiny"] != said["other"]


async def test_text_of_a_model_is_never_markup(browser: Browser, model: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    answer = f"{evil} **bold** `code`\n```html\n<script>alert(2)</script>\n```\n- *item*"
    event = {"id": "x", "choices": [{"index": 0, "delta": {"content": answer}}]}
    async with served_tiny(model) as server, visited(browser, server, expected="404") as page:
        body = f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n"
        await page.route(
            "**/v1/chat/completions",
            lambda route: route.fulfill(body=body, content_type="text/event-stream"),
        )
        await ask(page, f"{evil} hello")
        text = page.locator(".answer .text")
        await expect(text.locator("strong")).to_have_text("bold")
        await expect(text.locator(".prose").first.locator("code")).to_have_text("code")
        await expect(text.locator("pre")).to_have_text("<script>alert(2)</script>\n")
        await expect(text.locator("em")).to_have_text("item")
        await expect(text.locator(".prose").first).to_contain_text(evil)
        await expect(page.locator(".bubble")).to_have_text(f"{evil} hello")
        assert await page.locator("main img, main script").count() == 0


async def test_a_server_that_goes_away_comes_back(browser: Browser, talker: Path) -> None:
    gone = "ERR_"
    async with served_tiny(talker) as server, visited(browser, server, expected=gone) as page:
        await ask(page, LONG)
        await expect(page.locator(".pace")).to_contain_text("tokens/s")
        await server.end()
        await expect(page.locator(".problem")).to_contain_text("The server went away")
        await expect(page.get_by_role("status").first).to_contain_text("does not answer")
        await ask(page, "are you there?")
        await expect(page.locator(".problem").nth(1)).to_contain_text("does not answer")
        await server.begin()
        await expect(page.locator("#status.there")).to_contain_text("1 prefill + 1 decode")
        await ask(page, "and now?", max_tokens=4)
        await expect(page.locator("article").last.locator(".way")).to_be_visible()


async def test_keys_alone_are_enough(browser: Browser, model: Path) -> None:
    """Tabs by arrows, a message by Enter, the answer's reasons by Enter."""
    async with served_tiny(model) as server, visited(browser, server) as page:
        await expect(page.locator("#status.there")).to_be_visible()
        await page.get_by_role("tab", name="Chat").focus()
        for name in ("Fleet", "Plan", "Chat"):
            await page.keyboard.press("ArrowRight")
            await expect(page.get_by_role("tab", name=name)).to_be_focused()
            await expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
        await page.locator("#settings summary").focus()
        await page.keyboard.press("Enter")
        await page.get_by_label("Max tokens").focus()
        await page.keyboard.type("4")
        await page.get_by_label("Message").focus()
        await page.keyboard.type("hello")
        await page.keyboard.press("Shift+Enter")
        await page.keyboard.type("you")
        await page.keyboard.press("Enter")
        await expect(page.locator(".bubble")).to_have_text("hello\nyou")
        await page.locator(".way summary").focus()
        await page.keyboard.press("Enter")
        await expect(page.get_by_role("region", name="Candidates")).to_be_visible()
