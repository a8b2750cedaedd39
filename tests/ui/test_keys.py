"""With API keys: a tenant talks and sees no fleet, the operator sees it, and no URL has a key."""

from __future__ import annotations

from pathlib import Path

from playwright.async_api import Browser, Page, expect

from tests.ui.visit import served_tiny, visited

ALICE, OPERATOR = "key-of-alice-0123", "key-of-the-operator"


async def sign_in(page: Page, key: str) -> None:
    await page.get_by_role("textbox", name="Key").fill(key)
    await page.get_by_role("button", name="Sign in", exact=True).last.click()


async def test_a_tenant_talks_and_the_operator_sees_the_fleet(
    browser: Browser, model: Path
) -> None:
    keys = {"api_keys": {"alice": ALICE}, "metrics_key": OPERATOR}
    async with (
        served_tiny(model, **keys) as server,
        visited(browser, server, expected="401") as page,
    ):
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        await sign_in(page, "a wrong key")
        await expect(page.locator("#key-error")).to_have_text("The API key is invalid.")
        await sign_in(page, ALICE)
        await expect(page.locator("#account")).to_have_text("alice")
        await page.get_by_text("Settings").click()
        await page.get_by_label("Max tokens").fill("4")
        await page.get_by_label("Message").fill("hello")
        await page.keyboard.press("Enter")
        await expect(page.locator(".way")).to_be_visible()
        await page.get_by_role("tab", name="Fleet").click()
        await expect(page.locator("#locked")).to_contain_text("needs the metrics key")
        await expect(page.locator(".worker")).to_have_count(0)
        await page.get_by_role("button", name="Enter the key").click()
        await sign_in(page, OPERATOR)
        await expect(page.locator(".worker")).to_have_count(2)
        await expect(page.locator("#account")).to_have_text("alice, operator")
        cookies = await page.context.cookies()
        assert {each["name"] for each in cookies} == {"disagg-session", "disagg-operator"}
        assert all(each["httpOnly"] and each["sameSite"] == "Strict" for each in cookies)
        assert not [url for url in urls if ALICE in url or OPERATOR in url]
        assert await page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        await page.locator("#account").click()
        await page.get_by_role("button", name="Sign out").click()
        await expect(page.locator("#account")).to_have_text("Sign in")
        assert await page.context.cookies() == []
