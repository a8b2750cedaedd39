"""The whole system as users start it: Ray, HAProxy, Redis, NIXL, HTTP.

Serve's own proxy takes HAProxy's place in `test_cascade.py`.

The prefill worker has two ranks; `test_parallel.py` has the decode worker with two. The death of
a worker, or of a rank, costs time and nothing else: the text is that of a single engine. In the end
all that could clean up is killed, and the next start does it.
"""

from __future__ import annotations

import itertools
import json
import re
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from disagg.host import free_port
from tests import plain_http
from tests.e2e.command import LEFT_TIMEOUT_S, Command, soon, until, with_stand_in
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import PROMPTS, assert_same_text, has_moved, streamed, streams_of
from tests.otlp_collector import OtlpCollector, ReceivedSpan

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

HTTP, ANSWER = "POST /v1/chat/completions", "chat tiny"
SPANS = {
    HTTP,
    ANSWER,
    "tokenize",
    "route",
    "prefill.queue",
    "prefill.compute",
    "kv.pull",
    "decode.queue",
    "decode",
}

UNLUCKY_SEED = 666
NUM_KILLS = 5  # attempts to hit a stream
# Lines of a start.
WEIGHTS = r"weights .* of .* \(100 %\)"
BLOCKS = r"allocating [\d,]+ KV blocks; steps of up to \d+ sequences and [\d,]+ tokens"


@pytest.fixture(scope="module")
def server(
    model: Path,
    collector: OtlpCollector,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Command]:
    """Two ingresses, a prefill worker of two ranks, two decode workers, an embedded Redis."""
    flags = "--served-model-name tiny --dtype float32 --num-threads 1"
    pools = "--ingress 2 --prefill 1 --prefill-tensor-parallel-size 2 --decode 2"
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "PYTHONPATH": with_stand_in(),
        "DISAGG_TEST_HAND_OVER": "300",  # the prompts that are to be pulled
        "DISAGG_TEST_UNLUCKY_SEED": f"{UNLUCKY_SEED}",
    }
    command = Command(f"{model} {flags} {pools}", tmp_path_factory.mktemp("serve"), environment)
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


@pytest.fixture
def client(server: Command) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def num_pulls(server: Command, outcome: str) -> float:
    text = plain_http.get(f"{server.url}/metrics").text
    found = re.findall(r"^disagg_worker_kv_pulls_total\{(.*)\} ([\d.e+]+)$", text, re.M)
    return sum(float(number) for labels, number in found if f'outcome="{outcome}"' in labels)


def until_pulled(server: Command, ask: Callable[[], object]) -> None:
    """Asks until KV was pulled: a worker that measured slow first steps gets no prompt yet."""
    before = num_pulls(server, "ok")

    def pulled() -> bool:
        ask()
        return num_pulls(server, "ok") > before

    until(pulled, why=lambda: "nothing was pulled")


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "middle", "long"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_equals_a_single_engines(
    client: openai.OpenAI, reference: SingleEngine, prompt: str, temperature: float
) -> None:
    assert_same_text(client, "tiny", reference, prompt, temperature)


def test_text_of_pulled_kv_is_a_single_engines(
    server: Command, client: openai.OpenAI, reference: SingleEngine
) -> None:
    """From the ranks of one process tree to the process of another, by NIXL."""
    numbers = itertools.count()

    def ask() -> None:
        assert_same_text(client, "tiny", reference, f"{next(numbers)}: " + PROMPTS[-1])

    until_pulled(server, ask)
    assert not num_pulls(server, "failed") + num_pulls(server, "torn")


def test_streamed_text_is_the_same(client: openai.OpenAI, reference: SingleEngine) -> None:
    prompt = "streamed " * 20
    chunks = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=24,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == reference.chat(prompt, 24)
    assert usage is not None
    assert usage.prompt_tokens == len(reference.prompt(prompt))


def test_prefix_hits_are_counted(client: openai.OpenAI, reference: SingleEngine) -> None:
    prompt = "the same words again and again, told twice; " * 6
    cached = []
    for _ in range(3):
        answer = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=4,
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert answer.choices[0].message.content == reference.chat(prompt, 4)
    num_full_block_tokens = (len(reference.prompt(prompt)) - 1) // 16 * 16
    assert cached == [0, num_full_block_tokens, num_full_block_tokens]


def test_many_choices_and_logprobs(client: openai.OpenAI, reference: SingleEngine) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPTS[1]}],
        temperature=0,
        max_tokens=6,
        n=3,
        logprobs=True,
        top_logprobs=2,
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.message.content == reference.chat(PROMPTS[1], 6)
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == 6
        for position in choice.logprobs.content:
            assert position.top_logprobs[0].logprob == position.logprob  # greedy: the likeliest


def test_an_answer_follows_a_schema_through_both_pools(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 3, "maxItems": 5}
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": PROMPTS[2]}],
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        seed=3,
    )
    assert answer.choices[0].finish_reason == "stop"
    colors = json.loads(answer.choices[0].message.content or "")
    assert 3 <= len(colors) <= 5 and set(colors) <= {"red", "blue"}


def test_errors_are_sentences(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
        client.completions.create(model="tiny", prompt="x" * 5000, max_tokens=4)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="tiny"):
        client.completions.create(model="huge", prompt="x", max_tokens=4)


def test_a_trace_goes_through_all_processes(server: Command, collector: OtlpCollector) -> None:
    trace_ids: list[str] = []

    def ask() -> None:
        trace_ids.append(secrets.token_hex(16))
        content = f"traced request {len(trace_ids)}, of its own: " * 12
        answer = plain_http.post(
            f"{server.url}/v1/chat/completions",
            json={
                "model": "tiny",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 8,
            },
            headers={"traceparent": f"00-{trace_ids[-1]}-b7ad6b7169203331-01"},
            timeout=60,
        )
        assert answer.status_code == 200, answer.text

    def through_all() -> dict[str, ReceivedSpan]:
        """Of the first trace that is complete; empty while none is. A worker that measured slow
        first steps gets no prompt yet, and spans come seconds later: meanwhile more is asked."""
        ask()
        time.sleep(0.5)
        traces = [{s.name: s for s in collector.spans if s.trace_id == each} for each in trace_ids]
        return next((trace for trace in traces if set(trace) >= SPANS), {})

    spans: dict[str, ReceivedSpan] = until(
        through_all, why=lambda: f"{sorted({span.name for span in collector.spans})}"
    )
    server_span, answer = spans[HTTP], spans[ANSWER]
    assert server_span.parent_id == "b7ad6b7169203331"
    assert answer.parent_id == server_span.span_id
    for name in SPANS - {HTTP, ANSWER}:
        assert spans[name].parent_id == answer.span_id, name
    pull = spans["kv.pull"].attributes
    assert pull["disagg.kv.num_blocks"] > 0 and pull["disagg.kv.nbytes"] > 0
    assert len({json.dumps(span.resource, sort_keys=True) for span in spans.values()}) == 3


def test_the_start_was_told_in_few_lines(server: Command) -> None:
    lines = server.messages()
    for pool in ("tiny-prefill", "tiny-decode: slowest of 2"):
        for words in (WEIGHTS, BLOCKS, "warming up"):
            assert sum(bool(re.fullmatch(f"{pool}: {words}", line)) for line in lines) == 1, lines


def test_an_embedded_redis_that_dies_is_replaced(
    server: Command, client: openai.OpenAI, reference: SingleEngine
) -> None:
    (redis,) = server.named("valkey-server")
    redis.kill()
    while "Redis died; a new, empty one replaces it" not in server.output():
        assert_same_text(client, "tiny", reference, "asked while there is no Redis " * 9)
    assert len(server.named("valkey-server")) == 1


def test_metrics_and_probes(server: Command, client: openai.OpenAI) -> None:
    client.completions.create(model="tiny", prompt="counted", max_tokens=1)
    for path in ("/live", "/ready", "/health", "/version"):
        answer = plain_http.get(server.url + path, headers={"x-request-id": "mine"})
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["mine"]
    metrics = plain_http.get(f"{server.url}/metrics").text
    assert "disagg_prompt_tokens_total{" in metrics
    assert metrics.count("disagg_worker_kv_cache_usage_perc{") == 3  # workers
    assert "disagg_kv_transfer_bytes_per_second{" in metrics


async def test_a_request_that_breaks_a_step_ends_alone(
    server: Command, reference: SingleEngine
) -> None:
    """Of every engine that would compute it: it is tried on one. No worker and no stream ends."""
    expected, answers = streams_of(reference), list[httpx.Response]()
    workers = set(server.named("ServeReplica"))
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": PROMPTS[1]}],
        "seed": UNLUCKY_SEED,
        "logit_bias": {"5": 1.0},
        "max_tokens": 8,
    }

    def ask() -> None:
        url = f"{server.url}/v1/chat/completions"
        answers.extend(plain_http.post(url, json=body, timeout=60) for _ in range(3))

    assert await streamed(server.url, "tiny", ask) == expected
    for answer in answers:
        assert answer.status_code == 500
        error = answer.json()["error"]
        assert error["code"] == "request_failed"
        assert "planted" in error["message"] and answer.headers["x-request-id"]
    assert workers == set(server.named("ServeReplica"))


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_no_stream_notices_a_workers_death(
    server: Command, reference: SingleEngine, role: str
) -> None:
    """Greedy and seeded streams go on elsewhere, from the token at which their worker died. The
    prefill worker dies with one of its ranks.

    Serve starts another worker, which is not waited for.
    """
    expected = streams_of(reference)
    for _ in range(NUM_KILLS):
        worker = server.named(f"tiny-{role}")[0]
        victim = worker if role == "decode" else second_rank(worker)
        assert await streamed(server.url, "tiny", victim.kill) == expected
        worker.wait(LEFT_TIMEOUT_S)  # it does not outlive its rank
        # A prefill worker may have ended its last prompt just then, and a decode worker all of its
        # streams, if the client was slow to read them.
        if role == "prefill" or soon(lambda: has_moved(server.url)):
            return
    pytest.fail(f"no stream was hit when a worker was killed, {NUM_KILLS} times")


def second_rank(worker: psutil.Process) -> psutil.Process:
    (found,) = [each for each in worker.children() if "disagg.worker.rank" in each.cmdline()]
    return found


def test_what_a_killed_run_leaves_ends_at_the_next_start(server: Command, tmp_path: Path) -> None:
    """The command and the process that serves are killed together: nobody is left to clean up.

    Last in this file.
    """
    serving = server.running("disagg.cli.server_process")
    server.process.send_signal(signal.SIGSTOP)
    serving.kill()
    server.process.kill()
    server.process.wait()
    following = Command(f"demo-small --ray-address 127.0.0.1:{free_port()}", tmp_path)
    assert following.ended() == 2
    following.assert_nothing_left()
    server.assert_nothing_left()
