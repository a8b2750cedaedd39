"""The planner's page has the figures of `disagg plan`, and its command gives them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from playwright.async_api import Browser, expect

from disagg.cli.main import main
from tests.ui.visit import served_tiny, visited


async def test_the_figures_are_those_of_the_command(
    browser: Browser, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with served_tiny(model) as server, visited(browser, server, expected="400") as page:
        await page.get_by_role("tab", name="Plan").click()
        report = page.locator("#report")
        await expect(report).to_contain_text(
            "disagg plan llama-3-70b --gpu h100 --requests-per-s 100"
        )
        await page.locator("#plan").get_by_label("Model").select_option("qwen3-8b")
        await page.get_by_label("Answer tokens").fill("300")
        await page.get_by_label("TPOT SLO").fill("0.02")
        await page.get_by_label("h200").check()
        command = page.locator(".command pre")
        words = (
            "disagg plan qwen3-8b --gpu h100 --gpu h200 --requests-per-s 100"
            " --output-tokens 300 --tpot 0.02"
        )
        await expect(command).to_have_text(words)
        assert main([*shlex.split(words)[1:], "--json", "--no-play"]) == 0
        said = json.loads(capsys.readouterr().out)
        fleet = said["apart"] if said["disaggregate"] else said["together"]
        shown = report.locator(".figures")
        await expect(shown).to_contain_text(
            " : ".join(str(p["num_workers"]) for p in fleet["pools"])
        )
        await expect(shown).to_contain_text(f"{fleet['num_gpus']} GPUs")
        await expect(shown).to_contain_text(f"${fleet['usd_per_hour']:,.2f}")
        await expect(shown).to_contain_text(f"{fleet['tokens_per_s_per_gpu']:,.0f}")
        cost = f"${fleet['usd_per_million_tokens']['input_and_output']:.3f}"
        await expect(shown).to_contain_text(cost)
        await expect(report.get_by_role("img", name="Roofline")).to_be_visible()
        await page.get_by_label("TTFT SLO").fill("0.001")
        await expect(report.locator(".problem")).to_contain_text("cannot be met")
