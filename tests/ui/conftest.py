"""A real browser before the application in this process. `make test-ui` prepares what it needs."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator

import pytest

try:
    from playwright.async_api import Browser, async_playwright, expect
except ImportError as error:
    raise pytest.UsageError(
        "The tests of the page need Playwright: `make test-ui` installs it beside .venv."
    ) from error

expect.set_options(timeout=60_000)  # for what never comes: machines are shared

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str:
    named = os.environ.get("DISAGG_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise pytest.UsageError(
            "The tests of the page need Chromium: install it (`apt-get install chromium`), or name"
            " its file in DISAGG_CHROMIUM."
        )
    return found


CHROMIUM = find_chromium()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        # The sandbox needs rights that containers lack; it opens pages of this server only.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        await browser.close()
