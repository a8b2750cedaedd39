"""Whether tokens are drawn from the distribution of transformers' logits warpers.

The cases are a grid of top-k, top-p, min-p, temperature and penalties, at the edge of how far rows
are first sorted on a CPU (1,024 columns). Draws are compared by chi-square with
`RepetitionPenaltyLogitsProcessor`, `TemperatureLogitsWarper`, `MinPLogitsWarper`,
`TopKLogitsWarper` and `TopPLogitsWarper`, in this order. Presence and frequency penalties, which
transformers lacks, are compared with OpenAI's formula. Tokens that are not kept must never be
drawn. The seeds are fixed.

The rows of a case differ only in their seeds, so the smallest logit that is kept is the same in
all. The first rows find it themselves, as in a step. The other rows share one, because sorting
would take most of an hour.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor

from disagg.engine.device.sampler import Sampler
from disagg.engine.device.slots import Slots
from disagg.kernels.sampling_rows import SampledRows, SamplingOps
from disagg.kernels.torch import sampling as torch_sampling
from disagg.kernels.torch.sampling import TorchSampling
from disagg.messages import SamplingParams
from tests.generate_requests import new_sequence

PROMPT, OUTPUT = (1, 2, 3, 3, 40), (3, 7, 7, 7, 9, 40, 800)
NUM_AT_ONCE = 250  # of large vocabularies more would leave the processor's caches
NUM_AS_IN_A_STEP = 250
LEAST_WANTED = 5.0
PLAIN_TORCH = TorchSampling()
STANDARD_DEVIATIONS = 5.0  # of chi-square, above its mean


@dataclass(frozen=True)
class Case:
    vocab_size: int
    spread: float  # of the logits: standard deviation
    params: dict[str, Any]


def grid() -> Iterator[Case]:
    small = 4_099
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
    yield Case(838, 1.5, {})  # in groups, the last of which has 70 tokens
    for top_k in (20, 1025):
        for top_p in (1.0, 0.95, 0.7):
            yield Case(small, 1.5, {"top_k": top_k, "top_p": top_p})
    yield Case(small, 1.5, {"temperature": 1.7, "top_p": 0.9, **penalties})
    yield Case(small, 3.0, {"temperature": 1.7, "top_k": 50, "min_p": 0.02})


def logits_of(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(case.vocab_size)
    return torch.randn(case.vocab_size, generator=generator) * case.spread


def expected(case: Case) -> Tensor:
    """float64 [vocab_size], the probabilities by transformers' warpers."""
    params = SamplingParams(max_tokens=1, **case.params)
    scores = logits_of(case).unsqueeze(0)
    ids = torch.tensor([[*PROMPT, *OUTPUT]])
    warpers: list[Any] = []
    if params.repetition_penalty != 1.0:
        warpers.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    for warper in warpers:
        scores = warper(ids, scores)
    for token_id, count in Counter(OUTPUT).items():
        scores[0, token_id] -= params.presence_penalty + params.frequency_penalty * count
    warpers = []
    if params.temperature != 1.0:
        warpers.append(transformers.TemperatureLogitsWarper(params.temperature))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    for warper in warpers:
        scores = warper(ids, scores)
    return torch.softmax(scores[0].double(), dim=-1)


def drawn(case: Case, num_draws: int, ops: SamplingOps = PLAIN_TORCH) -> Tensor:
    """int64 [vocab_size], how often each token is drawn with seeds 0, 1, ..."""
    counts = _draw(case, range(min(num_draws, NUM_AS_IN_A_STEP)), ops)
    with mock.patch.object(torch_sampling, "floors", _shared(torch_sampling.floors)):
        for first in range(NUM_AS_IN_A_STEP, num_draws, NUM_AT_ONCE):
            counts += _draw(case, range(first, min(first + NUM_AT_ONCE, num_draws)), ops)
    return counts


def _shared(floors: Any) -> Any:
    """`torch_sampling.floors` for rows that are alike: the first one's for all."""

    def of_all(scaled: Tensor, numbers: Tensor, rows: SampledRows) -> Tensor:
        found: Tensor = floors(scaled[:1], numbers[:1], replace(rows, narrowed=rows.narrowed[:1]))
        return found.expand(len(scaled), 1)

    return of_all


def _draw(case: Case, seeds: range, ops: SamplingOps) -> Tensor:
    """As `drawn`, of some seeds, in one step."""
    sequences = [
        new_sequence(PROMPT, OUTPUT, max_tokens=100, seed=seed, **case.params) for seed in seeds
    ]
    slots = Slots(len(seeds))
    sampler = Sampler(slots, case.vocab_size, torch.device("cpu"), ops)
    sampler.enter([sequence.slot for sequence in slots.enter(sequences)])
    logits = logits_of(case).expand(len(seeds), -1).clone()
    positions = torch.full((len(seeds),), len(PROMPT + OUTPUT) - 1)
    tokens = sampler.sample(logits, sequences, positions).token_ids
    return torch.bincount(tokens, minlength=case.vocab_size)


def _groups(wanted: Tensor) -> Tensor:
    """int64 [vocab_size], a number for each token: neighbours share one until `LEAST_WANTED` draws
    of them are expected, as chi-square needs."""
    groups = (wanted.cumsum(0) / LEAST_WANTED).floor().long()
    is_few = torch.bincount(groups, wanted) < LEAST_WANTED
    # Those go with the group before.
    return (~is_few).cumsum(0).sub(1).clamp(min=0)[groups]


def check(case: Case, num_draws: int) -> None:
    """Raises `AssertionError` where a right sampler would be once in millions of cases."""
    probabilities, counts = expected(case), drawn(case, num_draws)
    assert not counts[probabilities == 0].any(), "a token was drawn that is not kept"
    groups = _groups(probabilities * num_draws)
    wanted = torch.bincount(groups, probabilities * num_draws)
    found = torch.bincount(groups, counts.double(), minlength=len(wanted))
    chi_square = float(((found - wanted) ** 2 / wanted).sum())
    degrees = len(wanted) - 1
    limit = degrees + STANDARD_DEVIATIONS * math.sqrt(2 * degrees) if degrees else 1e-6
    assert chi_square <= limit, f"chi-square {chi_square:.1f} of {degrees} degrees"
