"""Plans for the page at `/ui`, which asks with a form: `disagg plan` without its play and files.

Models are those of the planner's table and those that are served: a request names no file and no
repository, so it makes this process read none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.api.refusals import invalid_value
from disagg.capacity.efficiency import ENGINES
from disagg.capacity.gpus import CPU_CORE, GPUS, LINKS, PRICES_AS_OF, USD_PER_GPU_HOUR
from disagg.capacity.planner import Wishes, make_plan, report
from disagg.capacity.shapes import FORMATS, KV_BITS, SHAPES, read_shape
from disagg.capacity.workload import Workload
from disagg.errors import DisaggError, InvalidRequest

MAX_GPUS = 4  # kinds to choose from: time grows with the square


class PlanAsked(Wishes, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /ui/plan`."""

    model: str
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
            "model": (*served, *SHAPES),
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
        """The report of a plan, as `disagg plan --json` has it. Raises `InvalidRequest`."""
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
        shape = read_shape(self._served.get(asked.model, asked.model))
        if asked.model in self._served:
            shape = dataclasses.replace(shape, name=asked.model)
        load = Workload(asked.requests_per_s, [(asked.input_tokens, asked.output_tokens)])
        return report(make_plan(shape, load, asked, with_fleet=True))
