"""The HTTP API as a plain ASGI application: URLs, keys, limits, streams, disconnects.

Routes by `scope["path"]` only (never by a URL rebuilt from `Host`), requires a key on every path
that is not listed as open, and turns every error into a reply in one place. Runs under uvicorn and
inside Ray Serve. `service` interprets the requests.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import aclosing
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple, TypeAlias

import msgspec
from starlette.middleware.cors import CORSMiddleware

from disagg import logs, telemetry
from disagg.api import apis
from disagg.api.anthropic import CountTokensRequest
from disagg.api.apis import BY_PATH, Api, HttpRoute, Method, Who
from disagg.api.http.batches import BatchApi, no_files
from disagg.api.http.keys import KeyCheck
from disagg.api.http.metrics import CUT_BY_DRAIN, ApiMetrics, RequestTimer
from disagg.api.http.monitoring import Monitoring
from disagg.api.http.page import Planner, WebUi, wants_html
from disagg.api.http.quota import Quota
from disagg.api.http.reply import (
    Receive,
    Reply,
    Send,
    Stream,
    Writer,
    answer_lifespan,
    stream_events,
    watch,
)
from disagg.api.http.request import Bodies, HttpRequest
from disagg.api.http.request_spans import shown_tenant
from disagg.api.json_body import off_loop
from disagg.api.openai import answers, fields
from disagg.api.openai.fields import LoadAdapterRequest, UnloadAdapterRequest
from disagg.api.refusals import MethodNotAllowed, UnknownUrl, as_disagg_error
from disagg.api.request_spec import in_headers
from disagg.api.running_job import RunningJob
from disagg.api.service import Caller, Service
from disagg.config import HttpConfig
from disagg.errors import Overloaded, Unavailable

Scope: TypeAlias = MutableMapping[str, Any]
AsgiApp: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

PATHS = b"""This is disagg, a server of language models.

/ui            a page for people: chat, the fleet, the planner
/v1            the API of OpenAI and Anthropic, such as /v1/chat/completions and /v1/models
/openapi.json  all its requests
/ready         whether it can serve now
/metrics       Prometheus metrics
"""

PLAIN_TEXT = (b"content-type", b"text/plain; charset=utf-8")

_GET: dict[Method, None] = {"GET": None}
SCORE_NBYTES = 32  # size of a log-probability and its token in JSON
CUT_TIMEOUT_S = 1.0  # time to write the error to clients that may read slowly
END_WAIT_S = 30.0  # from the end of a drain to the end of the process; Serve needs a few seconds

logger = logging.getLogger("disagg.api")

_CUT = Unavailable("The server stopped before this answer was complete; try again.")


class Readiness(msgspec.Struct, frozen=True):
    """Whether requests can be served now. `pools` has the number of workers, for people."""

    ready: bool
    reason: str = ""
    pools: dict[str, dict[str, int]] = {}
    ingress: str = ""  # id of the ingress that answers


class Drained(NamedTuple):
    """What became of the requests that were running when the server was told to stop."""

    num_ended: int  # completed
    num_cut: int  # ended with an error because the drain time was over


class HttpApp:
    """The ASGI application.

    Args:
        readiness: called by `/ready` and `/health`; must be cheap.
        metrics: count the requests.
        monitoring: answers for what operators watch.
        new_id: returns random text for ids that clients do not choose.
        quota: limits of tenants.
        secret: makes sessions of the page that other ingresses accept which have the same one.
        planner: plans what the page asks for.
        names_replies: whether to send `x-request-id`; False if the host of the app sends it.
        batches: answers for files and batches; None: there are none.
    """

    def __init__(
        self,
        service: Service,
        config: HttpConfig,
        *,
        readiness: Callable[[], Readiness],
        metrics: ApiMetrics,
        monitoring: Monitoring,
        quota: Quota,
        new_id: Callable[[], str] = lambda: secrets.token_hex(16),
        secret: bytes | None = None,
        planner: Planner | None = None,
        names_replies: bool = True,
        batches: BatchApi | None = None,
    ) -> None:
        self._service = service
        self._config = config
        self._readiness = readiness
        self._metrics = metrics
        self._new_id = new_id
        self._names_replies = names_replies
        self._key_check = KeyCheck(config, secret=secret)
        self._quota = quota
        self._running: set[asyncio.Task[None]] = set()  # requests, except those of open paths
        self._stopping: object | None = None  # the drain that runs or is over, of several the last
        self._is_cutting = False
        self._bodies = Bodies(config.max_requests_nbytes)
        metrics.of("requests_body_bytes").set_function(lambda: self._bodies.nbytes)
        metrics.of("num_requests_running").set_function(lambda: len(self._running))
        metrics.of("event_loop_tasks").set_function(lambda: len(asyncio.all_tasks()))
        routes = [*self._own_routes(), *(no_files() if batches is None else batches.routes)]
        routes += monitoring.routes
        if config.ui:
            page = WebUi(self._key_check, planner, self._read_json)
            routes += page.routes
        self.routes = {route.path: route for route in routes}
        self._openapi: bytes | None = None
        self._patterns = [
            (re.compile(re.sub(r"{\w+}", "(.+)", path)), route)
            for path, route in self.routes.items()
            if "{" in path
        ]
        self._handle: AsgiApp = self._handle_http
        if config.allowed_origins:
            self._handle = CORSMiddleware(
                self._handle_http,
                config.allowed_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=("*",),
            )

    def _own_routes(self) -> list[HttpRoute]:
        """The paths of requests to models, and of what a load balancer or a newcomer asks."""
        service = self._service
        version_body = b'{"version":"%b"}' % version("disagg").encode()

        def post(
            path: str,
            answer: Callable[[bytes], Awaitable[bytes | str]],
            body: type[msgspec.Struct],
            who: Who = "tenants",
        ) -> HttpRoute:
            return HttpRoute(path, partial(self._answer_at_once, answer), {"POST": body}, who)

        return [
            *(
                HttpRoute(path, partial(self._generate, api), {"POST": api.request})
                for path, api in BY_PATH.items()
            ),
            post("/v1/messages/count_tokens", service.count_tokens, CountTokensRequest),
            post("/v1/load_lora_adapter", service.load_adapter, LoadAdapterRequest, "operator"),
            post(
                "/v1/unload_lora_adapter", service.unload_adapter, UnloadAdapterRequest, "operator"
            ),
            post("/tokenize", service.tokenize, fields.TokenizeRequest),
            post("/detokenize", service.detokenize, fields.DetokenizeRequest),
            HttpRoute("/v1/models", self._models, _GET),
            HttpRoute("/v1/models/{name}", self._one_model, _GET),
            HttpRoute("/", self._show_paths, _GET, "everybody", False),
            HttpRoute("/openapi.json", self._show_openapi, _GET, is_shown=False),
            HttpRoute("/health", self._ready, _GET, "everybody"),
            HttpRoute("/ready", self._ready, _GET, "everybody"),
            HttpRoute("/ping", self._ready, _GET, "everybody", False),
            HttpRoute("/live", _always(Reply(b"{}")), _GET, "everybody"),
            HttpRoute("/version", _always(Reply(version_body)), _GET, "everybody"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1003})
        elif scope["type"] == "http":
            await self._handle(scope, receive, send)

    async def _handle_http(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, unless its client disconnects first."""
        request = HttpRequest(scope, receive, self._new_id, self._names_replies)
        request.route = self._find_route(request)
        if request.is_open:
            await self._serve(request, send)
            return
        request.open_span()
        logs.set_request(request.request_id, request.traceparent)
        status = None
        try:
            status = await self._serve(request, send)
        finally:
            request.spans.close(status)

    async def _serve(self, request: HttpRequest, send: Send) -> int:
        """Returns the status that was sent, or 499 if the client disconnected before."""
        writer = Writer(send, request.reply_headers, request.extensions)
        work = asyncio.create_task(self._answer(request, writer))
        if not request.is_open:
            self._running.add(work)
        gone = asyncio.create_task(watch(request, writer))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also if this task is cancelled: Ray Serve does so when a client disconnects
            if not work.done():
                self._metrics.of("request_disconnect").inc()
                request.spans.abandon()
            status = writer.status or 499
            self._metrics.of("http_requests", request.route.path or "other", str(status)).inc()
            for task in (work, gone):
                task.cancel()
            try:
                await asyncio.gather(work, gone, return_exceptions=True)
            finally:  # also if this task is cancelled a second time
                self._running.discard(work)
                self._bodies.give_back(request.num_body_bytes)
                self._quota.end(request)
        return status

    async def _answer(self, request: HttpRequest, writer: Writer) -> None:
        try:
            answer = await self._dispatch(request)
            if isinstance(answer, Reply):
                await writer.reply(answer)
            else:
                await writer.stream(answer)
        except asyncio.CancelledError:
            if not self._is_cutting:
                raise
            request.spans.fail(_CUT)
            await writer.fail(_CUT, request.path, close=True)
        except Exception as problem:
            # A method, because a local variable here would be in a cycle with its traceback, which
            # has the request's body.
            await self._fail(problem, request, writer)

    async def _fail(self, problem: Exception, request: HttpRequest, writer: Writer) -> None:
        """The one place where errors become replies."""
        error = as_disagg_error(problem, request.request_id)
        if error is not problem:
            logger.exception("request %s failed", request.request_id)
        request.spans.fail(error)
        if isinstance(error, Overloaded):
            tenant = self._quota.tenant_class(request.tenant)
            self._metrics.of("request_refused", request.route.path, error.reason, tenant).inc()
            self._quota.say(request)
        await writer.fail(error, request.path, close=not request.body_is_read)

    async def _dispatch(self, request: HttpRequest) -> Reply | Stream:
        route = request.route
        request.check_head()
        if route.path == "/metrics":
            self._key_check.of_metrics(request)
        elif route.who == "operator":
            self._key_check.of_operator(request)
        elif route.who == "tenants":
            if not request.is_own:
                self._key_check(request)
            if self._stopping is not None:
                raise Unavailable("This server is stopping and takes no new requests; try again.")
        if ("GET" if request.method == "HEAD" else request.method) not in route.methods:
            if route is _NOWHERE:
                raise UnknownUrl(f"There is no endpoint {request.path[:128]!r}.")
            methods = ", ".join(route.methods)
            raise MethodNotAllowed(
                f"{request.path} supports {methods}, not {request.method[:16]}.", allowed=methods
            )
        if request.method == "POST" and len(self._running) > self._config.max_num_requests:
            raise Overloaded(
                f"This ingress already serves {self._config.max_num_requests} requests, its limit"
                " (http.max_num_requests)."
            )
        if request.method == "POST" and not request.is_open:  # that are of nobody's quota
            self._quota.begin(request)
        answer: Reply | Stream = await route.endpoint(request)
        return answer

    def _find_route(self, request: HttpRequest) -> HttpRoute:
        route = self.routes.get(request.path)
        if route is not None and "{" not in route.path:
            return route
        for pattern, route in self._patterns:
            if match := pattern.fullmatch(request.path):
                request.in_path = match[1]
                return route
        return _NOWHERE

    # Completions

    async def _generate(self, api: Api, request: HttpRequest) -> Reply | Stream:
        arrived_s = self._metrics.clock()
        body = await self._read_json(request)
        read_s = self._metrics.clock()
        caller = Caller(
            api.id_prefix + request.own_id,
            request.tenant,
            waited_s=read_s - arrived_s,
            min_priority=self._quota.min_priority(request.tenant),
            slo=in_headers(request.headers),
            least_slo=self._quota.least_slo(request.tenant),
            timeout_s=request.timeout_s,
        )
        tenant = shown_tenant(request.tenant, self._quota.tenant_class)
        begin = partial(request.spans.begin, api.operation, caller.request_id, tenant)
        run = await self._service.prepare(api, body, caller, begin)
        request.take(self._bodies, sum(map(len, run.requests[0].images)))
        request.spans.follow(run)
        model, metrics = run.model.worker_model, self._metrics
        metrics.observe_stage(model, "receive", read_s - arrived_s)
        metrics.observe_stage(model, "tokenize", metrics.clock() - read_s)
        self._quota.take_prompt(request, run)
        of_tenant = self._quota.tenant_class(request.tenant)
        timer = RequestTimer(metrics, run, arrived_s, api.operation, request.spans, of_tenant)
        is_stream = run.spec.stream
        if not is_stream or telemetry.captures_content():
            run.keep()
        if is_stream:
            assert api.frames is not None, "only an API with streams has such requests"
            frames = api.frames(run)
            events = partial(stream_events, run, frames, timer, partial(_say_why, run, request))
            return Stream(events, frames.error)
        run.write_now = timer.observe_piece  # nobody needs to wake for a token
        async with aclosing(run.batches()) as batches:
            with timer:  # if one choice fails, the whole request fails
                async for batch in batches:
                    timer.observe(batch)
        run.write_now = None  # breaks the reference cycle of timer and run
        _say_why(run, request)
        nbytes = SCORE_NBYTES * run.num_prompt_numbers
        return Reply(await off_loop(nbytes, lambda: api.body(run)))

    # Stopping

    async def drain(self, timeout_s: float) -> Drained:
        """Refuse new requests, and wait for running ones.

        Requests that still run after `timeout_s` end with an error, as a reply or as the last
        event of a stream. `serve_again` ends the drain. Whoever calls this is to end the process
        next: if that does not happen, because the caller was killed, requests are accepted again.
        """
        self._stopping = stopping = object()
        running = {work for work in self._running if not work.done()}
        if running and timeout_s > 0:
            await asyncio.wait(running, timeout=timeout_s)
        cut = {work for work in running if not work.done()}
        if self._stopping is not stopping:  # it serves again, or another drain goes on
            return Drained(len(running) - len(cut), 0)
        self._is_cutting = True
        for work in cut:
            work.cancel(CUT_BY_DRAIN)
        if cut:
            await asyncio.wait(cut, timeout=CUT_TIMEOUT_S)
        asyncio.get_running_loop().call_later(END_WAIT_S, self._was_not_ended, stopping)
        return Drained(len(running) - len(cut), len(cut))

    def serve_again(self) -> None:
        """Accept requests again after a drain, or while one waits."""
        self._stopping = None
        self._is_cutting = False

    def _was_not_ended(self, stopping: object) -> None:
        if self._stopping is stopping:  # a later drain has its own time
            self.serve_again()

    # Other endpoints

    async def _models(self, request: HttpRequest) -> Reply:
        models = [answers.model_object(each) for each in self._service.all_models()]
        return Reply(msgspec.json.encode({"object": "list", "data": models}))

    async def _one_model(self, request: HttpRequest) -> Reply:
        model = self._service.model(request.in_path)
        return Reply(msgspec.json.encode(answers.model_object(model)))

    async def _answer_at_once(
        self, answer: Callable[[bytes], Awaitable[bytes | str]], request: HttpRequest
    ) -> Reply:
        said = await answer(await self._read_json(request))
        return Reply(said) if isinstance(said, bytes) else Reply(said.encode(), 200, [PLAIN_TEXT])

    async def _show_paths(self, request: HttpRequest) -> Reply:
        if self._config.ui and wants_html(request):
            return Reply(b"", 307, [(b"location", b"ui/"), (b"vary", b"accept")])
        return Reply(PATHS, headers=[PLAIN_TEXT])

    async def _show_openapi(self, request: HttpRequest) -> Reply:
        if self._openapi is None:
            self._openapi = await asyncio.to_thread(apis.openapi, self.routes.values())
        return Reply(self._openapi)

    async def _ready(self, request: HttpRequest) -> Reply:
        state = self._readiness()
        if self._stopping is not None:
            state = msgspec.structs.replace(state, ready=False, reason="the server is stopping")
        return Reply(msgspec.json.encode(state), 200 if state.ready else 503)

    async def _read_json(self, request: HttpRequest) -> bytes:
        request.check_json()
        return await request.read_body(
            self._config.max_body_nbytes, self._bodies, self._config.default_timeout_s
        )


def _always(reply: Reply) -> Callable[[HttpRequest], Awaitable[Reply]]:
    async def answer(request: HttpRequest) -> Reply:
        return reply

    return answer


_NOWHERE = HttpRoute("", _always(Reply(b"")), {})  # where a path leads that is none of ours


def _say_why(run: RunningJob, request: HttpRequest) -> None:
    """Add a header with the decisions of the cascade so far, or that a deferral rule decides."""
    reasons = dict.fromkeys(each.in_words() for each in run.decisions if each is not None)
    if run.model.deferral:
        reasons[run.model.deferral] = None
    if reasons:
        text = "; ".join(reasons).encode("ascii", "replace")
        request.reply_headers.append((b"x-disagg-cascade", text))
