"""`disagg chat` against the real HTTP application on a loopback port."""

from __future__ import annotations

import argparse
import asyncio
import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from disagg.api.http.app import AsgiApp
from disagg.config import HttpConfig
from disagg.errors import DisaggError, EngineFailed, StartupError, Unavailable
from disagg.tools import chat
from disagg.tools.server import Server
from tests.api.apps import make_app
from tests.api.fakes import CHATML, TOKENIZER, FakeGenerate, served_model

TEXT = "the quick brown fox"


@contextmanager
def served(app: AsgiApp) -> Iterator[str]:
    """The app under uvicorn in a thread; its URL."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", loop="asyncio"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.005)
            assert thread.is_alive()
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    chat.add_arguments(parser)
    return parser.parse_args(words)


def prompt_of(generate: FakeGenerate) -> str:
    return TOKENIZER.decode(generate.requests[-1].token_ids, skip_special_tokens=False)


def test_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    generate = FakeGenerate(TEXT)
    with served(make_app(generate)) as url:
        words = ["--url", url, "--system", "be kind", "--message", "hi", "--max-tokens", "9"]
        assert chat.run(arguments(*words, "--temperature", "0", "--seed", "3")) == 0
    assert capsys.readouterr().out == TEXT + "\n"
    assert prompt_of(generate).startswith(
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n"
    )
    sampling = generate.requests[0].sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.seed) == (9, 0.0, 3)


def test_a_question_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    generate = FakeGenerate(TEXT)
    with served(make_app(generate)) as url:
        assert chat.run(arguments("--url", url, "--message", "-")) == 0
    assert "from a pipe" in prompt_of(generate)
    assert capsys.readouterr().out == TEXT + "\n"


def test_a_proxy_is_used_except_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stood in for by the application, which takes a proxy's requests for its own."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with served(make_app(FakeGenerate(TEXT))) as url:
        monkeypatch.setenv("http_proxy", url)
        assert chat.run(arguments("--url", "http://models.invalid/v1", "--message", "hi")) == 0
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
        assert chat.run(arguments("--url", url, "--message", "hi")) == 0
        assert chat.run(arguments("--url", localhost(url), "--message", "hi")) == 0
        monkeypatch.setenv("http_proxy", url)
        monkeypatch.setenv("no_proxy", "models.invalid")
        with pytest.raises(Unavailable, match=r"models\.invalid"):
            chat.run(arguments("--url", "http://models.invalid", "--message", "hi"))
    assert capsys.readouterr().out == 3 * f"{TEXT}\n"


def localhost(url: str) -> str:
    return url.replace("127.0.0.1", "localhost")


def test_a_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["one", "/help", "/system be brief", "two", "", "/clear", "three", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    generate = FakeGenerate(TEXT)
    prompts = []
    with served(make_app(generate)) as url:
        assert chat.run(arguments("--url", url)) == 0
    prompts = [TOKENIZER.decode(request.token_ids) for request in generate.requests]
    assert len(prompts) == 3
    assert prompts[1].startswith("system\nbe brief\nuser\none\nassistant\nthe quick brown fox\n")
    assert "one" not in prompts[2]
    shown = capsys.readouterr().out
    assert shown.count(TEXT) == 3
    assert "5 tokens" in shown
    assert "/clear starts a new conversation" in shown


def test_a_failure_is_shown_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    generate = FakeGenerate(TEXT, fail_after=2, error=EngineFailed("The device failed."))
    with served(make_app(generate)) as url:
        assert chat.run(arguments("--url", url)) == 0
    shown = capsys.readouterr().out
    assert shown.count("the quick\nThe device failed.") == 2
    assert len(generate.requests) == 2


def test_an_interrupt_hangs_up_and_keeps_what_came(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = FakeGenerate(
        TEXT, finish=False, pause=lambda: asyncio.ensure_future(asyncio.sleep(0.002))
    )
    with served(make_app(generate)) as url:
        conversation = chat.ChatSession(Server(url), "tiny", {"max_tokens": 480})
        pieces = conversation.ask("hi")
        assert next(piece.text for piece in pieces if piece.text) == "the"
        pieces.close()
        while generate.num_open:  # the server notices that its client is gone
            threading.Event().wait(0.002)
    assert [turn["role"] for turn in conversation.turns] == ["user", "assistant"]
    assert conversation.turns[1]["content"] == "the"


def test_answers_do_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    with served(make_app(FakeGenerate("a\x1b[2Jb [red]c"))) as url:
        chat.run(arguments("--url", url))
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "a[2Jb [red]c" in shown


def test_keys_and_paths() -> None:
    app = make_app(config=HttpConfig(api_key="secret"))
    with served(app) as url:
        with pytest.raises(DisaggError, match="API key"):
            chat.run(arguments("--url", url, "--message", "hi"))
        good = ["--url", url + "/v1/", "--message", "hi", "--api-key", "secret"]
        assert chat.run(arguments(*good)) == 0


def test_what_is_not_there_is_said() -> None:
    with served(make_app()) as url:
        with pytest.raises(DisaggError, match="this server has tiny"):
            chat.run(arguments("--url", url, "--model", "nope", "--message", "hi"))
        with pytest.raises(DisaggError, match="There is no"):
            Server(url + "/elsewhere").first_model()
    with pytest.raises(Unavailable, match="disagg serve"):
        chat.run(arguments("--url", url, "--message", "hi"))
    with pytest.raises(StartupError, match="not a URL"):
        chat.run(arguments("--url", "ftp://x", "--message", "hi"))


def test_a_stream_that_breaks_off_is_not_an_answer() -> None:
    async def half(scope: dict[str, str], receive: object, send: object) -> None:
        assert scope["type"] in ("http", "lifespan")
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
            await send({"type": "http.response.body", "body": b'data: {"choices":[]}\n\n'})  # type: ignore[operator]

    with served(half) as url:  # type: ignore[arg-type]
        conversation = chat.ChatSession(Server(url), "tiny", {})
        with pytest.raises(Unavailable, match="closed the connection"):
            list(conversation.ask("hi"))
    assert conversation.turns == []


def test_reasoning_is_shown_but_is_no_part_of_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = FakeGenerate("<think>So, yes.</think>Hi!")
    thinker = served_model(template=CHATML + "{# <think> #}")
    with served(make_app(generate, thinker)) as url:
        assert chat.run(arguments("--url", url, "--message", "hi")) == 0
        assert capsys.readouterr().out == "Hi!\n"
        monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n/exit\n"))
        assert chat.run(arguments("--url", url)) == 0
    shown = capsys.readouterr().out
    assert shown.index("So, yes.") < shown.index("Hi!")
    assert "Hi!" in prompt_of(generate) and "So, yes." not in prompt_of(generate)
