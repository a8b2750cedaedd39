from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.api.running_job import ChoiceDelta, Generate, RunningJob
from disagg.errors import EngineFailed, Overloaded
from disagg.messages import GenerateRequest, PutDelta, TokenDelta, TokenLogprobs
from tests.api.fakes import END, TOKENIZER, request_spec
from tests.deltas import push
from tests.generate_requests import new_request

TEXT = "the quick brown fox jumps"
IDS = (*TOKENIZER.encode(TEXT, add_special_tokens=False), END)


def job(generate: Generate, num_choices: int = 1, *, stops: Sequence[str] = ()) -> RunningJob:
    request = new_request((70, 71), max_tokens=100, stop_token_ids=(END,))
    spec = request_spec(request.sampling, num_choices=num_choices, stops=tuple(stops))
    return RunningJob("r", 0, spec, (request,) * num_choices, generate)


def playing(*deltas: TokenDelta | Exception) -> Generate:
    """A source that says `deltas` to everyone, by turns."""

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for delta in deltas:
            if isinstance(delta, Exception):
                raise delta
            yield delta
            await asyncio.sleep(0)

    return push(generate)


class Choices:
    """A source of several answers. `say` yields the deltas of the one with that number."""

    def __init__(self, say: Callable[[int], AsyncGenerator[TokenDelta, None]]) -> None:
        self.say = say
        self.num_opened = 0
        self.closed: list[int] = []

    async def __call__(self, request: GenerateRequest, put: PutDelta) -> None:
        number, self.num_opened = self.num_opened, self.num_opened + 1
        try:
            async for delta in self.say(number):
                put(delta)
        finally:
            self.closed.append(number)


async def for_ever() -> None:
    await asyncio.get_running_loop().create_future()


async def result(run: RunningJob) -> list[ChoiceDelta]:
    whole = [ChoiceDelta(index) for index in range(len(run.requests))]
    async for batch in run.batches():
        for piece in batch:
            assert whole[piece.index].finish_reason is None  # one end for each
            whole[piece.index].extend(piece)
    return whole


@given(
    st.lists(st.integers(1, 4), max_size=len(IDS)),
    st.sampled_from([(), ("brown",), ("x j", "fox"), ("the",), ("umps",)]),
)
async def test_deltas_may_be_cut_anywhere(sizes: list[int], stops: tuple[str, ...]) -> None:
    scores = tuple(TokenLogprobs(-1.0) for _ in IDS)
    deltas, start = [], 0
    for size in [*sizes, len(IDS)]:
        ids = IDS[start : start + size]
        start += size
        last = start >= len(IDS)
        if ids:
            reason = "stop" if last else None
            deltas.append(TokenDelta(0, ids, reason, scores[: len(ids)]))  # type: ignore[arg-type]
    run = job(playing(*deltas), stops=stops)
    whole = (await result(run))[0]
    assert whole.finish_reason == "stop"
    first = min((TEXT.find(stop) for stop in stops if stop in TEXT), default=len(TEXT))
    assert whole.text == TEXT[:first]
    assert run.num_completion_tokens == whole.num_tokens == len(whole.scored)
    shown = TOKENIZER.decode([token.token_id for token in whole.scored])
    assert shown.startswith(whole.text)
    assert all(
        TEXT[token.offset :].startswith(TOKENIZER.token_text(token.token_id))
        for token in whole.scored
        if token.token_id != END
    )


async def test_cached_tokens_are_those_of_the_first_delta_of_each_prompts_first_choice() -> None:
    deltas = (
        TokenDelta(0, IDS[:1], num_cached_tokens=5),
        TokenDelta(0, IDS[1:], "stop", num_cached_tokens=7),
    )
    run = job(playing(*deltas), 3)
    await result(run)
    assert run.num_cached_tokens == 5


@pytest.mark.parametrize(
    ("last", "error"),
    [
        (Overloaded("full"), Overloaded),
        (None, EngineFailed),
    ],
)
@pytest.mark.parametrize("num_choices", [1, 2])
async def test_text_before_a_failure_is_delivered_then_the_failure(
    last: TokenDelta | Exception | None, error: type[Exception], num_choices: int
) -> None:
    deltas = [TokenDelta(0, IDS[:2]), *([] if last is None else [last])]
    text = ""
    with pytest.raises(error):
        async for batch in job(playing(*deltas), num_choices).batches():
            text += "".join(piece.text for piece in batch)
    assert text.startswith("the quick")
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_a_refused_choice_refuses_all_before_anything_is_sent(refused: int) -> None:
    """However far the others are by then."""

    async def say(number: int) -> AsyncGenerator[TokenDelta, None]:
        if number == refused:
            await asyncio.sleep(0.02)
            raise Overloaded("full", retry_after_s=7.0)
        yield TokenDelta(0, IDS[:2])
        if number == 0:
            yield TokenDelta(0, IDS[2:], "stop")
        await for_ever()

    choices = Choices(say)
    with pytest.raises(Overloaded) as error:
        await anext(job(choices, 3).batches())
    assert error.value.retry_after_s == 7.0
    assert sorted(choices.closed) == [0, 1, 2]
    assert len(asyncio.all_tasks()) == 1


async def test_choices_that_have_all_begun_wait_for_nobody() -> None:
    release = asyncio.get_running_loop().create_future()

    async def say(number: int) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(0, IDS[:1])
        if number == 1:
            await release
        yield TokenDelta(0, IDS[1:], "stop")

    texts = ["", ""]
    async for batch in job(Choices(say), 2).batches():
        for piece in batch:
            texts[piece.index] += piece.text
            if piece.index == 0 and piece.finish_reason is not None:
                release.set_result(None)
    assert texts == [TEXT, TEXT]


async def test_one_failed_choice_ends_the_others() -> None:
    """Also if the client reads more slowly than pieces of theirs come."""

    async def say(number: int) -> AsyncGenerator[TokenDelta, None]:
        yield TokenDelta(0, IDS[:1])
        if number == 1:
            raise EngineFailed("planted")
        for _ in range(1000):
            await asyncio.sleep(0)
            yield TokenDelta(0, IDS[1:2])
        await for_ever()

    choices, num_batches = Choices(say), 0
    with pytest.raises(EngineFailed, match="planted"):
        async for _ in job(choices, 3).batches():
            num_batches += 1
            for _ in range(10):
                await asyncio.sleep(0)
    assert num_batches == 1, "a failure waits for no pieces of others"
    assert sorted(choices.closed) == [0, 1, 2]


async def test_closing_waits_until_the_source_is_closed() -> None:
    steps: list[str] = []

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        try:
            yield TokenDelta(0, IDS[:1])
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0.01)
            steps.append("source closed")

    batches = job(push(generate)).batches()
    await anext(batches)
    await batches.aclose()
    steps.append("closed")
    assert steps == ["source closed", "closed"]


async def test_a_source_that_ends_is_not_cancelled() -> None:
    """It learns from the end how long answers are."""
    ended = []

    async def generate(request: GenerateRequest, put: PutDelta) -> None:
        put(TokenDelta(0, IDS, "stop"))
        ended.append(True)

    await result(job(generate))
    assert ended == [True]


async def test_a_stop_string_closes_the_source() -> None:
    choices = Choices(lambda number: one_by_one())
    whole = await result(job(choices, stops=["quick"]))
    assert (whole[0].text, whole[0].finish_reason) == ("the ", "stop")
    assert choices.closed == [0]


@pytest.mark.parametrize("stops", [(), ("brown",), ("x j", "fox"), ("the",), ("umps",)])
async def test_pieces_may_be_written_where_their_tokens_arrive(stops: tuple[str, ...]) -> None:
    """Except the last one, and only while the reader waits. The answer is the same."""

    async def generate(request: GenerateRequest) -> AsyncGenerator[TokenDelta, None]:
        for number, token_id in enumerate(IDS):
            yield TokenDelta(0, (token_id,))
            if number % 3:
                await asyncio.sleep(0.001)
        yield TokenDelta(0, (), "length")

    run = job(push(generate), stops=stops)
    whole, is_busy = ChoiceDelta(0), False
    num_asked = num_written = 0

    def write_now(piece: ChoiceDelta) -> bool:
        nonlocal num_asked, num_written
        assert piece.finish_reason is None and not is_busy
        num_asked += 1
        if num_asked % 3 == 0:
            return False
        num_written += 1
        whole.extend(piece)
        return True

    async for (piece,) in run.batches():
        is_busy = True
        await asyncio.sleep(0)
        whole.extend(piece)
        run.write_now = write_now
        is_busy = False
    (usual,) = await result(job(Choices(lambda number: one_by_one()), stops=stops))
    assert (whole.text, whole.finish_reason) == (usual.text, usual.finish_reason)
    assert whole.num_tokens == usual.num_tokens == run.num_completion_tokens
    assert num_written or stops


async def one_by_one() -> AsyncGenerator[TokenDelta, None]:
    for token_id in IDS:
        yield TokenDelta(0, (token_id,))
        await asyncio.sleep(0)
    yield TokenDelta(0, (), "length")
