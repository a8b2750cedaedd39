"""The fleet: cards of workers, one that is killed, transfers as arrows."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
from playwright.async_api import Browser, expect

from disagg.router.autoscale import ScalingDecision
from tests.ui.visit import LONG, Server, served_tiny, visited


async def chat(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 8}
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


async def test_a_worker_that_dies_leaves_the_page(browser: Browser, model: Path) -> None:
    async with (
        served_tiny(model, num_decode=2) as server,
        visited(browser, server, viewport={"width": 1200, "height": 900}) as page,
    ):
        await page.get_by_role("tab", name="Fleet").click()
        cards = page.locator(".worker")
        await expect(cards).to_have_count(3)
        await chat(server)
        await expect(page.locator("#transfers li")).to_have_count(1)
        await expect(page.locator("#pools path.flow")).to_have_count(1)
        dying = server.cluster.workers[-1]
        await server.cluster.stop_worker(dying)
        await expect(page.locator(f"[data-worker={dying.record.worker_id}]")).to_have_count(0)
        await expect(cards).to_have_count(2)
        await expect(page.locator("#events")).to_contain_text(f"{dying.record.worker_id} left")
        scaled = ScalingDecision(time.time(), "tiny", "decode", 1, 2, 0.061, 0.05, "")
        server.cluster.ingress.state.scaling = [scaled]
        await expect(page.locator("#events")).to_contain_text(
            "tiny-decode scaled from 1 to 2: then a token is predicted to take 61\u202fms"
            " (goal 50\u202fms)"
        )
        tier = server.cluster.config.tiers[0]
        new = await server.cluster.start_worker(tier, "decode")
        await expect(page.locator("#events")).to_contain_text(f"{new.record.worker_id} joined")


async def test_figures_are_those_of_the_endpoint(browser: Browser, model: Path) -> None:
    async with served_tiny(model) as server, visited(browser, server) as page:
        for _ in range(2):
            await chat(server)
        await page.get_by_role("tab", name="Fleet").click()
        tile = page.get_by_role("region", name="tiny")
        async with httpx.AsyncClient(base_url=server.url) as client:
            totals = (await client.get("/debug/fleet")).json()["models"][0]["totals"]
        share = 100 * totals["num_cached_tokens"] / totals["num_prompt_tokens"]
        assert share
        await expect(tile).to_contain_text(f"cached prompt{share:.0f}\u202f%")
        await expect(page.locator("#refusals")).to_contain_text("Nothing.")
