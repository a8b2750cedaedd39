"""Ingresses and workers agree on the adapters that are served, whoever changes them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.adapters import AdapterBoard, AdapterReport
from disagg.config import EngineConfig, ServeConfig, TierConfig
from disagg.errors import RequestError, StartupError
from disagg.ingress.adapters import ServedAdapters
from disagg.ingress.core import served_models
from disagg.messages import AdapterNews
from disagg.worker.check import check_tier
from tests.router.fakes import make_record, make_status
from tests.tiny_model import write_tiny_adapter, write_tiny_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    write_tiny_model(place / "tiny")
    for seed, name in enumerate(("red", "green")):
        write_tiny_adapter(place / name, place / "merged", place / "tiny", seed=seed)
    return place


def config_of(place: Path, **modules: str) -> ServeConfig:
    engine = EngineConfig(device="cpu", dtype="float32", enable_lora=True)
    tier = TierConfig(model=str(place / "tiny"), engine=engine, lora_modules=modules)
    return ServeConfig(tiers=(tier,), cluster_key="key")


class FakeFleet:
    """Ingresses, and workers that tell each of them what they know."""

    def __init__(self, config: ServeConfig, num_ingresses: int) -> None:
        self.times: Iterator[float] = iter(range(1, 100))
        self.boards: dict[str, AdapterBoard] = {}
        self.ingresses = [
            ServedAdapters(config, served_models(config), self.send, lambda: next(self.times))
            for _ in range(num_ingresses)
        ]

    def add(self, worker_id: str) -> None:
        self.boards[worker_id] = AdapterBoard()
        self.report(worker_id)

    def send(self, worker_id: str, news: AdapterNews) -> None:
        if self.boards[worker_id].merge(news.entries):
            asyncio.get_running_loop().call_soon(self.report, worker_id)

    def report(self, worker_id: str) -> None:
        status = make_status(adapters=AdapterReport(self.boards[worker_id].entries))
        for ingress in self.ingresses:
            ingress.heard(make_record(worker_id, model="tiny"), status)

    def names(self) -> list[list[str]]:
        return [sorted(model.name for model in ingress.all()) for ingress in self.ingresses]


async def test_all_ingresses_and_workers_learn_of_a_change(place: Path) -> None:
    fleet = FakeFleet(config_of(place, red=str(place / "red")), 2)
    one, other = fleet.ingresses
    fleet.add("d0")
    await one.load("mine", str(place / "green"), None, in_place=False)
    assert fleet.names() == [["mine", "red"]] * 2
    found = other.find("mine")
    assert found is not None and found.worker_model == "tiny"
    fleet.add("d1")  # which learns of it from whoever hears of the worker first
    await asyncio.sleep(0)
    assert len(fleet.boards["d1"].served()) == 2
    await other.unload("red")  # though the configuration has it
    assert fleet.names() == [["mine"]] * 2
    late = ServedAdapters(
        config_of(place, red=str(place / "red")), served_models(config_of(place)), fleet.send, float
    )
    fleet.ingresses.append(late)
    fleet.report("d0")
    assert fleet.names() == [["mine"]] * 3


async def test_other_weights_need_to_be_asked_for(place: Path) -> None:
    fleet = FakeFleet(config_of(place), 1)
    (ingress,) = fleet.ingresses
    await ingress.load("mine", str(place / "green"), None, in_place=False)
    await ingress.load("mine", str(place / "green"), "tiny", in_place=False)  # is the same
    with pytest.raises(RequestError, match="load_inplace"):
        await ingress.load("mine", str(place / "red"), None, in_place=False)
    before = ingress.find("mine")
    await ingress.load("mine", str(place / "red"), None, in_place=True)
    after = ingress.find("mine")
    assert before is not None and after is not None and before.adapter != after.adapter


@pytest.mark.parametrize(
    ("name", "path", "model", "message"),
    [
        ("tiny", "red", None, "is a served model"),
        ("mine", "tiny", None, "is no LoRA adapter"),
        ("mine", "red", "other", "No model 'other' takes LoRA adapters; these do: tiny"),
    ],
)
async def test_what_cannot_be_loaded_is_refused_in_words(
    place: Path, name: str, path: str, model: str | None, message: str
) -> None:
    (ingress,) = FakeFleet(config_of(place), 1).ingresses
    with pytest.raises(RequestError, match=message):
        await ingress.load(name, str(place / path), model, in_place=False)
    with pytest.raises(RequestError, match="There is no LoRA adapter 'nobody'"):
        await ingress.unload("nobody")


def test_adapters_of_the_configuration_are_checked_before_anything_starts(place: Path) -> None:
    (tier,) = config_of(place, mine=str(place / "tiny")).tiers
    with pytest.raises(
        StartupError, match=r"The LoRA adapter 'mine' cannot be served: .* is no LoRA"
    ):
        check_tier(tier)
