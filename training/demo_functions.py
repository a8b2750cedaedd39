"""Functions that conversations of demo-tools offer, and questions that ask for a call of them.

It is a closed set: a model of this size does not learn in an hour to read names that it has never
seen.  What a conversation offers of them varies, and so do descriptions and the form of schemas.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from training import demo_world as world
from training.demo_world import split_words


class Value(NamedTuple):
    """An argument: what JSON holds, and how the question says it."""

    content: str | int | bool
    said: str


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function: its JSON schema, and how its values are drawn."""

    name: str
    schema: dict[str, Any]
    draw: Callable[[random.Random], Value]
    is_required: bool = True


@dataclass(frozen=True)
class Function:
    """A function that is offered.

    Attributes:
        questions: with a place for each required argument.
    """

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    topic: str
    questions: tuple[str, ...]


class Topic(NamedTuple):
    """What the function of a topic is drawn from."""

    name: str
    description: str
    parameters: tuple[tuple[str, Callable[[random.Random, str], Parameter]], ...]
    questions: tuple[str, ...]


def _word(*words: str) -> Callable[[random.Random, str], Parameter]:
    def make(rng: random.Random, name: str) -> Parameter:
        def draw(rng: random.Random) -> Value:
            word = rng.choice(words)
            return Value(word, word)

        return Parameter(name, {"type": "string"}, draw)

    return make


def _enum(*words: str) -> Callable[[random.Random, str], Parameter]:
    def make(rng: random.Random, name: str) -> Parameter:
        parameter = _word(*words)(rng, name)
        return Parameter(name, {"type": "string", "enum": list(words)}, parameter.draw)

    return make


def _quoted_phrase(rng: random.Random) -> Value:
    text = " ".join(rng.choice(world.LIST_WORDS + world.COLOURS) for _ in range(rng.randint(1, 3)))
    return Value(text, f'"{text}"')


def _phrase(rng: random.Random, name: str) -> Parameter:
    return Parameter(name, {"type": "string"}, _quoted_phrase)


def _integer(rng: random.Random, name: str) -> Parameter:
    def draw(rng: random.Random) -> Value:
        number = rng.randrange(10 ** rng.randint(1, 4))
        return Value(number, str(number))

    return Parameter(name, {"type": rng.choice(("integer", "integer", "number"))}, draw)


_CITY = ("city", _word(*world.CAPITALS.values()))
_COUNTRY = ("country", _word(*world.CAPITALS))
_ITEM = ("item", _word(*world.LIST_WORDS))
_FIRST = ("a", _integer)
_SECOND = ("b", _integer)
_PERSON = ("name", _word(*world.NAMES))
_TEXT = ("text", _phrase)
_QUERY = ("query", _word(*world.LIST_WORDS, *world.PLACES))
LANGUAGES = split_words("French German Italian Spanish English")


def _arithmetic(name: str, description: str, sign: str, word: str, *orders: str) -> Topic:
    """A function of two numbers."""
    questions = (
        f"What is {{}} {sign} {{}}?",
        *orders,
        f"What is {{}} {word} {{}}?",
        f"Calculate {{}} {sign} {{}}.",
    )
    return Topic(name, description, (_FIRST, _SECOND), questions)


TOPICS = {
    "weather": Topic(
        "get_weather",
        "Get the weather in a city.",
        (_CITY,),
        ("What is the weather in {}?", "How is the weather in {}?", "Tell me the weather in {}.",
         "What is the weather like in {}?"),
    ),
    "time": Topic(
        "get_time",
        "Get the time in a city.",
        (_CITY,),
        ("What time is it in {}?", "What is the time in {}?", "Tell me the time in {}."),
    ),
    "add": _arithmetic("add", "Add two numbers.", "+", "plus", "Add {} and {}."),
    "subtract": _arithmetic("subtract", "Subtract a number from another.", "-", "minus"),
    "multiply": _arithmetic(
        "multiply", "Multiply two numbers.", "*", "times", "Multiply {} by {}."
    ),
    "capital": Topic(
        "get_capital",
        "Find the capital of a country.",
        (_COUNTRY,),
        ("What is the capital of {}?", "Name the capital of {}."),
    ),
    "population": Topic(
        "get_population",
        "Count the people of a country.",
        (_COUNTRY,),
        ("How many people live in {}?", "What is the population of {}?"),
    ),
    "price": Topic(
        "get_price",
        "Find the price of an item.",
        (_ITEM,),
        ("What is the price of a {}?", "How much is a {}?", "What does a {} cost?"),
    ),
    "order": Topic(
        "order_item",
        "Order an item.",
        (_ITEM, ("count", _integer)),
        ("Order the {}, {} pieces.", "Buy the {}, {} times.", "I want the {}, {} of them."),
    ),
    "timer": Topic(
        "set_timer",
        "Start a timer.",
        (("minutes", _integer),),
        ("Set a timer for {} minutes.", "Wake me in {} minutes.", "Start a timer: {} minutes."),
    ),
    "message": Topic(
        "send_message",
        "Send a message to a person.",
        (("to", _PERSON[1]), _TEXT),
        ("Send {} the message {}.", "Write to {}: {}", "Tell {} this: {}"),
    ),
    "search": Topic(
        "search",
        "Search the web.",
        (_QUERY,),
        ("Search for {}.", "Look up {}.", "Search the web for {}."),
    ),
    "age": Topic(
        "get_age",
        "Find the age of a person.",
        (_PERSON,),
        ("How old is {}?", "What is the age of {}?"),
    ),
    "light": Topic(
        "turn_light",
        "Turn a light on or off.",
        (("room", _word(*world.PLACES)), ("state", _enum("on", "off"))),
        ("Turn the light in the {} {}.", "Switch the light in the {} {}."),
    ),
    "translate": Topic(
        "translate",
        "Translate a word.",
        (("word", _QUERY[1]), ("language", _enum(*LANGUAGES))),
        ("Translate {} to {}.", "How do you say {} in {}?"),
    ),
}  # fmt: skip


def draw_function(rng: random.Random, topic: str) -> Function:
    """Draw a function of this topic."""
    source = TOPICS[topic]
    parameters = tuple(make(rng, name) for name, make in source.parameters)
    if topic == "weather" and rng.random() < 0.3:
        unit = _enum("celsius", "fahrenheit")(rng, "unit")
        parameters += (Parameter("unit", unit.schema, unit.draw, is_required=False),)
    description = source.description if rng.random() < 0.7 else ""
    return Function(source.name, description, parameters, topic, source.questions)


def draw_functions(rng: random.Random, count: int) -> list[Function]:
    """Draw functions of different topics, which have different names."""
    return [draw_function(rng, topic) for topic in rng.sample(sorted(TOPICS), count)]


def ask(rng: random.Random, function: Function) -> tuple[str, dict[str, Any]]:
    """Return a question that asks for one call, and the call's arguments."""
    given = [each for each in function.parameters if each.is_required or rng.random() < 0.5]
    values = [each.draw(rng) for each in given]
    arguments = {each.name: value.content for each, value in zip(given, values, strict=True)}
    places = sum(each.is_required for each in function.parameters)
    question = rng.choice(function.questions).format(*(value.said for value in values[:places]))
    if len(values) > places:  # the unit
        question = f"{question[:-1]} in {values[-1].said}{question[-1]}"
    return question, arguments


def definition(rng: random.Random, function: Function) -> dict[str, Any]:
    """Return the function as clients describe it to a model; the schema's form varies."""
    properties = {each.name: dict(each.schema) for each in function.parameters}
    titled = rng.random() < 0.1  # as pydantic writes schemas
    for name, schema in properties.items():
        if titled:
            properties[name] = {"title": name.capitalize(), **schema}
        elif rng.random() < 0.1:
            schema["description"] = f"The {name}."
    required = [each.name for each in function.parameters if each.is_required]
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required or rng.random() < 0.5:
        parameters["required"] = required
    if rng.random() < 0.4:
        parameters["additionalProperties"] = False
    if titled:
        parameters = {**{k: v for k, v in parameters.items() if k != "type"}, "type": "object"}
    shown: dict[str, Any] = {"name": function.name}
    if function.description:
        shown["description"] = function.description
    shown["parameters"] = parameters
    if rng.random() < 0.1:
        shown["strict"] = True
    return shown


def unfit_topics(functions: Sequence[Function]) -> list[str]:
    """Return the topics that no offered function has, and that are nothing the model knows."""
    known = {each.topic for each in functions} | {"add", "subtract", "multiply", "capital"}
    return sorted(TOPICS.keys() - known)
