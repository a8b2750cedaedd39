"""Plans for the page at `/ui`, which asks with a form: `disagg plan` without its play.

Models are those of the planner's table, those that are served, and a `config.json` in the request:
it names no file and no repository, so it makes this process read none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from disagg.api.refusals import invalid_value
from disagg.capacity.deployment import Written, check_servable, files_of
from disagg.capacity.efficiency import ENGINES
from disagg.capacity.gpus import CPU_CORE, GPUS, LINKS, PRICES_AS_OF, USD_PER_GPU_HOUR, link_of
from disagg.capacity.planner import Plan, Wishes, make_plan, report
from disagg.capacity.shapes import FORMATS, KV_BITS, SHAPES, ModelShape, read_shape, shape_of
from disagg.capacity.workload import Workload
from disagg.errors import DisaggError, InvalidRequest
from disagg.models.description import describe_model

CONFIG = "config.json"  # the model that a request describes itself
MAX_GPUS = 4  # kinds to choose from: time grows with the square


class PlanAsked(Wishes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /ui/plan`. `config`: of model `CONFIG`, the text of its config.json."""

    model: str
    config: str = ""
    requests_per_s: float = 1.0
    input_tokens: int = 1024
    output_tokens: int = 256


class PlanRequests:
    """
    Args:
        served: directories of the served models, by name.
    """

    def __init__(self, served: Mapping[str, str]) -> None:
        self._served = served
        self._choices: dict[str, tuple[str, ...]] = {
            "model": (*served, *SHAPES, CONFIG),
            "gpu": (*GPUS, CPU_CORE.name),
            "weights": tuple(FORMATS),
            "kv": tuple(KV_BITS),
            "engine": ("", *ENGINES),
            "link": tuple(LINKS),
        }

    def choices(self) -> bytes:
        """What the form may have, and its first values: the response of `GET /ui/plan`."""
        first = PlanAsked(model="llama-3-70b", requests_per_s=100.0)
        said = {
            "choices": self._choices,
            "first": first,
            "usd_per_gpu_hour": USD_PER_GPU_HOUR,
            "prices_as_of": PRICES_AS_OF,
        }
        return msgspec.json.encode(said)

    def answer(self, body: bytes) -> bytes:
        """The report of a plan, as `disagg plan --json` has it, and `files`: the text of those of
        `--write` by name, or one sentence why there are none. Raises `InvalidRequest`."""
        try:
            asked = msgspec.json.decode(body, type=PlanAsked)
        except msgspec.MsgspecError as error:
            raise invalid_value("plan", f"{error}.") from None
        for name, known in self._choices.items():
            said = getattr(asked, name)
            for each in said if isinstance(said, tuple) else (said,):
                if each not in known:
                    choose = ", ".join(map(repr, known))
                    raise invalid_value(name, f"{each[:64]!r} is none of {choose}.")
        if not 0 < len(asked.gpu) <= MAX_GPUS:
            raise invalid_value("gpu", f"choose 1 to {MAX_GPUS} kinds of GPUs.")
        try:
            return msgspec.json.encode(self._report(asked))
        except InvalidRequest:
            raise
        except DisaggError as error:
            raise InvalidRequest(error.message, code="invalid_value", param=error.param) from None

    def _report(self, asked: PlanAsked) -> dict[str, Any]:
        shape = self._shape(asked)
        load = Workload(asked.requests_per_s, [(asked.input_tokens, asked.output_tokens)])
        plan = make_plan(shape, load, asked, with_fleet=True)
        return {**report(plan), "files": self._files(plan, asked)}

    def _shape(self, asked: PlanAsked) -> ModelShape:
        if asked.model == CONFIG:
            return _shape_of_config(asked.config)
        shape = read_shape(self._served.get(asked.model, asked.model))
        return (
            dataclasses.replace(shape, name=asked.model) if asked.model in self._served else shape
        )

    def _files(self, plan: Plan, asked: PlanAsked) -> dict[str, str] | str:
        assert plan.advice is not None
        if asked.model == CONFIG:
            return "Files need the name of the model: use `disagg plan DIRECTORY --write`."
        written = Written(
            plan.advice.fleet,
            plan.load,
            asked.slo,
            link_of(asked.link),
            plan.shape.repository or asked.model,
            "the page at /ui",
        )
        try:
            check_servable(plan.shape, asked.weights, asked.kv)
            return files_of(written)
        except DisaggError as error:
            return error.message


def _shape_of_config(text: str) -> ModelShape:
    with TemporaryDirectory() as place:
        file = Path(place) / CONFIG
        file.write_text(text, encoding="utf-8")
        try:
            model = describe_model(place)
        except DisaggError as error:
            message = error.message.replace(f"{place}/", "")
            raise invalid_value("config", message) from None
        return dataclasses.replace(shape_of(model), name=CONFIG, source=CONFIG)
