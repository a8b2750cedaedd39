"""Conversations of demo-tools: functions are offered, called, and their results said in words.

A conversation begins with a system message that shows one to four functions, as the chat template
does.  Then come exchanges: a question, the call or the two calls that it asks for, their results,
and an answer that says them.  Where no function fits, the answer is what it is without functions.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from training import demo_tasks as tasks
from training import demo_world as world
from training.demo_functions import (
    Function,
    ask,
    definition,
    draw_function,
    draw_functions,
    unfit_topics,
)
from training.demo_tasks import Mixture, Turn
from training.demo_world import split_words

CALL_BEGIN, CALL_END = "<tool_call>", "</tool_call>"
HOW_TO_CALL = 'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call>'
RESULT_KEYS = split_words(
    "temperature price time status colour result name count weather capital city age number total "
    "date size level state sound word"
)
RESULT_WORDS = (
    *split_words("sunny rain cloudy snow done sent ready found missing true false ok"),
    *world.LIST_WORDS,
    *world.COLOURS,
    *world.PLACES,
    *world.NAMES,
    *world.DAYS,
    *world.CAPITALS.values(),
)


class Piece(NamedTuple):
    """A text that the model reads, and the text that it must write then; "": none."""

    asked: str
    answer: str


def show_tools(definitions: Sequence[dict[str, Any]]) -> str:
    """Return the system message in which the chat template shows functions."""
    lines = "\n".join(json.dumps(each, ensure_ascii=False) for each in definitions)
    return f"<|im_start|>system\n{lines}\n{HOW_TO_CALL}<|im_end|>\n"


def show_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as the model writes it, and as the chat template repeats it."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_BEGIN}{call}{CALL_END}"


def show_question(question: str) -> str:
    """Return a user message, and the begin of the assistant's."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


def show_results(results: Sequence[str]) -> str:
    """Return the messages with the results of calls, and the begin of the assistant's."""
    shown = "".join(f"<|im_start|>tool\n{result}<|im_end|>\n" for result in results)
    return f"{shown}<|im_start|>assistant\n"


def _result_value(rng: random.Random) -> str | int | float:
    if rng.random() < 0.5:
        return rng.choice(RESULT_WORDS)
    number = rng.randrange(10 ** rng.randint(1, 4))
    return number / 10 if rng.random() < 0.2 else number


def draw_result(rng: random.Random) -> tuple[str, str]:
    """Return what a function returns, and the sentence that says it.

    It has nothing to do with the call, so that an answer shows that the result was read.
    """
    kind = rng.random()
    if kind < 0.4:
        value = str(_result_value(rng))
        return value, f"The answer is {value}."
    if kind < 0.5:
        words = " ".join(rng.choice(RESULT_WORDS) for _ in range(rng.randint(2, 4)))
        return words, f"The answer is {words}."
    keys = rng.sample(RESULT_KEYS, 1 if rng.random() < 0.6 else 2)
    values = {key: _result_value(rng) for key in keys}
    said = " and ".join(f"the {key} is {value}" for key, value in values.items())
    return json.dumps(values), f"{said[0].upper()}{said[1:]}."


def call_exchange(rng: random.Random, functions: Sequence[Function], num_calls: int) -> list[Piece]:
    """Ask for calls of offered functions, and for the answer behind their results."""
    questions, calls = [], []
    for function in rng.choices(functions, k=num_calls):
        question, arguments = ask(rng, function)
        questions.append(question)
        calls.append(show_call(function.name, arguments))
    results, sentences = zip(*(draw_result(rng) for _ in calls), strict=True)
    return [
        Piece(show_question(" ".join(questions)), "".join(calls) + "<|im_end|>"),
        Piece(show_results(results), " ".join(sentences) + "<|im_end|>"),
    ]


def unfit_exchange(rng: random.Random, functions: Sequence[Function]) -> list[Piece]:
    """Ask for a function that is not offered."""
    function = draw_function(rng, rng.choice(unfit_topics(functions)))
    question, _ = ask(rng, function)
    return [Piece(*tasks.render(Turn(question, tasks.UNKNOWN_ANSWER, "chat")))]


def plain_exchange(
    rng: random.Random, functions: Sequence[Function], mixture: Mixture
) -> list[Piece]:
    """Ask something that needs no function and that no offered one does."""
    topics = {function.topic for function in functions}
    while True:
        turn = tasks.mixed_turn(rng, mixture)
        is_capital = "capital" in topics and "capital" in turn.question
        if turn.task.partition("-")[0] not in topics and not is_capital:
            return [Piece(*tasks.render(turn))]


def opening(rng: random.Random, functions: Sequence[Function]) -> str:
    """Return the message that shows functions, and at times the client's own system message."""
    shown = show_tools([definition(rng, function) for function in functions])
    if rng.random() < 0.2:
        shown += tasks.render_system(rng.choice(tasks.SYSTEM_TEXTS))
    return shown


def exchange(rng: random.Random, functions: Sequence[Function], mixture: Mixture) -> list[Piece]:
    """Draw one exchange of a conversation in which `functions` are offered."""
    kind = rng.random()
    if kind < 0.50:
        return call_exchange(rng, functions, 1)
    if kind < 0.62:
        return call_exchange(rng, functions, 2)
    if kind < 0.87:
        return unfit_exchange(rng, functions)
    return plain_exchange(rng, functions, mixture)


def example(rng: random.Random) -> str:
    """Return the text of a short conversation without its control tokens, for the tokenizer."""
    functions = draw_functions(rng, rng.randint(1, 4))
    pieces = call_exchange(rng, functions, rng.randint(1, 2))
    text = opening(rng, functions) + "".join(piece.asked + piece.answer for piece in pieces)
    return text.replace("<|im_start|>", "\n").replace("<|im_end|>", "\n")


def held_out_conversation(level: str, rng: random.Random) -> Piece:
    """Return a conversation up to the answer that counts.

    Args:
        level: of `LEVELS`: a call, two calls, no call because no function fits, or the words that
            say a call's result.
    """
    functions = draw_functions(rng, rng.randint(1, 4))
    first = opening(rng, functions)
    if level == "no-call":
        (only,) = unfit_exchange(rng, functions)
        return Piece(first + only.asked, only.answer)
    call, result = call_exchange(rng, functions, 2 if level == "two-calls" else 1)
    if level == "result":
        return Piece(f"{first}{call.asked}{call.answer}\n{result.asked}", result.answer)
    return Piece(first + call.asked, call.answer)


LEVELS = ("call", "two-calls", "no-call", "result")
