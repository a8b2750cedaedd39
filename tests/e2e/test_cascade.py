"""`disagg serve demo-small demo-large --cascade` as a user starts it: hard tasks escalate, easy
ones stream from the small model, and a calibration against the server writes a threshold.

Every worker has a GPU of its own, on a machine whose GPUs are stood in for. The user's home
directory is read-only, and the server ends when Ray's control store dies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from disagg.cli.main import main
from tests import plain_http
from tests.e2e.command import Command, until
from tests.e2e.gpus import Opened, machine
from tests.otlp_collector import OtlpCollector

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SMALL, LARGE = "demo-small", "demo-large"
EASY = {
    "What is the capital of France?": "Paris",
    "What is 2 + 3?": "5",
    "The code of Anna is 4821. What is the code of Anna?": "The code of Anna is 4821.",
}
# The small model is unsure of the first; the second starts on the large one.
HARD = {"What is 737 times 7?": "5159", "What is 86517 + 97768?": "184285"}


@pytest.fixture(scope="module")
def server(collector: OtlpCollector, directory: Path) -> Iterator[Command]:
    """Its home is read-only: nothing but logs would be kept there, and they go elsewhere. It has
    eight GPUs, the first of which another process fills."""
    for name in ("home", "opened"):
        (directory / name).mkdir()
    environment = {
        **machine(3, *[80] * 7),
        "DISAGG_TEST_OPENED": str(directory / "opened"),
        "HOME": str(directory / "home"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
    }
    command = Command(
        f"{SMALL} {LARGE} --cascade --prefill 0 --num-threads 1 --no-haproxy --no-redis"
        " --no-restart --host :: --insecure",
        directory,
        environment,
        mounts=f"mount -t tmpfs -o ro tmpfs {directory}/home",
    )
    with command.killed_at_the_end():
        command.wait_ready()
        yield command


def test_every_worker_opens_a_gpu_of_its_own(server: Command, directory: Path) -> None:
    found = Opened(directory / "opened")
    assert [pool for pool, _ in found.gpus] == [f"{LARGE}-decode", f"{SMALL}-decode"]
    assert sorted(gpu for _, gpu in found.gpus) == [1, 2]
    assert found.claims == [72.0] * 2
    said = server.output()
    assert f"1 {SMALL}-decode, 1 {LARGE}-decode on GPU 1, 2 of 8" in said


def body(question: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "auto", "messages": messages, "temperature": 0, **fields}


@pytest.mark.parametrize("question", [*EASY, *HARD])
def test_easy_tasks_stream_from_the_small_model_and_hard_ones_escalate(
    server: Command, question: str
) -> None:
    model, answer = (SMALL, EASY[question]) if question in EASY else (LARGE, HARD[question])
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        chunks = list(client.chat.completions.create(**body(question, stream=True)))
    assert {chunk.model for chunk in chunks} == {model}
    assert len(chunks) > 2
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == answer


def test_header_debug_page_span_and_metrics_say_why(
    server: Command, collector: OtlpCollector
) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    headers = {"traceparent": f"00-{trace_id}-b7ad6b7169203331-01"}
    url = f"{server.url}/v1/chat/completions"
    given = plain_http.post(url, json=body(next(iter(HARD))), headers=headers, timeout=60)
    why = given.headers["x-disagg-cascade"]
    assert why.startswith("demo-small unsure (minimum -") and why.endswith("demo-large largest")
    debug = plain_http.get(f"{server.url}/debug/requests/{given.json()['id']}").json()
    small, large = debug["cascade"]["attempts"]
    poor = plain_http.post(url, json=body(list(HARD)[1]), timeout=60)
    assert poor.headers["x-disagg-cascade"] == "demo-small poor, demo-large largest"
    assert (small["model"], small["reason"], large["model"]) == (SMALL, "unsure", LARGE)
    assert small["verdict"]["value"] < small["threshold"] == -0.1
    collector.wait_for(
        lambda spans: any(s.trace_id == trace_id and s.name == "cascade" for s in spans)
    )
    (span,) = (s for s in collector.spans if s.trace_id == trace_id and s.name == "cascade")
    assert span.attributes["disagg.cascade.model"] == LARGE
    assert span.attributes["disagg.cascade.why"] == why
    metrics = plain_http.get(f"{server.url}/metrics").text
    assert 'disagg_cascade_answers_total{model_name="demo-large"}' in metrics
    for reason in ("unsure", "poor"):
        name = f'disagg_cascade_escalations_total{{model_name="demo-small",reason="{reason}"}}'
        assert name in metrics


def test_errors_and_probes_pass_serves_own_proxy(server: Command) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length") as too_long:
            client.completions.create(model=SMALL, prompt="x" * 50_000, max_tokens=4)
        assert too_long.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError, match="demo-small"):
            client.completions.create(model="huge", prompt="x", max_tokens=4)
    for path in ("/live", "/ready", "/health", "/version"):
        answer = plain_http.get(server.url + path)
        assert answer.status_code == 200
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_server_is_calibrated_against(
    server: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, written = tmp_path / "prompts.jsonl", tmp_path / "cascade.yaml"
    lines = ({"prompt": question, "label": label} for question, label in (EASY | HARD).items())
    prompts.write_text("\n".join(map(json.dumps, lines)))
    words = ["cascade", "calibrate", SMALL, LARGE, "--url", server.url]
    assert main([*words, "--prompts", str(prompts), "--write", str(written)]) == 0
    said = capsys.readouterr().out
    assert "demo-small: 60.0% correct with 918,912 parameters" in said
    assert written.read_text().startswith("cascade:\n  signal: ")


@pytest.mark.last(1)
def test_when_the_large_model_dies_hard_tasks_are_answered_all_the_same(server: Command) -> None:
    """Serve starts another worker, which is not waited for."""
    url, question = f"{server.url}/v1/chat/completions", next(iter(HARD))
    server.one(f"{LARGE}-decode").kill()
    until(lambda: not num_large_workers(server), why=lambda: "they are still there")
    answer = plain_http.post(url, json=body(question), timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == SMALL
    assert "demo-large unavailable, demo-small kept (" in answer.headers["x-disagg-cascade"]


def test_logs_are_kept_beside_a_read_only_home(server: Command) -> None:
    assert server.events("logs")[0]["directory"].startswith("/tmp/")


@pytest.mark.last(2)
def test_the_end_of_rays_control_store_ends_the_command(server: Command) -> None:
    """A node's end is in `test_lifecycle.py`."""
    server.one("gcs_server").kill()
    assert server.ended() == 1
    (line,) = server.events("broken")
    assert "Ray's gcs_server process died" in line["message"]
    server.assert_only_own_lines()
    server.assert_nothing_left()


def num_large_workers(server: Command) -> int:
    pool = plain_http.get(f"{server.url}/ready").json()["pools"][LARGE]
    return int(pool["num_prefill"] + pool["num_decode"])
