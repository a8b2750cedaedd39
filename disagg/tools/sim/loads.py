"""Made-up loads by name, for `disagg sim --load NAME`: kinds of traffic on which nothing was tuned.

Each is a function of rate, number of requests and random generator, and says its statistics and
where these are from. Lengths are lognormal by median and mean unless said otherwise, arrivals a
Poisson process. Requests of a session come at their own pace: a turn comes when the answer before
it is written, and after a pause. As many sessions are under way at the beginning as later, with
short histories.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from disagg.errors import RequestError
from disagg.tools.sim.trace import TRACE_BLOCK_TOKENS, TraceRequest

Load: TypeAlias = Callable[[float, int, random.Random], list[TraceRequest]]

ANSWER_TOKEN_S = 0.02  # until a client has read a token of an answer, before it goes on


class Length(NamedTuple):
    """A lognormal length in tokens, by median and mean, within bounds."""

    median: float
    mean: float
    least: int = 8
    most: int = 1 << 15

    def draw(self, rng: random.Random) -> int:
        sigma = math.sqrt(2.0 * math.log(self.mean / self.median))
        number = round(self.median * math.exp(rng.gauss(0.0, sigma)))
        return min(max(self.least, number), self.most)


# Azure's conversations of 2023 (Patel et al., "Splitwise", 2024): prompts of 1,020 tokens in the
# median and 1,155 in the mean, answers of 129 and 211.
CHAT_PROMPT, CHAT_ANSWER = Length(1020, 1155, most=14_000), Length(129, 211, most=1_000)


class Names:
    """Names of prompt blocks: those of shared texts, and fresh ones."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._shared: dict[tuple[str, int], list[int]] = {}

    def fresh(self, num: int) -> list[int]:
        return list(itertools.islice(self._numbers, num))

    def shared(self, what: str, number: int, num_tokens: int) -> list[int]:
        """The full blocks of a text that several prompts begin with."""
        key = what, number
        if key not in self._shared:
            self._shared[key] = self.fresh(num_tokens // TRACE_BLOCK_TOKENS)
        return self._shared[key]

    def fill(self, begin: list[int], num_tokens: int) -> list[int]:
        """The names of a prompt of `num_tokens` that begins with these blocks."""
        return begin + self.fresh(-(-num_tokens // TRACE_BLOCK_TOKENS) - len(begin))


def make_load(name: str, requests_per_s: float, num_requests: int, seed: int) -> list[TraceRequest]:
    """The first requests of a load, in order of arrival. Raises `RequestError`."""
    if name not in LOADS:
        known = ", ".join(LOADS)
        raise RequestError(f"There is no load {name!r}; choose one of {known}.", param="load")
    rng = random.Random(f"{name}/{seed}")
    requests = LOADS[name](requests_per_s, num_requests, rng)
    return sorted(requests, key=lambda each: each.arrival_s)[:num_requests]


def conversations(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """Equal turns: four of 1,024 tokens after one of 16 system prompts of 2,048; answers of 128;
    pauses of 10 s in the mean."""
    names, num_turns, turn_tokens, system_tokens, pause_s = Names(), 4, 1024, 2048, 10.0
    requests: list[TraceRequest] = []
    begins = _poisson(requests_per_s / num_turns, rng)
    for begin_s in itertools.islice(begins, -(-num // num_turns)):
        history = names.shared("system", rng.randrange(16), system_tokens)
        for turn in range(num_turns):
            num_tokens = system_tokens + (turn + 1) * turn_tokens
            history = names.fill(history, num_tokens)
            requests.append(TraceRequest(begin_s, num_tokens, 128, tuple(history)))
            begin_s += rng.expovariate(1.0 / pause_s)
    return requests


def agents(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """Agents in a loop: eight turns in the mean after one of four prompts of 3,072 tokens with
    tools; a tool's output has 300 tokens in the median and 600 in the mean, a call 80 and 120, and
    the tool takes 2 s and 4 s. As long as in Mooncake's tool-and-agent trace (Qin et al., 2025:
    8,596 tokens, answers of 182, 59 % shared), with more shared, as turns follow each other."""
    system = 3072, Length(300, 600, most=8_000), Length(80, 120, most=1_000)
    return _sessions(requests_per_s, num, rng, 8, 4, *system, (2.0, 4.0))


def chat(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """People who think before they answer: for 12 s in the median and 20 s in the mean. Five turns
    after one of eight system prompts of 512 tokens; messages of 60 tokens in the median and 160 in
    the mean, answers of 200 and 300. ShareGPT has 161 and 338 (Kwon et al., 2023)."""
    system = 512, Length(60, 160, most=4_000), Length(200, 300, most=2_000)
    return _sessions(requests_per_s, num, rng, 5, 8, *system, (12.0, 20.0))


def retrieval(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """Questions about popular documents: 32 to 256 tokens about one of 300 documents, which have
    6,000 tokens in the median and 8,000 in the mean and Zipf's popularity with exponent 1; answers
    of 120 and 180. As LooGLE in Preble (Srivatsa et al., 2025), with most shared."""
    names, document = Names(), Length(6_000, 8_000, 1_000, 30_000)
    lengths = [document.draw(rng) for _ in range(300)]
    weights = [1.0 / (rank + 1) for rank in range(300)]
    chosen = rng.choices(range(300), weights, k=num)

    def ask(arrival_s: float, number: int) -> TraceRequest:
        begin = names.shared("document", number, lengths[number])
        num_tokens = lengths[number] + rng.randint(32, 256)
        answer = Length(120, 180, most=1_000).draw(rng)
        return TraceRequest(arrival_s, num_tokens, answer, tuple(names.fill(begin, num_tokens)))

    return list(map(ask, _poisson(requests_per_s, rng), chosen))


def completions(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """An editor's completions: prompts of 1,500 tokens in the median and 2,048 in the mean, up to
    8,000; answers of 8 to 48. As Azure's code trace of 2023 (Patel et al., 2024: 2,048 and 28)."""
    prompt = Length(1_500, 2_048, 64, 8_000)
    return [
        TraceRequest(arrival_s, prompt.draw(rng), rng.randint(8, 48))
        for arrival_s in itertools.islice(_poisson(requests_per_s, rng), num)
    ]


def batch(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A batch beside interactive requests: these as Azure's conversations; every seventh is of a
    batch that sums up texts of 10,000 to 20,000 tokens in 200."""

    def ask(arrival_s: float) -> TraceRequest:
        if rng.random() < 1.0 / 7.0:
            return TraceRequest(arrival_s, rng.randint(10_000, 20_000), 200, (), "batch")
        return _ask_once(arrival_s, rng, "interactive")

    return list(map(ask, itertools.islice(_poisson(requests_per_s, rng), num)))


def unequal(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """Very unequal lengths: prompts from 128 to 32,000 tokens and answers from 16 to 2,000, both
    Pareto with exponent 1, so that half of the work is in a few requests."""

    def pareto(least: int, most: int) -> int:
        return min(most, int(least / (1.0 - rng.random())))

    return [
        TraceRequest(arrival_s, pareto(128, 32_000), pareto(16, 2_000))
        for arrival_s in itertools.islice(_poisson(requests_per_s, rng), num)
    ]


def mooncake_synthetic(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """Long documents among short conversations: 14,000 tokens in the mean and 150 of answer, two
    thirds shared, as a document is asked about four times in the mean. Mooncake's synthetic trace
    (Qin et al., 2025: 15,325, 149, 66 %) mixes ShareGPT, L-Eval and LooGLE in this way."""
    names, document, answer = Names(), Length(17_000, 21_000, 4_000, 60_000), Length(110, 150)
    open_documents: list[tuple[int, int]] = []  # number and length
    numbers = itertools.count()

    def ask(arrival_s: float) -> TraceRequest:
        if rng.random() < 0.3:
            return TraceRequest(arrival_s, CHAT_PROMPT.draw(rng), answer.draw(rng))
        if len(open_documents) < 20 or rng.random() < 0.25:
            open_documents.append((next(numbers), document.draw(rng)))
            open_documents[:-20] = []
        number, length = rng.choice(open_documents)
        num_tokens = length + rng.randint(32, 512)
        prompt = names.fill(names.shared("document", number, length), num_tokens)
        return TraceRequest(arrival_s, num_tokens, answer.draw(rng), tuple(prompt))

    return list(map(ask, itertools.islice(_poisson(requests_per_s, rng), num)))


def reasoning(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A model that thinks: prompts of 150 tokens in the median and 250 in the mean, answers of
    8,000 to 32,000, as many in each octave. DeepSeek-R1-0528's card tells of 23,000 tokens a
    question of AIME, and of 12,000 before."""
    prompt = Length(150, 250, most=4_000)
    return [
        TraceRequest(arrival_s, prompt.draw(rng), round(8_000 * 4.0 ** rng.random()))
        for arrival_s in itertools.islice(_poisson(requests_per_s, rng), num)
    ]


def flood(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A tenant that floods: it sends half of all requests within the middle fifth of the time, with
    prompts twice as long as those of the four tenants that send the other half steadily. These are
    as Azure's conversations."""
    total_s = num / requests_per_s
    requests = [
        _ask_once(arrival_s, rng, f"tenant-{rng.randrange(4)}")
        for arrival_s in _poisson(0.5 * requests_per_s, rng, total_s)
    ]
    for arrival_s in _poisson(2.5 * requests_per_s, rng, 0.2 * total_s):
        one = _ask_once(0.4 * total_s + arrival_s, rng, "flood")
        requests.append(
            TraceRequest(
                one.arrival_s, 2 * one.num_prompt_tokens, one.num_output_tokens, (), "flood"
            )
        )
    return requests


def herd(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A herd each hour: a third of all requests come within two seconds at three moments; an hour
    is a third of the time. All are as Azure's conversations."""
    total_s = num / requests_per_s

    def when() -> float:
        if rng.random() < 2.0 / 3.0:
            return rng.uniform(0.0, total_s)
        return rng.randrange(3) * total_s / 3.0 + rng.uniform(0.0, 2.0)

    return [_ask_once(when(), rng) for _ in range(num)]


def shift(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A mixture that shifts at noon: completions in the first half; in the second one, prompts of
    200 tokens in the median and 300 in the mean, with answers of 500 and 700."""
    prompt, answer = Length(200, 300, most=4_000), Length(500, 700, most=4_000)
    morning = completions(requests_per_s, num // 2, rng)
    noon_s = morning[-1].arrival_s
    return morning + [
        TraceRequest(noon_s + arrival_s, prompt.draw(rng), answer.draw(rng))
        for arrival_s in itertools.islice(_poisson(requests_per_s, rng), num - len(morning))
    ]


def two_peaks(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A day with two peaks: the rate goes from 0.3 to 1.7 of its mean and back, twice. All are as
    Azure's conversations."""
    total_s = num / requests_per_s

    def share(place: float) -> float:
        return 1.0 - 0.7 * math.cos(4.0 * math.pi * place)

    return [_ask_once(total_s * place, rng) for place in _places(share, num, rng)]


def cliff(requests_per_s: float, num: int, rng: random.Random) -> list[TraceRequest]:
    """A cliff: in the middle, the rate jumps from half of its mean to one and a half times it. All
    are as Azure's conversations."""
    total_s = num / requests_per_s
    places = _places(lambda place: 0.5 if place < 0.5 else 1.5, num, rng)
    return [_ask_once(total_s * place, rng) for place in places]


def _ask_once(arrival_s: float, rng: random.Random, tenant: str = "") -> TraceRequest:
    return TraceRequest(arrival_s, CHAT_PROMPT.draw(rng), CHAT_ANSWER.draw(rng), (), tenant)


def _poisson(per_s: float, rng: random.Random, until_s: float = math.inf) -> Iterator[float]:
    """Moments of a Poisson process."""
    now = rng.expovariate(per_s)
    while now < until_s:
        yield now
        now += rng.expovariate(per_s)


def _places(share: Callable[[float], float], num: int, rng: random.Random) -> Iterator[float]:
    """Random places between 0 and 1, with a density of `share`, which is at most 2."""
    for _ in range(num):
        place = rng.random()
        while 2.0 * rng.random() > share(place):
            place = rng.random()
        yield place


def _sessions(
    requests_per_s: float,
    num: int,
    rng: random.Random,
    num_turns: float,
    num_systems: int,
    system_tokens: int,
    message: Length,
    answer: Length,
    pause: tuple[float, float],
) -> list[TraceRequest]:
    """Sessions of `num_turns` turns in the mean, which are geometric, so that those under way at
    the beginning have as many to come as new ones.

    Args:
        pause: median and mean of the seconds between answer and next message.
    """
    names = Names()
    gap_s = pause[1] + ANSWER_TOKEN_S * answer.mean
    total_s = num / requests_per_s
    begins = [rng.uniform(0.0, gap_s) for _ in range(round(requests_per_s * gap_s))]
    begins += _poisson(requests_per_s / num_turns, rng, total_s)
    requests: list[TraceRequest] = []
    for now in begins:
        history = names.shared("system", rng.randrange(num_systems), system_tokens)
        num_tokens = system_tokens
        while now < total_s:
            num_tokens += message.draw(rng)
            history, num_output = names.fill(history, num_tokens), answer.draw(rng)
            requests.append(TraceRequest(now, num_tokens, num_output, tuple(history)))
            if rng.random() < 1.0 / num_turns:
                break
            num_tokens += num_output
            sigma = math.sqrt(2.0 * math.log(pause[1] / pause[0]))
            now += ANSWER_TOKEN_S * num_output + pause[0] * math.exp(rng.gauss(0.0, sigma))
    return requests


LOADS: dict[str, Load] = {
    load.__name__.replace("_", "-"): load
    for load in (
        *(conversations, agents, chat, retrieval, completions, batch, unequal, mooncake_synthetic),
        *(reasoning, flood, herd, shift, two_peaks, cliff),
    )
}
USUAL_LOAD = "conversations"
