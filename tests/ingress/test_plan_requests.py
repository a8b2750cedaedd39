"""Plans for the page are those of the planner, of models that it may name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from disagg.capacity.planner import Wishes, make_plan, report
from disagg.capacity.shapes import SHAPES
from disagg.capacity.workload import Workload
from disagg.config import ASSETS
from disagg.errors import InvalidRequest
from disagg.ingress.plan_requests import PlanRequests

PLANS = PlanRequests({"mine": str(ASSETS / "demo-small")})


def answer(**asked: Any) -> dict[str, Any]:
    decoded: dict[str, Any] = json.loads(PLANS.answer(json.dumps(asked).encode()))
    return decoded


def test_a_plan_is_the_planners() -> None:
    asked = {"model": "llama-3-70b", "requests_per_s": 100.0, "ttft": 2.0}
    plan = make_plan(
        SHAPES["llama-3-70b"], Workload(100.0, [(1024, 256)]), Wishes(ttft=2.0), with_fleet=True
    )
    said = answer(**asked)
    files = said.pop("files")
    assert said == json.loads(json.dumps(report(plan)))
    tier = yaml.safe_load(files["serve.yaml"])["applications"][0]["args"]["tiers"][0]
    sizes = [tier[role]["num_replicas"] for role in ("prefill", "decode")]
    assert sizes == [pool["num_workers"] for pool in said["apart"]["pools"]]
    assert "RayService" in files["rayservice.yaml"]


def test_a_model_may_be_its_configuration() -> None:
    text = (ASSETS / "demo-small" / "config.json").read_text()
    cpu = {"gpu": ["cpu"], "price": {"": 1.0}}
    described, named = answer(model="config.json", config=text, **cpu), answer(model="mine", **cpu)
    assert "name of the model" in described["files"] and "serve.yaml" in named["files"]
    own = ("model", "source", "files")
    for each in (described, named):
        assert all(each.pop(name) for name in own)
    assert described == named


def test_what_is_not_served_has_no_files() -> None:
    assert "NVFP4" in answer(model="qwen3-8b", weights="fp4", gpu=["b200"])["files"]


def test_a_served_model_is_planned_by_its_name() -> None:
    assert answer(model="mine", gpu=["cpu"], price={"": 1.0})["model"] == "mine"


def test_the_first_values_of_the_form_make_a_plan() -> None:
    said = json.loads(PLANS.choices())
    assert said["choices"]["model"][0] == "mine" and answer(**said["first"])["disaggregate"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"model": str(Path(__file__).parent)}, "is none of 'mine', 'llama-2-7b'"),
        ({"model": "Qwen/Qwen3-8B"}, "is none of"),
        ({"model": "config.json"}, "config.json cannot be read as JSON"),
        ({"model": "config.json", "config": "{}"}, "without architectures"),
        ({"model": "mine", "gpu": []}, "choose 1 to 4 kinds"),
        ({"model": "mine", "kv": "int3"}, "'int3' is none of 'bf16'"),
        ({"model": "mine", "ttft": "soon"}, "Expected `float`"),
        ({"model": "mine", "speed": 1}, "unknown field `speed`"),
        ({"model": "mine", "requests_per_s": 0}, "The load must be > 0"),
        ({"model": "mine", "input_tokens": 0}, "at least 1 token"),
        ({"model": "llama-3-70b", "ttft": 0.001}, "cannot be met"),
        ({"model": "deepseek-r1"}, "has room for|have room for"),
        ({"model": "mine", "gpu": ["l4"]}, "No price is known for l4"),
    ],
)
def test_bad_wishes_are_refused_in_a_sentence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        answer(**asked)
