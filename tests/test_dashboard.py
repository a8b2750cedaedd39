"""The dashboard and the alert rules ask only for what a server that served exports."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client import Metric

from tests.test_local import LONG, body, cluster
from tests.test_metrics import metrics_of
from tests.tiny_model import write_tiny_model

MONITORING = Path(__file__).parent.parent / "deploy" / "monitoring"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with cluster(write_tiny_model(tmp_path / "tiny")) as (_, client):
        await client.post("/v1/chat/completions", json=body(LONG, 4))
        yield client


def queries() -> Iterator[str]:
    dashboard = json.loads((MONITORING / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["query"] for each in dashboard["templating"]["list"])
    rules: dict[str, Any] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())
    for group in rules["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


async def test_every_query_asks_for_what_is_there(client: httpx.AsyncClient) -> None:
    shown = await metrics_of(client)
    series = {
        family.name + suffix: family
        for family in shown.values()
        for suffix in SUFFIXES.get(family.type, ())
    }
    num_names = 0
    for query in queries():
        assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
        names = re.findall(r"\bdisagg_\w+", query)
        num_names += len(names)
        for name in names:
            assert name in series, f"nobody exports {name}: {query}"
        labels = {label for family in map(series.get, names) for label in _labels(family)}
        if labels:  # else nothing of it has happened yet
            assert _asked_labels(query) <= labels, f"{_asked_labels(query) - labels} in {query}"
    assert num_names > 30
    for name in ("disagg_request_refused", "disagg_request_moves"):
        assert shown[name].samples and not sum(each.value for each in shown[name].samples)


def test_rules_can_be_read_by_whoever_is_woken() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert re.fullmatch(r"Disagg[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    panels = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels]
    assert len(set(places)) == len(panels) == len({panel["id"] for panel in panels})
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


def _labels(family: Metric | None) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} if family else set()


def _asked_labels(query: str) -> set[str]:
    """In matchers, and in what is grouped by."""
    found = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        found.update(label.strip() for label in group.split(",") if label.strip())
    return found
