"""Writes grafana-dashboard.json from the table in dashboard.yaml.

python deploy/monitoring/make_dashboard.py
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
DASHBOARD = HERE / "grafana-dashboard.json"
NUM_COLUMNS, WIDTH, HEIGHT = 3, 8, 7  # in the units of Grafana's grid, which is 24 wide
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> str:
    """The JSON, with a line for each panel."""
    rows = yaml.safe_load((HERE / "dashboard.yaml").read_text())
    head = {
        "title": "disagg",
        "uid": "disagg",
        "schemaVersion": 39,
        "tags": ["disagg", "llm"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [{"name": "datasource", "type": "datasource", "query": "prometheus"}, MODEL]
        },
    }
    panels = ",\n".join(map(json.dumps, _panels(rows)))
    return f'{json.dumps(head)[:-1]}, "panels": [\n{panels}\n]}}\n'


MODEL = {
    "name": "model",
    "type": "query",
    "datasource": SOURCE,
    "query": "label_values(disagg_workers, model_name)",
    "includeAll": True,
    "multi": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
    "refresh": 2,
}


def _panels(rows: dict[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    y, ids = 0, count(1)
    for title, panels in rows.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        yield {"id": next(ids), "type": "row", "title": title, "gridPos": place, "panels": []}
        for index, each in enumerate(panels):
            line, column = divmod(index, NUM_COLUMNS)
            place = {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": y + 1 + line * HEIGHT}
            yield {"id": next(ids), "gridPos": place, **_panel(**each)}
        y += 1 + -(-len(panels) // NUM_COLUMNS) * HEIGHT


def _panel(
    title: str, unit: str, queries: dict[str, str], description: str = "", stack: bool = False
) -> dict[str, Any]:
    custom = {"stacking": {"mode": "normal" if stack else "none"}, "fillOpacity": 10}
    return {
        "type": "timeseries",
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": {"unit": unit, "custom": custom}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": _expression(query), "legendFormat": legend}
            for index, (legend, query) in enumerate(queries.items())
        ],
    }


def _expression(query: str) -> str:
    return query.replace("$m", 'model_name=~"$model"').replace("[i]", "[$__rate_interval]")


if __name__ == "__main__":
    DASHBOARD.write_text(dashboard())
