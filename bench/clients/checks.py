"""The checks that each client library runs on a server. Runs in `.clients`.

A check raises where a user of the library would see something wrong. Each check imports its own
libraries, so a broken library fails only its own checks.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import httpx
from pydantic import BaseModel, Field

HERE = Path(__file__).parent
HI = [{"role": "user", "content": "What is the capital of France?"}]
MAX_TOKENS = 400


class Server(NamedTuple):
    url: str  # without /v1
    model: str
    tokenizer: str  # its directory


class Animal(BaseModel):
    """With bounds, or a weak model writes one text until its tokens are used up."""

    name: str = Field(max_length=40)
    legs: int
    colours: list[Annotated[str, Field(max_length=20)]] = Field(max_length=3)


LOOK_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 30}},
    "required": ["place"],
    "additionalProperties": False,
}
LOOK = {
    "type": "function",
    "function": {"name": "look", "description": "Look somewhere.", "parameters": LOOK_PARAMETERS},
}

Check = Callable[[Server], None]
CHECKS: dict[tuple[str, str], Check] = {}


def check(library: str, what: str) -> Callable[[Check], Check]:
    def add(function: Check) -> Check:
        CHECKS[library, what] = function
        return function

    return add


# openai


def _openai(server: Server, counted: list[str] | None = None, **options: Any) -> Any:
    import openai

    def count(request: httpx.Request) -> None:
        if counted is not None:
            counted.append(request.url.path)

    client: Any = httpx.Client(event_hooks={"request": [count]}, timeout=120)
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", http_client=client, **options)


@check("openai", "chat")
def openai_chat(server: Server) -> None:
    answer = _openai(server).chat.completions.create(
        model=server.model, messages=HI, max_tokens=16, temperature=0, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    assert choice.message.content and choice.finish_reason in ("stop", "length")
    assert len(choice.logprobs.content) == answer.usage.completion_tokens


@check("openai", "stream")
def openai_stream(server: Server) -> None:
    client, asked = _openai(server), {"model": server.model, "max_tokens": 32, "temperature": 0}
    whole = client.chat.completions.create(messages=HI, **asked).choices[0].message.content
    chunks = list(
        client.chat.completions.create(
            messages=HI, stream=True, stream_options={"include_usage": True}, **asked
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-1].usage.completion_tokens > 0


@check("openai", "tools")
def openai_tools(server: Server) -> None:
    asked: dict[str, Any] = {
        "model": server.model,
        "messages": HI,
        "tools": [LOOK],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
    }
    answer = _openai(server).chat.completions.create(**asked).choices[0]
    (call, *_) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.function.name == "look"
    assert set(json.loads(call.function.arguments)) == {"place"}
    with _openai(server).chat.completions.stream(**asked) as stream:
        (call, *_) = stream.get_final_completion().choices[0].message.tool_calls
    assert set(json.loads(call.function.arguments)) == {"place"}


@check("openai", "schema")
def openai_schema(server: Server) -> None:
    answer = _openai(server).chat.completions.parse(
        model=server.model, messages=HI, response_format=Animal, max_tokens=MAX_TOKENS
    )
    assert isinstance(answer.choices[0].message.parsed, Animal)


@check("openai", "responses")
def openai_responses(server: Server) -> None:
    client = _openai(server)
    asked: dict[str, Any] = {
        "model": server.model,
        "input": "Say something.",
        "temperature": 0,
    }
    whole = client.responses.create(max_output_tokens=32, **asked)
    assert whole.output_text and whole.usage.output_tokens > 0
    with client.responses.stream(max_output_tokens=32, **asked) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
    assert text == whole.output_text
    parsed = client.responses.parse(text_format=Animal, max_output_tokens=MAX_TOKENS, **asked)
    assert isinstance(parsed.output_parsed, Animal)


@check("openai", "errors")
def openai_errors(server: Server) -> None:
    """What a retry cannot mend is sent once, what it may is sent again."""
    import openai

    sent: list[str] = []
    client = _openai(server, sent, max_retries=2)
    cases: list[tuple[dict[str, Any], Any]] = [
        ({"model": "no-such-model"}, openai.NotFoundError),
        ({"temperature": 9}, openai.BadRequestError),
        ({"max_tokens": 10**6}, openai.BadRequestError),
    ]
    for wrong, kind in cases:
        try:
            client.chat.completions.create(**({"model": server.model, "messages": HI} | wrong))
        except kind as error:
            assert error.body["message"]
        else:
            raise AssertionError(f"{wrong} was answered")
    assert len(sent) == 3, sent


@check("openai", "retries")
def openai_retries(server: Server) -> None:
    import openai

    sent: list[str] = []
    client = _openai(server, sent, max_retries=2)
    try:
        client.chat.completions.create(
            model=server.model, messages=HI, max_tokens=512, extra_body={"timeout": 1e-6}
        )
    except openai.InternalServerError as error:
        assert error.status_code == 504
    else:
        raise AssertionError("a deadline of a microsecond was met")
    assert len(sent) == 3, sent


# langchain-openai


def _langchain(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="none", model=server.model, max_tokens=MAX_TOKENS
    )


@check("langchain-openai", "chat")
def langchain_chat(server: Server) -> None:
    answer = _langchain(server).invoke("Say something.")
    assert answer.content and answer.usage_metadata["output_tokens"] > 0


@check("langchain-openai", "stream")
def langchain_stream(server: Server) -> None:
    chunks = list(_langchain(server).stream("Say something."))
    assert "".join(str(chunk.content) for chunk in chunks)


@check("langchain-openai", "tools")
def langchain_tools(server: Server) -> None:
    answer = _langchain(server).bind_tools([LOOK], tool_choice="any").invoke("Look!")
    assert answer.tool_calls[0]["name"] == "look"


@check("langchain-openai", "schema")
def langchain_schema(server: Server) -> None:
    for method in ("json_schema", "function_calling"):
        asked = _langchain(server).with_structured_output(Animal, method=method)
        assert isinstance(asked.invoke("Name an animal."), Animal), method


# litellm


def _litellm(server: Server, **asked: Any) -> Any:
    import litellm

    return litellm.completion(
        model=f"openai/{server.model}",
        api_base=f"{server.url}/v1",
        api_key="none",
        messages=HI,
        **({"max_tokens": MAX_TOKENS} | asked),
    )


@check("litellm", "chat")
def litellm_chat(server: Server) -> None:
    assert _litellm(server, max_tokens=16).choices[0].message.content


@check("litellm", "stream")
def litellm_stream(server: Server) -> None:
    chunks = list(_litellm(server, stream=True, max_tokens=32))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@check("litellm", "tools")
def litellm_tools(server: Server) -> None:
    answer = _litellm(server, tools=[LOOK], tool_choice="required")
    assert answer.choices[0].message.tool_calls[0].function.name == "look"


@check("litellm", "schema")
def litellm_schema(server: Server) -> None:
    answer = _litellm(server, response_format=Animal)
    Animal.model_validate_json(answer.choices[0].message.content)


@check("litellm", "errors")
def litellm_errors(server: Server) -> None:
    import litellm

    try:
        _litellm(server, temperature=9)
    except litellm.BadRequestError as error:
        assert "temperature" in str(error)
    else:
        raise AssertionError("a temperature of 9 was taken")


# instructor


@check("instructor", "schema")
def instructor_schema(server: Server) -> None:
    import instructor

    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        client = instructor.from_openai(_openai(server), mode=mode)
        animal = client.chat.completions.create(
            model=server.model,
            messages=HI,
            response_model=Animal,
            max_tokens=MAX_TOKENS,
            max_retries=0,
        )
        assert isinstance(animal, Animal), mode


# pydantic-ai


def _agent(server: Server, **options: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    model = OpenAIChatModel(server.model, provider=provider)
    return Agent(model, model_settings={"max_tokens": MAX_TOKENS}, **options)


@check("pydantic-ai", "chat")
def pydantic_ai_chat(server: Server) -> None:
    assert _agent(server).run_sync("Say something.").output


@check("pydantic-ai", "stream")
def pydantic_ai_stream(server: Server) -> None:
    async def stream() -> str:
        async with _agent(server).run_stream("Say something.") as result:
            return "".join([text async for text in result.stream_text(delta=True)])

    assert asyncio.run(stream())


@check("pydantic-ai", "schema")
def pydantic_ai_schema(server: Server) -> None:
    from pydantic_ai import NativeOutput, ToolOutput

    for kind in (NativeOutput, ToolOutput):
        agent = _agent(server, output_type=kind(Animal))
        assert isinstance(agent.run_sync("Name an animal.").output, Animal), kind


# anthropic


CALL_FIELDS = ("type", "id", "name", "input")
GREEDY: Any = {"extra_body": {"temperature": 0}}  # which the package does not know


def _anthropic(server: Server) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none")


@check("anthropic", "chat")
def anthropic_chat(server: Server) -> None:
    message = _anthropic(server).messages.create(
        model=server.model, max_tokens=32, messages=HI, system="Be brief."
    )
    assert message.content[0].text and message.usage.output_tokens > 0
    assert message.stop_reason in ("end_turn", "max_tokens")


@check("anthropic", "stream")
def anthropic_stream(server: Server) -> None:
    asked: Any = {"model": server.model, "max_tokens": 32, "messages": HI, **GREEDY}
    whole = _anthropic(server).messages.create(**asked)
    with _anthropic(server).messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


@check("anthropic", "tools")
def anthropic_tools(server: Server) -> None:
    asked: Any = {
        "model": server.model,
        "max_tokens": MAX_TOKENS,
        "messages": HI,
        "tools": [{"name": "look", "input_schema": LOOK_PARAMETERS}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    message = _anthropic(server).messages.create(**asked)
    with _anthropic(server).messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for each in (message, streamed):
        call = next(block for block in each.content if block.type == "tool_use")
        assert (each.stop_reason, call.name, set(call.input)) == ("tool_use", "look", {"place"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "a fox"}
    turns = [
        *HI,
        {
            "role": "assistant",
            "content": [call.model_dump(include=set(CALL_FIELDS))],
        },
        {"role": "user", "content": [result]},
    ]
    assert _anthropic(server).messages.create(**(asked | {"messages": turns})).content


@check("anthropic", "errors")
def anthropic_errors(server: Server) -> None:
    import anthropic

    try:
        _anthropic(server).messages.create(model="no-such-model", max_tokens=4, messages=HI)
    except anthropic.NotFoundError as error:
        assert error.body["error"]["type"] == "not_found_error"
    else:
        raise AssertionError("a model that is not there answered")


# llm, lm-eval and openai-node: as commands


def _run(command: list[str], **environment: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | environment
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-1500:]
    return done.stdout


@check("llm", "chat")
def llm_chat(server: Server) -> None:
    with tempfile.TemporaryDirectory() as home:
        model = {"model_id": "here", "model_name": server.model, "api_base": f"{server.url}/v1"}
        Path(home, "extra-openai-models.yaml").write_text(json.dumps([model]))
        command = [sys.executable, "-m", "llm", "-m", "here", "--key", "none", "--no-log"]
        options = ["-o", "max_tokens", "16", "Say something."]
        for stream in ([], ["--no-stream"]):
            assert _run([*command, *stream, *options], LLM_USER_PATH=home).strip()


@check("lm-eval", "loglikelihood")
def lm_eval_loglikelihood(server: Server) -> None:
    """Two texts, of which one goes on as the model would: its choices are scored."""
    with tempfile.TemporaryDirectory() as home:
        docs = [
            {"text": "The quick brown", "choices": [" fox", " xylophone"], "label": 0},
            {"text": "One, two,", "choices": [" three", " purple"], "label": 0},
        ]
        lines = "\n".join(map(json.dumps, docs))
        Path(home, "docs.jsonl").write_text(lines)
        Path(home, "task.yaml").write_text(
            json.dumps(
                {
                    "task": "two_texts",
                    "dataset_path": "json",
                    "dataset_kwargs": {"data_files": {"test": f"{home}/docs.jsonl"}},
                    "test_split": "test",
                    "output_type": "multiple_choice",
                    "doc_to_text": "{{text}}",
                    "doc_to_choice": "{{choices}}",
                    "doc_to_target": "label",
                    "target_delimiter": "",
                    "metric_list": [{"metric": "acc"}],
                }
            )
        )
        arguments = (
            f"model={server.model},base_url={server.url}/v1/completions,"
            f"tokenizer={server.tokenizer},tokenizer_backend=huggingface,"
            "tokenized_requests=True,num_concurrent=2,max_retries=1"
        )
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions"]
        options = ["--tasks", "two_texts", "--include_path", home, "--model_args", arguments]
        shown = _run([*command, *options], HF_HUB_OFFLINE="1", HF_HOME=home)
        assert "two_texts" in shown and "acc" in shown, shown[-1500:]


@check("aiperf", "load")
def aiperf_load(server: Server) -> None:
    """In an environment of its own: it wants other versions of what the others use."""
    with tempfile.TemporaryDirectory() as home:
        command = [os.environ["CLIENTS_AIPERF"], "profile", "--model", server.model]
        command += ["--url", server.url, "--tokenizer", server.tokenizer, "--ui", "none"]
        command += ["--endpoint-type", "chat", "--streaming", "--use-server-token-count"]
        command += ["--request-count", "20", "--concurrency", "2", "--artifact-dir", home]
        # Not aiperf's random words: a model may answer them with nothing, which is an error to it.
        questions = Path(home, "questions.jsonl")
        lines = [json.dumps({"text": f"What is {n} + {n + 7}?"}) for n in range(20)]
        questions.write_text("\n".join(lines) + "\n")
        command += ["--input-file", str(questions), "--custom-dataset-type", "single_turn"]
        _run(command, HF_HOME=home)
        report = json.loads(Path(home, "profile_export_aiperf.json").read_text())
        assert report["request_count"]["avg"] == 20 and not report["error_summary"], report
        assert report["usage_completion_tokens"]["min"] >= 1, report


@check("openai-node", "all")
def openai_node(server: Server) -> None:
    shown = _run(["node", str(HERE / "checks.mjs"), server.url, server.model])
    assert shown.strip().endswith("ok"), shown
