"""What axe finds in each view, 360 pixels, and the pictures of the documentation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.async_api import Browser, Page, expect

from disagg.cli.serve_config import bundled_cascade
from disagg.config import ServeConfig
from disagg.config_checks import parse_config
from tests.ui.visit import Server, served, visited

AXE = Path(os.environ["DISAGG_AXE"]).read_text()
MAX_NBYTES = 200_000
# In docs/images if asked for: times differ in each of them.
FOLDER = os.environ.get("DISAGG_SCREENSHOTS")
SIZES = {"wide": {"width": 1120, "height": 780}, "phone": {"width": 360, "height": 720}}


def config() -> ServeConfig:
    pools = {"prefill": {"num_replicas": 1}, "decode": {"num_replicas": 2}}
    raw = {
        "cluster_key": "key",
        "cascade": bundled_cascade(),
        "insecure": True,
        "tiers": [
            {"model": "demo-small", **pools},
            {"model": "demo-large", "decode": {"num_replicas": 1}, "prefill": {"num_replicas": 1}},
        ],
    }
    return parse_config(raw)


@asynccontextmanager
async def loaded(server: Server) -> AsyncIterator[None]:
    """Requests all the time, half of them with prompts for prefill workers."""

    async def send(client: httpx.AsyncClient, number: int) -> None:
        for turn in range(10_000):
            text = f"Remember {number} {turn}. " + "Nothing else happened that day. " * 30 * (
                turn % 2
            )
            body = {"model": ("demo-small", "demo-large")[number % 2], "max_tokens": 48}
            messages = [{"role": "user", "content": f"{text}What is the capital of Peru?"}]
            extra = {"messages": messages, "ignore_eos": True}
            await client.post("/v1/chat/completions", json=body | extra)

    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        tasks = [asyncio.create_task(send(client, number)) for number in range(4)]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def violations(page: Page) -> list[str]:
    await page.evaluate(AXE)
    found = await page.evaluate("axe.run()")
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary']}"
        for each in found["violations"]
        for node in each["nodes"]
    ]


async def fill(page: Page) -> None:
    """Two answers: through two workers, and of a larger model than the first."""
    await page.get_by_text("Settings").click()
    await page.get_by_label("Temperature").fill("0")
    await page.get_by_text("Settings").click()
    await page.get_by_role("button", name="A long document").click()
    await expect(page.locator(".way")).to_have_count(1)
    await page.get_by_label("Message").fill("What is 51234 plus 23456?")
    await page.keyboard.press("Enter")
    await expect(page.locator(".way")).to_have_count(2)
    await expect(page.locator(".cascade").last).to_contain_text("demo-large answered")


async def picture(page: Page, name: str, tmp_path: Path) -> None:
    """Of what the window shows, without the mark of the focus."""
    await page.evaluate("document.activeElement.blur()")
    file = (Path(FOLDER) if FOLDER else tmp_path) / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    await page.screenshot(path=file, animations="disabled")
    assert file.stat().st_size < MAX_NBYTES


@pytest.mark.parametrize(
    ("size", "scheme"), [("wide", "light"), ("wide", "dark"), ("phone", "light")]
)
async def test_each_view(browser: Browser, tmp_path: Path, size: str, scheme: Any) -> None:
    options = {"viewport": SIZES[size], "color_scheme": scheme, "bypass_csp": True}
    name = "phone" if size == "phone" else scheme
    async with served(config()) as server, visited(browser, server, **options) as page:
        await expect(page.get_by_role("button", name="A long document")).to_be_visible()
        assert await violations(page) == []
        await fill(page)
        await page.get_by_text("Why: ").last.click()
        await page.evaluate("scrollTo(0, 0)")
        await picture(page, f"chat-{name}", tmp_path)
        assert await violations(page) == []
        async with loaded(server):
            await page.get_by_role("tab", name="Fleet").click()
            await expect(page.locator(".worker")).to_have_count(5)
            if size == "wide":
                if FOLDER:
                    await asyncio.sleep(30)  # for a history that one can see
                await expect(page.locator("path.moving").first).to_be_attached()
            await page.evaluate("scrollTo(0, 0)")
            await picture(page, f"fleet-{name}", tmp_path)
        assert await violations(page) == []
        await page.get_by_role("tab", name="Plan").click()
        await expect(page.locator(".planned")).to_have_count(2)
        await page.evaluate("scrollTo(0, 0)")
        await picture(page, f"plan-{name}", tmp_path)
        assert await violations(page) == []
        for view in ("Chat", "Fleet", "Plan"):
            await page.get_by_role("tab", name=view).click()
            width = await page.evaluate("document.documentElement.scrollWidth")
            assert width == SIZES[size]["width"], f"{view} is wider than the window"
