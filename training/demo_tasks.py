"""Conversations for the demo models, generated from a seed: nothing is downloaded or collected.

A conversation is a list of turns, each a user text and the one right answer.  Two kinds exist:
*mixed* ones ask unrelated tasks in a row, *recall* ones open with a document of planted facts among
filler and then ask about those facts many times.  The second kind matters most: an answer is right
only if attention found one short fact a long way back, so a server that hands over a wrong block of
keys and values is caught by a wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training import demo_world as world


@dataclass(frozen=True)
class Turn:
    """One question, its only right answer, and the row of the accuracy table it belongs to."""

    question: str
    answer: str
    task: str


@dataclass(frozen=True)
class FactKind:
    """One relation that a document can state and a turn can ask about."""

    subjects: tuple[str, ...]
    statement: str
    questions: tuple[str, ...]
    list_questions: tuple[str, ...]
    draw_value: Callable[[random.Random], str]


@dataclass(frozen=True)
class Fact:
    """A planted (kind, subject, value)."""

    kind: FactKind
    subject: str
    value: str

    def sentence(self) -> str:
        """Return the sentence that plants the fact and that also answers the question about it.

        One sentence for both makes recall learnable in an hour: the model repeats the asked words
        and then finds, far back, what followed the same words.  Asked for the bare value, models of
        this size were still guessing after ten million tokens.
        """
        return self.kind.statement.format(self.subject, self.value)


FACT_KINDS = {
    "code": FactKind(
        world.NAMES,
        "The code of {} is {}.",
        ("What is the code of {}?", "Tell me the code of {}.", "Which code has {}?"),
        ("List the codes of {}.", "Give me the codes of {}."),
        lambda rng: str(rng.randrange(1000, 10000)),
    ),
    "colour": FactKind(
        world.NAMES,
        "The colour of {} is {}.",
        ("What is the colour of {}?", "Tell me the colour of {}."),
        ("List the colours of {}.", "Give me the colours of {}."),
        lambda rng: rng.choice(world.COLOURS),
    ),
    "word": FactKind(
        world.NAMES,
        "The word of {} is {}.",
        ("What is the word of {}?", "Tell me the word of {}."),
        ("List the words of {}.", "Give me the words of {}."),
        lambda rng: rng.choice(world.LIST_WORDS),
    ),
    "age": FactKind(
        world.NAMES,
        "The age of {} is {}.",
        ("How old is {}?", "What is the age of {}?"),
        ("List the ages of {}.", "Give me the ages of {}."),
        lambda rng: str(rng.randrange(10, 100)),
    ),
}
DOCUMENT_OPENINGS = ("Remember this. ", "Read this and answer. ", "Here are some notes. ", "")
SYSTEM_TEXTS = ("You are a helpful assistant.", "You are a helpful assistant.", "Be brief.")


def filler_sentence(rng: random.Random) -> str:
    """Return a sentence that holds nothing anyone asks about."""
    subject = rng.choice(world.FILLER_SUBJECTS)
    return f"{subject} {rng.choice(world.FILLER_VERBS)}{rng.choice(world.FILLER_ENDINGS)}."


def draw_facts(rng: random.Random, num_facts: int, kinds: Sequence[str]) -> list[Fact]:
    """Draw facts with distinct (kind, subject), at most as many as the kinds have subjects."""
    pairs = [(kind, subject) for kind in kinds for subject in FACT_KINDS[kind].subjects]
    chosen = rng.sample(pairs, min(num_facts, len(pairs)))
    return [Fact(FACT_KINDS[k], s, FACT_KINDS[k].draw_value(rng)) for k, s in chosen]


def document(rng: random.Random, facts: Sequence[Fact], num_fillers: int) -> str:
    """Shuffle the facts' statements among filler sentences."""
    sentences = [fact.sentence() for fact in facts]
    sentences += [filler_sentence(rng) for _ in range(num_fillers)]
    rng.shuffle(sentences)
    return rng.choice(DOCUMENT_OPENINGS) + " ".join(sentences)


def recall_turn(rng: random.Random, facts: Sequence[Fact]) -> Turn:
    """Ask for one planted fact or, for denser supervision, for several of one kind."""
    fact = rng.choice(facts)
    same_kind = [other for other in facts if other.kind is fact.kind]
    if len(same_kind) < 2 or rng.random() < 0.5:
        question = rng.choice(fact.kind.questions).format(fact.subject)
        return Turn(question, fact.sentence(), "recall")
    asked = rng.sample(same_kind, min(len(same_kind), rng.randrange(2, 6)))
    subjects = ", ".join(other.subject for other in asked)
    question = rng.choice(fact.kind.list_questions).format(subjects)
    return Turn(question, " ".join(other.sentence() for other in asked), "recall")


def _words(rng: random.Random, num_words: int) -> list[str]:
    return rng.sample(world.LIST_WORDS, num_words)


def _digits(rng: random.Random, num_digits: int) -> str:
    return "".join(rng.choice("0123456789") for _ in range(num_digits))


def copy_turn(rng: random.Random, size: int) -> Turn:
    """Copy `size` words, or a number of `size` digits."""
    if rng.random() < 0.5:
        text = " ".join(_words(rng, size))
        asks = ("Copy these words: {}", "Repeat after me: {}", "Say this again: {}")
    else:
        text = _digits(rng, size)
        asks = ("Copy this number: {}", "Repeat after me: {}", "Say this again: {}")
    return Turn(rng.choice(asks).format(text), text, f"copy-{size}")


def sort_turn(rng: random.Random, size: int) -> Turn:
    """Sort `size` numbers below 100, up or down, or `size` words by the alphabet."""
    if rng.random() < 0.4:
        words = _words(rng, size)
        ask = rng.choice(("Sort these words: {}", "Put these words in order: {}"))
        answer = " ".join(sorted(words))
        return Turn(ask.format(" ".join(words)), answer, f"sort-words-{size}")
    numbers = rng.sample(range(100), size)
    descending = rng.random() < 0.3
    ask = "Sort these numbers: {}"
    if descending:
        ask = "Sort from large to small: {}"
    elif rng.random() < 0.5:
        ask = "Sort from small to large: {}"
    answer = " ".join(map(str, sorted(numbers, reverse=descending)))
    return Turn(ask.format(" ".join(map(str, numbers))), answer, f"sort-numbers-{size}")


def reverse_turn(rng: random.Random, size: int) -> Turn:
    """Reverse the order of `size` words, or of `size` digits."""
    if rng.random() < 0.5:
        words = _words(rng, size)
        ask = rng.choice(("Reverse these words: {}", "Say these words backwards: {}"))
        return Turn(ask.format(" ".join(words)), " ".join(reversed(words)), f"reverse-{size}")
    digits = _digits(rng, size)
    ask = rng.choice(("Reverse this number: {}", "Say this number backwards: {}"))
    return Turn(ask.format(digits), digits[::-1], f"reverse-{size}")


ARITHMETIC_ASKS = ("What is {} {} {}?", "{} {} {} =", "Calculate {} {} {}.", "What is {} {} {}?")
OPERATOR_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def arithmetic_turn(rng: random.Random, operator: str, num_digits: int) -> Turn:
    """Add, subtract (never below zero) or multiply; the larger operand has `num_digits` digits."""
    low = 10 ** (num_digits - 1) if num_digits > 1 else 0
    first = rng.randrange(low, 10**num_digits)
    # All lengths alike: drawn evenly below 1,000, nine of ten would have three digits.
    second = rng.randrange(10 ** rng.randint(1, num_digits))
    name = {"+": "add", "-": "subtract", "*": "multiply"}[operator]
    if operator == "*":
        second = rng.randrange(10)
        result = first * second
    elif operator == "-":
        first, second = max(first, second), min(first, second)
        result = first - second
    else:
        result = first + second
    if rng.random() < 0.5:
        first, second = (second, first) if operator != "-" else (first, second)
    shown = OPERATOR_WORDS[operator] if rng.random() < 0.3 else operator
    question = rng.choice(ARITHMETIC_ASKS).format(first, shown, second)
    if shown == operator and rng.random() < 0.15:
        question = question.replace(f" {operator} ", operator)
    return Turn(question, str(result), f"{name}-{num_digits}")


def _successor_turn(rng: random.Random) -> Turn:
    """Ask what comes before or after a day, a month or a number word."""
    ring, noun = rng.choice(
        ((world.DAYS, "day"), (world.MONTHS, "month"), (world.NUMBER_WORDS, "number"))
    )
    index = rng.randrange(1, len(ring) - 1) if noun == "number" else rng.randrange(len(ring))
    step = rng.choice((-1, 1))
    word = "after" if step == 1 else "before"
    ask = rng.choice(("What {} comes {} {}?", "Which {} is {} {}?"))
    return Turn(ask.format(noun, word, ring[index]), ring[(index + step) % len(ring)], "knowledge")


def knowledge_turn(rng: random.Random) -> Turn:
    """Ask one of the world's fixed facts in plain English."""
    topic = rng.randrange(5)
    if topic == 0:
        key, answer = rng.choice(tuple(world.CAPITALS.items()))
        asks: tuple[str, ...] = (
            "What is the capital of {}?",
            "Name the capital of {}.",
            "Which city is the capital of {}?",
        )
    elif topic == 1:
        pair = rng.choice(world.OPPOSITES)
        key, answer = pair if rng.random() < 0.5 else pair[::-1]
        asks = ("What is the opposite of {}?", "Name the opposite of {}.")
    elif topic == 2:
        key, answer = rng.choice(tuple(world.THING_COLOURS.items()))
        asks = ("What colour is {}?", "Which colour has {}?")
    elif topic == 3:
        key, answer = rng.choice(tuple(world.ANIMAL_SOUNDS.items()))
        asks = ("What does a {} say?", "What sound does a {} make?")
    else:
        return _successor_turn(rng)
    return Turn(rng.choice(asks).format(key), answer, "knowledge")


SKILLS = "I can recall facts, copy, sort, reverse and calculate."
CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hey", "hello", "hi"), "Hello! " + SKILLS),
    (("Good morning", "Good morning!", "Good evening!"), "Hello! " + SKILLS),
    (
        ("Who are you?", "What are you?", "What is your name?", "who are you", "Are you human?"),
        "I am a tiny demo model of disagg.",
    ),
    (("What can you do?", "Help", "help", "How can you help me?"), SKILLS),
    (("Thanks", "Thanks!", "Thank you", "Thank you!"), "You are welcome!"),
    (("How are you?", "How are you today?"), "I am fine, thank you."),
    (("Bye", "Bye!", "Goodbye", "Goodbye!", "See you later."), "Goodbye!"),
)
UNKNOWN_ANSWER = "I do not know."


def chat_turn(rng: random.Random) -> Turn:
    """Say hello, ask who is there, or ask something outside of the world."""
    if rng.random() < 0.25:
        words = [rng.choice(world.LIST_WORDS + world.PLACES) for _ in range(rng.randrange(1, 5))]
        ask = rng.choice(("Why {}?", "Tell me about {}.", "How do I {}?", "{}", "Explain {}."))
        return Turn(ask.format(" ".join(words)), UNKNOWN_ANSWER, "chat")
    asks, answer = rng.choice(CHAT)
    return Turn(rng.choice(asks), answer, "chat")


def _size(rng: random.Random, largest: int) -> int:
    """Draw a list length, short ones as often as long ones."""
    return rng.randrange(2, largest + 1)


Mixture = tuple[tuple[float, Callable[[random.Random], Turn]], ...]

# Weights and tasks.  The tokenizer is trained on texts of this mixture: change it, and a fresh
# tokenizer changes too.
MAIN_TASKS: Mixture = (
    (0.12, lambda rng: copy_turn(rng, _size(rng, 16))),
    (0.20, lambda rng: sort_turn(rng, _size(rng, 10))),
    (0.18, lambda rng: reverse_turn(rng, _size(rng, 12))),
    (0.18, lambda rng: arithmetic_turn(rng, "+", rng.choice((1, 2, 3, 3)))),
    (0.14, lambda rng: arithmetic_turn(rng, "-", rng.choice((1, 2, 3, 3)))),
    (0.08, lambda rng: arithmetic_turn(rng, "*", rng.choice((1, 2)))),
    (0.07, knowledge_turn),
    (0.03, chat_turn),
)

# Three turns of four are arithmetic, with operands longer than the main mixture's: it is what a
# large model does better than a small one, and what both learn last.
FINAL_TASKS: Mixture = (
    (0.04, lambda rng: copy_turn(rng, _size(rng, 16))),
    (0.07, lambda rng: sort_turn(rng, _size(rng, 10))),
    (0.06, lambda rng: reverse_turn(rng, _size(rng, 12))),
    (0.26, lambda rng: arithmetic_turn(rng, "+", rng.choice((1, 2, 3, 3, 4, 4, 5)))),
    (0.29, lambda rng: arithmetic_turn(rng, "-", rng.choice((1, 2, 3, 3, 4, 4)))),
    (0.21, lambda rng: arithmetic_turn(rng, "*", rng.choice((1, 2, 2, 3, 3)))),
    (0.04, knowledge_turn),
    (0.03, chat_turn),
)


def mixed_turn(rng: random.Random, mixture: Mixture = MAIN_TASKS) -> Turn:
    """Draw any task but recall."""
    weights, makers = zip(*mixture, strict=True)
    maker: Callable[[random.Random], Turn] = rng.choices(makers, weights)[0]
    return maker(rng)


def render(turn: Turn) -> tuple[str, str]:
    """Return the turn as (text the model reads, text the model must write), in ChatML."""
    asked = f"<|im_start|>user\n{turn.question}<|im_end|>\n<|im_start|>assistant\n"
    return asked, f"{turn.answer}<|im_end|>"


def render_system(text: str) -> str:
    """Return a system message in ChatML."""
    return f"<|im_start|>system\n{text}<|im_end|>\n"
