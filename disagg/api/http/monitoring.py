"""What people and Prometheus watch: `/metrics`, `/debug/fleet` and `/debug/requests/{id}`.

Each ingress knows its own part. The one that is asked asks the others for theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

from disagg.api.apis import HttpRoute, Method
from disagg.api.http.metrics import (
    CONTENT_TYPE,
    OPEN_METRICS,
    OPEN_METRICS_CONTENT_TYPE,
    ApiMetrics,
    join_expositions,
)
from disagg.api.http.reply import Reply
from disagg.api.http.request import HttpRequest
from disagg.api.refusals import UnknownUrl

AskOthers: TypeAlias = Callable[..., Awaitable[list[Any]]]


async def ask_nobody(method: str, *args: Any) -> list[Any]:
    """The only ingress has no others."""
    return []


class Monitoring:
    """Answers for the three paths, and for what another ingress asks to answer them.

    Args:
        metrics: the metrics that `/metrics` shows.
        explain: request id and tenant -> JSON about its routing; None if it is not known here.
        show_fleet: Unix time or None -> JSON about all workers, for `/debug/fleet?since=...`.
        add_fleets: makes one of the JSON of several ingresses.
        refresh: updates gauges before `/metrics` shows them.
        beside: returns metrics of another process for `/metrics`; called in a thread.
        ask_others: calls a method of this class in all other ingresses, and returns what those
            return that are there.
    """

    def __init__(
        self,
        metrics: ApiMetrics,
        *,
        explain: Callable[[str, str], bytes | None] = lambda request_id, tenant: None,
        show_fleet: Callable[[float | None], bytes] = lambda since_unix_s: b"{}",
        add_fleets: Callable[[Sequence[bytes]], bytes] = lambda shown: shown[0],
        refresh: Callable[[], None] = lambda: None,
        beside: Callable[[], bytes] = bytes,
        ask_others: AskOthers = ask_nobody,
    ) -> None:
        self._metrics = metrics
        self._explain = explain
        self._show_fleet = show_fleet
        self._add_fleets = add_fleets
        self._refresh = refresh
        self._beside = beside
        self._ask_others = ask_others
        self._asking: dict[bool, asyncio.Task[bytes]] = {}  # for all metrics, by format
        get: dict[Method, None] = {"GET": None}
        self.routes = [
            HttpRoute("/metrics", self.show_metrics, get, "everybody", False),
            HttpRoute("/debug/fleet", self.show_fleet, get, "operator", False),
            HttpRoute("/debug/requests/{id}", self.show_request, get, is_shown=False),
        ]

    async def show_metrics(self, request: HttpRequest) -> Reply:
        """Of all ingresses, or with `?ingress=own` of this one."""
        is_open = OPEN_METRICS in request.headers.get(b"accept", b"")
        if request.in_query("ingress") == "own":
            body = await self.own_metrics(is_open)
        else:
            asking = self._asking.get(is_open)
            if asking is None or asking.done():  # so that nobody makes it ask more often
                asking = self._asking[is_open] = asyncio.create_task(self._all_metrics(is_open))
            body = await asyncio.shield(asking)
        content_type = OPEN_METRICS_CONTENT_TYPE if is_open else CONTENT_TYPE
        return Reply(body, headers=[(b"content-type", content_type)])

    async def own_metrics(self, is_open: bool) -> bytes:
        """The metrics of this ingress, in OpenMetrics' format or in Prometheus's."""
        more = await asyncio.to_thread(self._beside)
        self._refresh()
        return self._metrics.expose_open(more) if is_open else self._metrics.expose() + more

    async def _all_metrics(self, is_open: bool) -> bytes:
        others = await self._ask_others("own_metrics", is_open)
        own = await self.own_metrics(is_open)
        return await asyncio.to_thread(join_expositions, [own, *others]) if others else own

    async def show_request(self, request: HttpRequest) -> Reply:
        """How a request of the caller was routed."""
        names = request.in_path, request.tenant
        found = await self.own_explanation(*names)
        if found is None:
            others = await self._ask_others("own_explanation", *names)
            found = next((each for each in others if each is not None), None)
        if found is None:
            raise UnknownUrl(
                "No ingress knows a routing decision for this request id: it is too old or not"
                " yours, or the ingress that served it is gone."
            )
        return Reply(found)

    async def own_explanation(self, request_id: str, tenant: str) -> bytes | None:
        """How this ingress routed a request of a tenant, as JSON; None if it does not know."""
        return self._explain(request_id, tenant)

    async def show_fleet(self, request: HttpRequest) -> Reply:
        """All workers, as all ingresses see them."""
        since_unix_s = request.seconds_in_query("since")
        others = await self._ask_others("own_fleet", since_unix_s)
        own = await self.own_fleet(since_unix_s)
        return Reply(await asyncio.to_thread(self._add_fleets, [own, *others]) if others else own)

    async def own_fleet(self, since_unix_s: float | None) -> bytes:
        """The fleet as this ingress sees it, as JSON."""
        return self._show_fleet(since_unix_s)
