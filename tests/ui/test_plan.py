"""The planner's page has the figures of `disagg plan`, and its command gives them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml
from playwright.async_api import Browser, expect

from disagg.cli.main import main
from disagg.config import ASSETS
from tests.ui.visit import served_tiny, visited


async def test_the_figures_are_those_of_the_command(
    browser: Browser, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
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
        async with page.expect_download() as saving:
            await page.get_by_role("link", name="serve.yaml").click()
        saved = await (await saving.value).path()
        assert main([*shlex.split(words)[1:], "--no-play", "--write", str(tmp_path)]) == 0
        assert yaml.safe_load(saved.read_text()) == yaml.safe_load(
            (tmp_path / "serve.yaml").read_text()
        )
        await page.get_by_label("TTFT SLO").fill("0.001")
        await expect(report.locator(".problem")).to_contain_text("cannot be met")


async def test_a_model_is_described_by_its_configuration(browser: Browser, model: Path) -> None:
    async with served_tiny(model) as server, visited(browser, server) as page:
        await page.get_by_role("tab", name="Plan").click()
        form, report = page.locator("#plan"), page.locator("#report")
        await form.get_by_label("Model").select_option("config.json")
        await expect(report.locator(".problem")).to_contain_text("Paste the config.json")
        text = (ASSETS / "demo-large" / "config.json").read_text()
        await form.get_by_label("Its config.json").fill(text)
        await form.get_by_label("GPUs of a worker").fill("2")
        await expect(report.locator(".planned").first).to_contain_text("× 2 h100")
        await expect(report.locator(".command")).to_contain_text("disagg plan DIRECTORY")
