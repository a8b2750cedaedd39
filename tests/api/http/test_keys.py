"""Keys of the configuration and of a file that changes while it is used."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.api.http.keys import LOOK_S, KeyCheck
from disagg.config import HttpConfig
from disagg.errors import StartupError, Unauthorized
from tests.api.apps import http_client, make_app
from tests.waiting import Clock


def tenant_of(check: KeyCheck, key: str | None) -> str | None:
    """None: refused."""
    headers = {} if key is None else {b"authorization": b"Bearer " + key.encode()}
    request: Any = SimpleNamespace(headers=headers, tenant="nobody", is_own=False)
    try:
        check(request)
    except Unauthorized:
        return None
    return str(request.tenant)


def hashed(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def test_several_keys_of_a_tenant_and_hashes_of_keys() -> None:
    config = HttpConfig(api_key=hashed("house"), api_keys={"a": ("one", hashed("two")), "b": "b"})
    check = KeyCheck(config)
    asked = ["house", "one", "two", "b", hashed("two"), "", "two ", None]
    expected = ["", "a", "a", "b", None, None, None, None]
    assert [tenant_of(check, key) for key in asked] == expected


def test_without_keys_everybody_may_ask() -> None:
    assert tenant_of(KeyCheck(HttpConfig()), None) == "nobody"


def test_a_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text("# of today\n\ndefault:house\na:old\n")
    check = KeyCheck(HttpConfig(api_keys_file=str(file)), clock)
    assert [tenant_of(check, key) for key in ("house", "old", "new")] == ["", "a", None]

    replacement = tmp_path / "next"
    replacement.write_text(f"a:old\na:{hashed('new')}\n")
    replacement.rename(file)  # as Kubernetes does it
    assert tenant_of(check, "new") is None, "it looked at the file for each request"
    clock.now_s += LOOK_S + 0.1
    assert [tenant_of(check, key) for key in ("house", "old", "new")] == [None, "a", "a"]

    file.write_text("a line without a key\n")
    clock.now_s += LOOK_S + 0.1
    with caplog.at_level(logging.WARNING):
        assert tenant_of(check, "new") == "a", "a broken file locked everybody out"
    assert "Line 1" in caplog.text and "old" not in caplog.text
    file.unlink()
    clock.now_s += LOOK_S + 0.1
    assert tenant_of(check, "new") == "a" and tenant_of(check, None) is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no API key"),
        ("# nobody\n", "no API key"),
        ("a\n", "Line 1 of .* is not TENANT:KEY"),
        (":key\n", "Line 1 of .* is not TENANT:KEY"),
        ("a:\n", "key of 'a' must be"),
        ("a b:key\n", "cannot be the name of a tenant"),
        ("a:key\nb:key\n", "same API key"),
        (f"a:key\nb:{hashed('key')}\n", "same API key"),
    ],
)
def test_files_that_cannot_be(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(StartupError, match=reason):
        KeyCheck(HttpConfig(api_keys_file=str(file)))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be read"):
        KeyCheck(HttpConfig(api_keys_file=str(tmp_path / "none")))


@pytest.mark.parametrize("said", ["operators", hashed("operators")])
async def test_metrics_may_have_a_key_of_their_own(said: str) -> None:
    app = make_app(config=HttpConfig(api_key="house", metrics_key=said))
    async with http_client(app) as client:
        for key, status in (("operators", 200), ("house", 401), (said + "x", 401), (None, 401)):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            assert (await client.get("/metrics", headers=headers)).status_code == status
        assert (await client.get("/ready")).status_code == 200
        of_operators = {"authorization": "Bearer operators"}
        assert (await client.get("/v1/models", headers=of_operators)).status_code == 401


def test_a_key_of_metrics_that_cannot_be() -> None:
    with pytest.raises(StartupError, match="key of /metrics must be"):
        KeyCheck(HttpConfig(metrics_key="two words"))


@pytest.mark.parametrize(
    ("config", "allowed"),
    [
        (HttpConfig(), {"", "house", "alice", "metrics"}),
        (HttpConfig(api_key="house", api_keys={"a": "alice"}), {"house"}),
        (HttpConfig(api_keys={"a": "alice"}), set()),
        (HttpConfig(api_key="house", metrics_key="metrics"), {"metrics"}),
        (HttpConfig(metrics_key="metrics"), {"metrics"}),
    ],
)
async def test_the_fleet_is_shown_to_the_operator_only(
    config: HttpConfig, allowed: set[str]
) -> None:
    async with http_client(make_app(config=config)) as client:
        for key in ("", "house", "alice", "metrics"):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            reply = await client.get("/debug/fleet", headers=headers)
            assert reply.status_code == (200 if key in allowed else 401), key
