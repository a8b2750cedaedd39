"""Greedy accuracy of a demo model on held-out conversations, a row for each task and difficulty.

An answer counts only if it is right to the last token, the end of the turn included.  One forward
pass tells: greedy decoding writes the right answer exactly where every token of the right answer is
the most likely one after the right tokens before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tokenizers import Tokenizer

from training import demo_tasks as tasks
from training import demo_tools as tools
from training.demo_batches import IGNORE, RowBuilder
from training.demo_model import Decoder
from training.demo_tasks import Turn
from training.demo_tokenizer import MAX_LENGTH, PAD_ID
from training.demo_tools import Piece

NUM_FACTS = 12
BATCH_TOKENS = 16384


@dataclass(frozen=True)
class Level:
    """One row of the table: a task at one difficulty."""

    name: str
    make: Callable[[random.Random, Tokenizer], Turn]


def recall_at(distance: int) -> Level:
    """Ask for one of twelve facts that stand at least `distance` tokens before the question."""

    def make(rng: random.Random, tokenizer: Tokenizer) -> Turn:
        facts = tasks.draw_facts(rng, NUM_FACTS, tuple(tasks.FACT_KINDS))
        fact = rng.choice(facts)
        text = " ".join(other.sentence() for other in facts)
        filler = ""
        while len(tokenizer.encode(filler).ids) < distance:
            filler += " " + " ".join(tasks.filler_sentence(rng) for _ in range(4))
        question = rng.choice(fact.kind.questions).format(fact.subject)
        return Turn(f"Remember this. {text}{filler} {question}", fact.sentence(), "recall")

    return Level(f"recall-{distance}", make)


def named(name: str, make: Callable[..., Turn], *difficulty: object) -> Level:
    """Return the level of those turns of `make(rng, *difficulty)` that are called `name`."""

    def until_named(rng: random.Random, _: Tokenizer) -> Turn:
        while (turn := make(rng, *difficulty)).task != name:
            pass
        return turn

    return Level(name, until_named)


def all_levels() -> list[Level]:
    """Return the table's rows in order."""
    levels = [recall_at(distance) for distance in (100, 500, 1000, 1500)]
    levels += [named(f"copy-{size}", tasks.copy_turn, size) for size in (4, 8, 16)]
    for family in ("numbers", "words"):
        levels += [named(f"sort-{family}-{n}", tasks.sort_turn, n) for n in (3, 6, 10)]
    levels += [named(f"reverse-{size}", tasks.reverse_turn, size) for size in (4, 8, 12)]
    for operator, name, largest in (("+", "add", 5), ("-", "subtract", 4), ("*", "multiply", 3)):
        levels += [
            named(f"{name}-{digits}", tasks.arithmetic_turn, operator, digits)
            for digits in range(1, largest + 1)
        ]
    levels.append(named("knowledge", tasks.knowledge_turn))
    levels.append(named("chat", tasks.chat_turn))
    return levels


def _makers(tokenizer: Tokenizer) -> dict[str, Callable[[random.Random], Piece]]:
    """Return what draws a conversation of each row; those with calls if it has their marks."""

    def of_level(level: Level, rng: random.Random) -> Piece:
        return Piece(*tasks.render(level.make(rng, tokenizer)))

    makers: dict[str, Callable[[random.Random], Piece]]
    makers = {level.name: partial(of_level, level) for level in all_levels()}
    if tools.CALL_BEGIN in tokenizer.get_vocab():
        makers |= {name: partial(tools.held_out_conversation, name) for name in tools.LEVELS}
    return makers


def encode_turn(turn: Turn, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return a conversation of one turn as (inputs, next-token labels)."""
    return _encode(Piece(*tasks.render(turn)), tokenizer)


def _encode(piece: Piece, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    row = RowBuilder(tokenizer, MAX_LENGTH)
    if not row.add(piece.asked, piece.answer):
        raise ValueError(f"a conversation is longer than {MAX_LENGTH} tokens")
    return row.ids[:-1], row.labels[1:]


@torch.no_grad()
def _num_right(model: Decoder, rows: list[tuple[list[int], list[int]]]) -> int:
    """Return how many rows' answers the model writes greedily."""
    device = model.embed_tokens.weight.device
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [PAD_ID] * (longest - len(ids)) for ids, _ in rows], device=device)
    labels = torch.tensor([some + [IGNORE] * (longest - len(some)) for _, some in rows])
    answers = (labels != IGNORE).to(device)
    wrong = torch.zeros_like(answers)
    predicted = model.logits(model(ids)[answers]).argmax(-1)
    wrong[answers] = predicted != labels.to(device)[answers]
    return int((~wrong.any(-1)).sum())


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    num_samples: int,
    seed: int,
    names: Sequence[str] = (),
) -> dict[str, float]:
    """Return the accuracy of every level, or of those named, over `num_samples` conversations."""
    accuracies = {}
    for name, make in _makers(tokenizer).items():
        if names and name not in names:
            continue
        rng = random.Random(f"held out {seed} {name}")
        rows = [_encode(make(rng), tokenizer) for _ in range(num_samples)]
        num_rows = max(1, BATCH_TOKENS // max(len(ids) for ids, _ in rows))
        chunks = [rows[start : start + num_rows] for start in range(0, num_samples, num_rows)]
        num_right = sum(_num_right(model, chunk) for chunk in chunks)
        accuracies[name] = num_right / num_samples
    return accuracies
