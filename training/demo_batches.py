"""Rows of token ids with a loss mask, built from generated conversations."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from training import demo_tasks as tasks
from training import demo_tools as tools
from training.demo_functions import draw_functions
from training.demo_tasks import Mixture, Turn
from training.demo_tokenizer import PAD_ID
from training.demo_tools import Piece

IGNORE = -100

# Kinds of facts in one document.  One-word values are learned later than numbers, so they come more
# often alone.
KIND_CHOICES = (
    ("word",),
    ("word",),
    ("colour",),
    ("colour",),
    ("code",),
    ("age",),
    ("word", "colour"),
    ("code", "word"),
    tuple(tasks.FACT_KINDS),
    tuple(tasks.FACT_KINDS),
)


class RowBuilder:
    """Fills one row of `length` tokens with the turns of one conversation.

    A row starts with a fresh conversation, as at inference; rows are never glued together, because
    a fact of one conversation must not answer a question of the next.
    """

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        self.ids: list[int] = []
        self.labels: list[int] = []

    def add_text(self, text: str) -> bool:
        """Append text without a loss; False, and nothing appended, where it does not fit."""
        return self.add(text, "")

    def add_turn(self, turn: Turn) -> bool:
        """Append one turn with a loss on its answer; False where it does not fit."""
        return self.add(*tasks.render(turn))

    def add_exchange(self, pieces: Sequence[Piece]) -> bool:
        """Append all pieces with a loss on their answers; False, and none, if they do not fit."""
        num_before = len(self.ids)
        for piece in pieces:
            if not self.add(piece.asked, piece.answer):
                del self.ids[num_before:], self.labels[num_before:]
                return False
        return True

    def add(self, asked: str, answer: str) -> bool:
        """Append what is read, and what is to be written then; False where they do not fit."""
        asked_ids = self._tokenizer.encode(asked).ids
        answer_ids = self._tokenizer.encode(answer).ids
        closing = self._tokenizer.encode("\n").ids if answer else []
        new_ids = asked_ids + answer_ids + closing
        if len(self.ids) + len(new_ids) > self._length + 1:
            return False
        self.ids += new_ids
        self.labels += [IGNORE] * len(asked_ids) + answer_ids + [IGNORE] * len(closing)
        return True

    def num_tokens_of(self, text: str) -> int:
        """Return how many tokens `text` has."""
        return len(self._tokenizer.encode(text).ids)

    def padded(self) -> tuple[list[int], list[int]]:
        """Return (inputs, next-token labels), both of `length`."""
        missing = self._length + 1 - len(self.ids)
        ids = self.ids + [PAD_ID] * missing
        labels = self.labels + [IGNORE] * missing
        return ids[:-1], labels[1:]


def fill_mixed(rng: random.Random, row: RowBuilder, mixture: Mixture) -> None:
    """Fill a row with unrelated tasks."""
    while row.add_turn(tasks.mixed_turn(rng, mixture)):
        pass


def fill_recall(rng: random.Random, row: RowBuilder, length: int, mixture: Mixture) -> None:
    """Open with a document of facts that takes 30 to 65 % of the row, then ask about them.

    One row in ten starts with other turns, and one turn in ten is another task, so that facts are
    found wherever they stand.
    """
    share = rng.uniform(0.3, 0.65)
    budget = int(length * share) // 11
    num_facts = max(2, int(budget * rng.uniform(0.2, 0.9)))
    facts = tasks.draw_facts(rng, num_facts, rng.choice(KIND_CHOICES))
    text = tasks.document(rng, facts, max(0, budget - len(facts)))
    if rng.random() < 0.1:
        row.add_turn(tasks.mixed_turn(rng, mixture))
    first = tasks.recall_turn(rng, facts)
    opening = f"{text} {first.question}" if rng.random() < 0.8 else f"{text}\n{first.question}"
    row.add_turn(Turn(opening, first.answer, first.task))
    while True:
        other = rng.random() < 0.1
        turn = tasks.mixed_turn(rng, mixture) if other else tasks.recall_turn(rng, facts)
        if not row.add_turn(turn):
            return


def fill_tools(rng: random.Random, row: RowBuilder, length: int, mixture: Mixture) -> None:
    """Offer functions, as many as leave half of the row, and fill it with exchanges."""
    while True:
        functions = draw_functions(rng, rng.randint(1, 4))
        opening = tools.opening(rng, functions)
        if row.num_tokens_of(opening) <= length // 2:
            break
    row.add_text(opening)
    while row.add_exchange(tools.exchange(rng, functions, mixture)):
        pass


def make_row(
    rng: random.Random,
    tokenizer: Tokenizer,
    length: int,
    recall_share: float,
    mixture: Mixture,
    tool_share: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Return one row's (inputs, labels)."""
    row = RowBuilder(tokenizer, length)
    if tool_share and rng.random() < tool_share:
        fill_tools(rng, row, length, mixture)
        return row.padded()
    if rng.random() < 0.15:
        row.add_text(tasks.render_system(rng.choice(tasks.SYSTEM_TEXTS)))
    if rng.random() < recall_share:
        fill_recall(rng, row, length, mixture)
    else:
        fill_mixed(rng, row, mixture)
    return row.padded()


def make_batch(
    tokenizer: Tokenizer,
    seed: str,
    length: int,
    num_rows: int,
    recall_share: float,
    mixture: Mixture = tasks.MAIN_TASKS,
    tool_share: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (inputs, labels), each [num_rows, length] int64, as a function of `seed` alone."""
    rng = random.Random(seed)
    rows = [
        make_row(rng, tokenizer, length, recall_share, mixture, tool_share) for _ in range(num_rows)
    ]
    return torch.tensor([row[0] for row in rows]), torch.tensor([row[1] for row in rows])
