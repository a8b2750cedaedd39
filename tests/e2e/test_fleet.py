"""Two prefill workers, two decode workers and two ingresses: prompts go where their prefixes are.

The model is the fake one of `tests/faults`, so that every answer shows whether its KV was right.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from tests.engine.fake_runner import VOCAB_SIZE
from tests.faults.fake_model import BLOCK_SIZE, expected_text, to_text
from tests.faults.system import Pool, System, running_system, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

# Tokens take their time, so that a prefix is worth finding.
FLEET = Pool("fleet", num_prefill=2, num_decode=2, token_s=0.0003)
NUM_PREFIXES, PREFIX_TOKENS, REST_TOKENS, ANSWER_TOKENS = 6, 40 * BLOCK_SIZE, 40, 12
NUM_ASKED, NUM_AT_ONCE = 60, 6
NUM_AFTERWARDS = 20
CONVERGED_S = 30.0  # it takes less than one; a busy machine may need more

Tokens = tuple[int, ...]


class Asker:
    """Asks with one of a few prefixes, and checks every answer."""

    def __init__(self, url: str, client: httpx.AsyncClient) -> None:
        self._url = url
        self.client = client
        self._rng = random.Random(1)
        self.prefixes = [self.tokens(PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
        self.num_answers = 0
        self.num_refused = 0

    def tokens(self, num_tokens: int) -> Tokens:
        return tuple(self._rng.randrange(VOCAB_SIZE) for _ in range(num_tokens))

    async def ask(self, prefix: Tokens, url: str = "") -> tuple[str, int]:
        """The request's id, and how many of its tokens were cached. Raises `httpx.HTTPError`."""
        prompt = (*prefix, *self.tokens(REST_TOKENS))
        body = {
            "model": FLEET.name,
            "messages": [{"role": "user", "content": to_text(prompt)}],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        reply = await self.client.post(f"{url or self._url}/v1/chat/completions", json=body)
        reply.raise_for_status()
        answer = reply.json()
        text = answer["choices"][0]["message"]["content"]
        assert text == expected_text(prompt, ANSWER_TOKENS, temperature=0, seed=0)
        self.num_answers += 1
        return answer["id"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        """Without a pause; who is refused asks again, and a wrong answer fails the test."""
        tasks = [asyncio.create_task(self._ask_for_ever()) for _ in range(NUM_AT_ONCE)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(each, asyncio.CancelledError) for each in ended), ended

    async def _ask_for_ever(self) -> None:
        while True:
            try:
                await self.ask(self._rng.choice(self.prefixes))
            except httpx.HTTPError:
                self.num_refused += 1
                await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
def system() -> Iterator[System]:
    with running_system(FLEET, num_ingress=2) as system:
        yield system


@pytest.fixture
async def asker(system: System) -> AsyncIterator[Asker]:
    async with httpx.AsyncClient(timeout=60) as client:
        yield Asker(system.url, client)


def num_known(system: System, url: str) -> float:
    """Blocks that an ingress believes to be cached somewhere."""
    return system.counters_of(url)["disagg_prefix_index_blocks"]


def num_cached(system: System) -> int:
    """Blocks that workers say they have, each once."""
    every = (member.ask("names")["names"] for member in system.members(FLEET.name))
    return len(set().union(*every))


async def test_prompts_go_where_their_prefix_is(system: System, asker: Asker) -> None:
    for prefix in asker.prefixes:
        _, num_tokens = await asker.ask(prefix)
        assert num_tokens == 0
    room = asyncio.Semaphore(NUM_AT_ONCE)

    async def ask(number: int) -> int:
        async with room:
            _, num_tokens = await asker.ask(asker.prefixes[number % NUM_PREFIXES])
            return num_tokens

    cached = await asyncio.gather(*(ask(number) for number in range(NUM_ASKED)))
    assert max(cached) == PREFIX_TOKENS
    hits = sum(cached) / (NUM_ASKED * PREFIX_TOKENS)
    print(f"{hits:.1%} of the tokens that could be were cached")
    assert hits > 0.9


async def test_an_ingress_that_is_killed_under_load_soon_knows_again(
    system: System, asker: Asker
) -> None:
    async with asker.asking():
        before = system.ingress_urls()
        victim, (survivor,) = next(iter(before)), list(before.values())[1:]
        await asyncio.to_thread(until, lambda: asker.num_answers > NUM_AT_ONCE, 60.0)
        victim.kill()

        def replacements() -> list[str]:
            urls = system.ingress_urls()
            return [url for process, url in urls.items() if process not in before]

        await asyncio.to_thread(until, lambda: bool(replacements()), 120.0)
        (fresh,) = replacements()
        began_s = time.monotonic()

        def knows_as_much() -> bool:
            """As its sibling did a moment before: under load what there is to know grows."""
            return 0 < num_known(system, survivor) <= num_known(system, fresh)

        await asyncio.to_thread(until, knows_as_much, CONVERGED_S)
        print(f"the new ingress knew as much after {time.monotonic() - began_s:.2f} s under load")
        num_before = asker.num_answers
        enough = num_before + NUM_AFTERWARDS
        await asyncio.to_thread(until, lambda: asker.num_answers > enough, 60.0)

    def agree_with_the_workers() -> bool:
        known = {num_known(system, url) for url in (fresh, survivor)}
        return known == {num_cached(system)}

    await asyncio.to_thread(until, agree_with_the_workers, CONVERGED_S)
    request_id, num_tokens = await asker.ask(asker.prefixes[0], fresh)
    assert num_tokens == PREFIX_TOKENS
    told = (await asker.client.get(f"{fresh}/debug/requests/{request_id}")).json()
    assert [each["route"]["num_cached_tokens"] for each in told["routes"]] == [PREFIX_TOKENS]
    system.wait_whole()
