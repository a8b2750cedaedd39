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

from deploy.monitoring import make_dashboard
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


def panels() -> list[dict[str, Any]]:
    found = json.loads((MONITORING / "grafana-dashboard.json").read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def rules(name: str) -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((MONITORING / f"{name}.yaml").read_text())["groups"]
    return list(group["rules"])


def queries() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["expr"] for each in (*rules("alerts"), *rules("vllm-names")))


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
        names = re.findall(r"\bdisagg_(?!pool_)\w+", query)  # those of pools are Ray's
        num_names += len(names)
        for name in names:
            assert name in series, f"nobody exports {name}: {query}"
        labels = {label for family in map(series.get, names) for label in _labels(family)}
        if labels:  # else nothing of it has happened yet
            labels |= {"job"}  # of Prometheus
            assert _asked_labels(query) <= labels, f"{_asked_labels(query) - labels} in {query}"
    assert num_names > 30
    for name in ("disagg_request_refused", "disagg_request_moves"):
        assert shown[name].samples and not sum(each.value for each in shown[name].samples)


def test_rules_can_be_read_by_whoever_is_woken() -> None:
    for rule in rules("alerts"):
        assert re.fullmatch(r"Disagg[A-Z]\w+", rule["alert"])
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["runbook"] == f"docs/monitoring.md#{rule['alert'].lower()}"


def test_the_dashboard_is_made_from_its_table() -> None:
    made = make_dashboard.dashboard()
    assert make_dashboard.DASHBOARD.read_text() == made, "run deploy/monitoring/make_dashboard.py"


def test_panels_do_not_overlap_and_have_a_unit() -> None:
    found = panels()
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found]
    assert len(set(places)) == len(found) == len({panel["id"] for panel in found})
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in found)


def test_what_the_compose_file_mounts_is_there() -> None:
    services = yaml.safe_load((MONITORING / "compose.yaml").read_text())["services"]
    mounts = [each for service in services.values() for each in service.get("volumes", ())]
    files = [each.split(":")[0] for each in mounts if each.startswith(".")]
    assert len(files) == 6
    assert not [file for file in files if not (MONITORING / file).exists()]


def _labels(family: Metric | None) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} if family else set()


def _asked_labels(query: str) -> set[str]:
    """In matchers, and in what is grouped by."""
    found = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)\s*\"", query))
    for group in re.findall(r"\bby \(([^)]*)\)", query):
        found.update(label.strip() for label in group.split(",") if label.strip())
    return found
