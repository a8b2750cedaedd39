"""The SLOs of a single request, within the limits of its tenant.

A client sets them with the headers `x-slo-ttft-ms` and `x-slo-tpot-ms`, or with `slo_ttft_ms` and
`slo_tpot_ms` in the body, which take precedence. "none" marks batch work: the request has no such
SLO, and never goes before requests that have one. By default the SLOs of the model apply.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal, NamedTuple, TypeAlias

from msgspec import Meta

from disagg.api.refusals import invalid_value

NONE = "none"

Milliseconds: TypeAlias = Annotated[float, Meta(gt=0.0, le=1e9)] | Literal["none"]


class RequestSlo(NamedTuple):
    """TTFT and TPOT SLO in seconds. 0: not set by the request; inf: no SLO."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0

    @property
    def kind(self) -> str:
        """The label in metrics that says which SLO applies to the request."""
        if self == RequestSlo():
            return "model"
        return "none" if math.isinf(self.ttft_s) and math.isinf(self.tpot_s) else "request"


def in_headers(headers: Mapping[bytes, bytes]) -> RequestSlo:
    """The SLOs in the headers. Raises `InvalidRequest`."""
    ttft_s, tpot_s = (
        _of_text(name, headers.get(name.encode(), b"").decode("latin-1").strip())
        for name in ("x-slo-ttft-ms", "x-slo-tpot-ms")
    )
    return RequestSlo(ttft_s, tpot_s)


def in_body(ttft_ms: float | str | None, tpot_ms: float | str | None) -> RequestSlo:
    return RequestSlo(_seconds(ttft_ms), _seconds(tpot_ms))


def choose_slo(
    body: RequestSlo, headers: RequestSlo, least: RequestSlo, of_model: RequestSlo
) -> RequestSlo:
    """The SLOs that apply to a request.

    Args:
        least: the shortest SLOs that its tenant may set; 0 for those of the model.
        of_model: the SLOs of the model; 0 for none.

    Raises:
        InvalidRequest: the request sets a shorter SLO than it may.
    """
    agreed_s = []
    for name, body_s, header_s, tenant_s, model_s in zip(
        ("slo_ttft_ms", "slo_tpot_ms"), body, headers, least, of_model, strict=True
    ):
        slo_s, least_s = body_s or header_s, tenant_s or model_s
        if 0.0 < slo_s < least_s:
            raise invalid_value(
                name if body_s else f"x-{name.replace('_', '-')}",
                f"{1e3 * slo_s:g} ms is less than {1e3 * least_s:g} ms, the shortest SLO that"
                " your key allows for this model.",
            )
        agreed_s.append(slo_s)
    return RequestSlo(*agreed_s)


def _of_text(name: str, text: str) -> float:
    if not text:
        return 0.0
    if text == NONE:
        return math.inf
    try:
        seconds = float(text) / 1e3
        if not 0.0 < seconds <= 1e6:
            raise ValueError
    except ValueError:
        raise invalid_value(
            name, f'{text[:64]!r} is neither "{NONE}" nor a number of milliseconds greater than 0.'
        ) from None
    return seconds


def _seconds(milliseconds: float | str | None) -> float:
    if milliseconds is None:
        return 0.0
    return math.inf if isinstance(milliseconds, str) else milliseconds / 1e3
