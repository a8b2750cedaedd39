"""Settings that contradict themselves are refused in words, before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from disagg.config_checks import check_secrets, parse_config
from disagg.errors import StartupError


@pytest.mark.parametrize("fields", [{}, {"cluster_key": ""}])
def test_an_empty_cluster_key(fields: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="set cluster_key") as refused:
        parse_config({"tiers": [{"model": "demo-small"}], **fields})
    assert refused.value.param == "cluster_key"


@pytest.mark.parametrize(
    ("fields", "supported"),
    [
        ({"transport": "tcp"}, "local, nixl"),
        ({"tiers": [{"model": "a", "engine": {"device": "tpu"}}]}, "auto, cpu, cuda"),
        ({"tiers": [{"model": "a", "engine": {"kv_cache_dtype": "e5m2"}}]}, ".* fp8, int4, int8"),
        (
            {"tiers": [{"model": "a", "engine": {"speculative_config": {"method": "x"}}}]},
            "draft_model, eagle3, early_exit, medusa, mtp, ngram",
        ),
    ],
)
def test_what_is_not_supported_is_refused_with_what_is(
    fields: dict[str, Any], supported: str
) -> None:
    with pytest.raises(StartupError, match=rf"Supported: {supported}\.$"):
        parse_config({"tiers": [{"model": "a"}], "cluster_key": "key", **fields})


PAIR = [{"model": "demo-small"}, {"model": "demo-large"}]
DEFERRING = {"model": "demo-small", "deferral": 0.3}


@pytest.mark.parametrize(
    ("tiers", "cascade", "reason"),
    [
        (PAIR[:1], {}, "at least two models"),
        ([*PAIR, {"model": "x"}], {"thresholds": [-1]}, "need 2 thresholds, .* 1 are given"),
        (PAIR, {"thresholds": []}, "2 models need 1 thresholds"),
        ([PAIR[0], {"model": "x", "served_model_name": "auto"}], {}, "may be named 'auto'"),
        (PAIR, {"signal": "entropy"}, "Invalid enum value 'entropy'"),
        (PAIR, {"num_judged_tokens": 0}, "num_judged_tokens"),
        (PAIR, {"treshold": 1}, "unknown field `treshold`"),
        (PAIR, {"leads": [1, 2]}, "2 models need 1 leads, .* or none; 2 are given"),
        (PAIR, {"leads": [-1]}, "leads"),
        (PAIR, {"prompt_judges": [{"bias": 0}] * 2}, "need 1 prompt_judges, .* 2 are given"),
        (PAIR, {"prompt_judges": [{"weights": []}]}, "missing required field `bias`"),
        ([PAIR[0], {**PAIR[1], "engine": {"speculative_config": DEFERRING}}], {}, "own answers"),
    ],
)
def test_a_cascade_that_cannot_be(
    tiers: list[dict[str, Any]], cascade: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        parse_config({"tiers": tiers, "cluster_key": "key", "cascade": cascade})


def test_a_cascade_is_off_unless_asked_for() -> None:
    assert parse_config({"tiers": PAIR, "cluster_key": "key"}).cascade is None
    one = {"tiers": [{"model": "x", "served_model_name": "auto"}], "cluster_key": "key"}
    assert parse_config(one).tiers[0].name == "auto"


KEYS = {"alice": "secret-1", "bob": "secret-2"}


def with_tenants(http: dict[str, Any], tenants: dict[str, Any]) -> dict[str, Any]:
    return {"tiers": PAIR, "cluster_key": "key", "http": http, "tenants": tenants}


@pytest.mark.parametrize(
    ("http", "tenants", "reason"),
    [
        ({"api_keys": {"a b": "k"}}, {}, "'a b' cannot be the name of a tenant"),
        ({"api_keys": {"default": "k"}}, {}, "'default' cannot be"),
        ({"api_keys": {"a": ""}}, {}, "key of 'a' must be"),
        ({"api_keys": {"a": "two words"}}, {}, "key of 'a' must be"),
        ({"api_keys": {"a": "k\xe9y"}}, {}, "key of 'a' must be"),
        ({"api_keys": {"a": "k", "b": "k"}}, {}, "same API key"),
        ({"api_keys": {"a": ["k", ""]}}, {}, "key of 'a' must be"),
        ({"api_keys": {"": "k"}}, {}, "cannot be the name of a tenant"),
        ({"api_key": ""}, {}, "key of 'default' must be"),
        ({"api_keys": KEYS, "api_key": "secret-1"}, {}, "same API key"),
        ({"api_keys": KEYS}, {"carol": {}}, "a tenant 'carol', and no key"),
        ({"api_keys": KEYS}, {"bob": {"weight": 0}}, "weight"),
        ({"api_keys": KEYS}, {"bob": {"tokens_per_minute": 0}}, "tokens_per_minute"),
        ({"api_keys": KEYS}, {"bob": {"min_priority": -1001}}, "min_priority"),
        ({"api_keys": KEYS}, {"bob": {"wait": 1}}, "unknown field `wait`"),
    ],
)
def test_tenants_that_cannot_be(http: dict[str, Any], tenants: dict[str, Any], reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        parse_config(with_tenants(http, tenants))


SECRET = "0123456789abcdef"


@pytest.mark.parametrize(
    ("fields", "host", "reason"),
    [
        ({"cluster_key": "x"}, None, "has fewer than 16 characters and can be guessed"),
        ({"cluster_key": " " * 15}, None, "has fewer than 16 characters"),
        ({"cluster_key": "change-me-at-the-first-start"}, None, "cluster_key is still the one"),
        ({"http": {"api_key": "change-me"}}, None, "api_key is still the one"),
        ({"http": {"api_keys": {"a": "change-me-1"}}}, None, "api_keys is still the one"),
        ({}, "0.0.0.0", "Any client that reaches 0.0.0.0"),
        ({}, "::", "Any client that reaches ::"),
        ({}, "10.0.0.7", "Any client that reaches 10.0.0.7"),
        ({}, "gpu-7.example.org", "Any client that reaches gpu-7"),
        ({"http": {"api_key": "k" * 15}}, "::", "key of 'default' has fewer than 16 characters"),
        ({"http": {"api_keys": {"a": [SECRET, "k"]}}}, "10.0.0.7", "clients that reach 10.0.0.7"),
    ],
)
def test_secrets_that_are_none(fields: dict[str, Any], host: str | None, reason: str) -> None:
    raw = {"tiers": PAIR, "cluster_key": SECRET, **fields}
    with pytest.raises(StartupError, match=reason):
        check_secrets(parse_config(raw), host)
    check_secrets(parse_config({**raw, "insecure": True}), host)


def test_secrets_that_are_some() -> None:
    config = parse_config({"tiers": PAIR, "cluster_key": SECRET})
    for host in (None, "127.0.0.1", "127.0.0.2", "::1", "localhost"):
        check_secrets(config, host)
    hashed = f"sha256:{64 * '0'}"
    for http in ({"api_key": SECRET}, {"api_keys": {"a": SECRET}}, {"api_key": hashed}):
        check_secrets(parse_config({"tiers": PAIR, "cluster_key": SECRET, "http": http}), "::")
    short = parse_config({"tiers": PAIR, "cluster_key": SECRET, "http": {"api_key": "k"}})
    for host in (None, "127.0.0.1", "::1"):
        check_secrets(short, host)


def test_keys_of_a_file_that_can_be_guessed(tmp_path: Path) -> None:
    http = {"api_keys_file": str(tmp_path / "keys")}
    config = parse_config({"tiers": PAIR, "cluster_key": SECRET, "http": http})
    (tmp_path / "keys").write_text(f"alice:{SECRET}\nbob:short\n")
    with pytest.raises(StartupError, match="key of 'bob' has fewer than 16 characters"):
        check_secrets(config, "0.0.0.0")
    check_secrets(config, "127.0.0.1")
    (tmp_path / "keys").write_text(f"alice:{SECRET}\n")
    check_secrets(config, "0.0.0.0")


def test_who_has_no_settings_has_those_of_the_default() -> None:
    settings = {"bob": {"weight": 3}, "default": {"weight": 0.5, "max_num_requests": 2}}
    config = parse_config(with_tenants({"api_keys": KEYS, "api_key": "house"}, settings))
    assert [config.tenant(name).weight for name in ("bob", "alice", "")] == [3.0, 0.5, 0.5]
    assert [config.tenant_class(name) for name in ("bob", "alice", "")] == [
        "bob",
        "default",
        "default",
    ]
    assert [config.tenant(name).is_limited for name in ("bob", "alice")] == [False, True]
    plain = parse_config(with_tenants({}, {}))
    assert not plain.tenant("").is_limited


@pytest.mark.parametrize(
    ("settings", "is_possible"),
    [
        ({}, False),
        ({"engine": {"tensor_parallel_size": 2}}, True),
        ({"decode": {"tensor_parallel_size": 4}}, True),
    ],
)
def test_whole_experts_need_a_pool_with_several_ranks(
    settings: dict[str, Any], is_possible: bool
) -> None:
    engine = {"enable_expert_parallel": True, **settings.get("engine", {})}
    raw = {"tiers": [{"model": "a", **settings, "engine": engine}], "cluster_key": "key"}
    if not is_possible:
        with pytest.raises(StartupError, match="its workers have one rank; set tensor_parallel"):
            parse_config(raw)
        return
    (tier,) = parse_config(raw).tiers
    for role in ("prefill", "decode"):
        engine_of_role = tier.for_role(role).engine
        has_ranks = engine_of_role.tensor_parallel_size > 1
        assert engine_of_role.enable_expert_parallel == has_ranks
        assert engine_of_role.share(0).has_whole_experts == has_ranks


def scaled(**limits: Any) -> dict[str, Any]:
    return {"num_replicas": 1, "autoscaling": {"max_replicas": 4, **limits}}


@pytest.mark.parametrize(
    ("tier", "others", "reason"),
    [
        ({"decode": scaled(min_replicas=2)}, {}, "begins with 1 decode workers.* 2 to 4"),
        ({"prefill": scaled(min_replicas=0)}, {}, "set engine.block_size"),
        ({"decode": {"autoscaling": {}}}, {}, "max_replicas"),
        ({"decode": scaled()}, {"max_num_workers": 1}, "at least 2 workers"),
    ],
)
def test_pools_that_cannot_follow_the_load(
    tier: dict[str, Any], others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(StartupError, match=reason):
        parse_config({"tiers": [{"model": "x", **tier}], "cluster_key": "key", **others})


def test_a_pool_may_be_empty_where_its_blocks_are_known() -> None:
    tier = {"model": "x", "engine": {"block_size": 16}, "decode": scaled(min_replicas=0)}
    pool = parse_config({"tiers": [tier], "cluster_key": "key"}).tiers[0].decode
    assert pool.autoscaling is not None and pool.autoscaling.min_replicas == 0
