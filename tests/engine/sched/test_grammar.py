"""Grammars: what may come next, whatever strangers write, and from any token on."""

from __future__ import annotations

import json
import math
import random
import re
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from disagg.config import ASSETS
from disagg.engine.sched import grammar as grammar_module
from disagg.engine.sched.grammar import (
    MAX_CACHED,
    MAX_WAITING,
    Compiled,
    Grammars,
    GrammarState,
    most_nbytes,
)
from disagg.errors import GrammarError, Overloaded, Unavailable
from disagg.messages import Grammar
from tests.grids import examples
from tests.tiny_model import write_tiny_tokenizer

EOS_IDS = (257, 258)  # two, as some models have


@pytest.fixture(scope="module")
def tokenizer_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return (directory / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def grammars(tokenizer_text: str) -> Grammars:
    return Grammars(lambda: tokenizer_text, EOS_IDS)


@pytest.fixture(scope="module")
def large_grammars() -> Grammars:
    """With a vocabulary of words, where a token may walk through many states."""
    return Grammars((ASSETS / "demo-small" / "tokenizer.json").read_text, (0,))


def json_grammar(schema: Any) -> Grammar:
    return Grammar("json", json.dumps(schema, separators=(",", ":")))


def allowed(state: GrammarState, tokens: list[int]) -> list[int]:
    words = array("I", bytes(state.num_mask_nbytes))
    state.fill_mask(tokens, words.buffer_info()[0])
    return [
        32 * index + bit for index, word in enumerate(words) for bit in range(32) if word >> bit & 1
    ]


def walk(grammars: Grammars, grammar: Grammar, seed: int, prompt: list[int]) -> list[int]:
    """An answer of random tokens among those that are allowed, up to its end."""
    rng = random.Random(seed)
    state = grammars.follow(grammar, len(prompt))
    answer: list[int] = []
    while not answer or answer[-1] not in EOS_IDS:
        assert len(answer) < 5000
        answer.append(rng.choice(allowed(state, [*prompt, *answer])))
    return answer[:-1]


def text(tokenizer_text: str, answer: list[int]) -> str:
    return str(Tokenizer.from_str(tokenizer_text).decode(answer))


LEAVES = st.sampled_from(
    [
        {"type": "integer", "minimum": -20, "maximum": 99},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
        {"enum": ["red", 5, None, 'ü\n"']},
        {"const": {"a": [1]}},
    ]
)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    names = st.text('xyz" \\é', min_size=1, max_size=3)

    def schema(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:num_required],
            "additionalProperties": False,
        }

    return st.builds(schema, st.dictionaries(names, inner, max_size=3), st.integers(0, 3))


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def schema(items: Any, least: int, more: int) -> dict[str, Any]:
        return {"type": "array", "items": items, "minItems": least, "maxItems": least + more}

    return st.builds(schema, inner, st.integers(0, 2), st.integers(0, 2))


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.builds(lambda *any_of: {"anyOf": list(any_of)}, inner, inner)
    ),
    max_leaves=4,
)


@given(SCHEMAS, st.integers(0, 2**32))
@examples(20)
def test_any_allowed_answer_validates(
    tokenizer_text: str, grammars: Grammars, schema: Any, seed: int
) -> None:
    answer = walk(grammars, json_grammar(schema), seed, [1, 2])
    jsonschema.validate(json.loads(text(tokenizer_text, answer)), schema)


@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=5), st.integers(0, 99))
@examples(10)
def test_an_answer_is_one_of_the_choices(
    tokenizer_text: str, grammars: Grammars, choices: list[str], seed: int
) -> None:
    answer = walk(grammars, Grammar("choice", json.dumps(choices)), seed, [])
    assert text(tokenizer_text, answer) in choices


@pytest.mark.parametrize("pattern", [r"[a-c]{2,5}@x\.(com|org)", r"^\d{3}$", "(ab|cd)*x?", "ü+🐢"])
def test_an_answer_matches_the_expression(
    tokenizer_text: str, grammars: Grammars, pattern: str
) -> None:
    for seed in range(20):
        answer = text(tokenizer_text, walk(grammars, Grammar("regex", pattern), seed, [7]))
        assert re.fullmatch(pattern, answer)


def test_a_lark_grammar_is_followed(tokenizer_text: str, grammars: Grammars) -> None:
    source = 'start: sum\nsum: NUMBER | sum "+" NUMBER\nNUMBER: /[1-9]/'
    for seed in range(20):
        answer = text(tokenizer_text, walk(grammars, Grammar("lark", source), seed, []))
        assert re.fullmatch(r"[1-9](\+[1-9])*", answer)


def test_a_grammar_may_have_the_notation_of_vllm_s_examples(
    tokenizer_text: str, grammars: Grammars
) -> None:
    source = (
        'root ::= "SELECT " column " from t" (" where " condition)?  # of one table\n'
        'column ::= "c1" | "c2"\ncondition ::= column " = " [0-9]{1,3}\n'
    )
    for seed in range(20):
        answer = text(tokenizer_text, walk(grammars, Grammar("lark", source), seed, []))
        assert re.fullmatch(r"SELECT c[12] from t( where c[12] = [0-9]{1,3})?", answer)


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (r'"\u00e9ab"', "éab"),
        (r'"\U0001f600a"', "😀a"),
        (r"[\u00e9]", "é"),
        (r'"\u0022\u005c"', '"\\'),
        (r'"\\u00e9"', r"\u00e9"),
        (r"[\u005d]", "]"),
    ],
)
def test_escapes_of_gbnf_are_one_character(
    tokenizer_text: str, grammars: Grammars, source: str, answer: str
) -> None:
    grammar = Grammar("lark", f"root ::= {source}")
    assert text(tokenizer_text, walk(grammars, grammar, 0, [])) == answer


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000"])
def test_escapes_of_gbnf_that_are_no_character_are_refused(grammars: Grammars, escape: str) -> None:
    with pytest.raises(GrammarError, match="not valid GBNF"):
        grammars.follow(Grammar("lark", f'root ::= "{escape}"'), 0)


def test_the_end_is_allowed_exactly_where_the_answer_is_complete(
    tokenizer_text: str, grammars: Grammars
) -> None:
    state = grammars.follow(Grammar("regex", "ab?"), 0)
    a: Any = Tokenizer.from_str(tokenizer_text).token_to_id("a")
    ends = [set(EOS_IDS) <= set(allowed(state, tokens)) for tokens in ([], [a])]
    assert ends == [False, True]


def test_white_space_has_an_end(tokenizer_text: str, grammars: Grammars) -> None:
    tokenizer = Tokenizer.from_str(tokenizer_text)
    schema = json_grammar({"type": "array", "items": {"type": "integer"}})
    for start, goes_on in (("[", True), ("[ ", False), ("[\n", True), ("[\n" + " " * 32, False)):
        state = grammars.follow(schema, 0)
        nexts = allowed(state, tokenizer.encode(start).ids)
        assert (tokenizer.token_to_id("Ġ") in nexts) == goes_on, start


@given(SCHEMAS, st.integers(0, 2**32), st.data())
@examples(10)
def test_the_state_is_a_function_of_the_tokens(
    tokenizer_text: str, grammars: Grammars, schema: Any, seed: int, draw: st.DataObject
) -> None:
    answer = walk(grammars, json_grammar(schema), seed, [])
    cut = draw.draw(st.integers(0, len(answer)))
    stepwise = grammars.follow(json_grammar(schema), 2)
    for end in range(cut):
        allowed(stepwise, [0, 0, *answer[:end]])
    elsewhere = Grammars(lambda: tokenizer_text, EOS_IDS).follow(json_grammar(schema), 2)
    prefix = [0, 0, *answer[:cut]]
    assert allowed(stepwise, prefix) == allowed(elsewhere, prefix)


def test_a_token_that_is_not_allowed_ends_the_answer(grammars: Grammars) -> None:
    state = grammars.follow(Grammar("choice", '["yes"]'), 0)
    with pytest.raises(GrammarError, match="cannot be followed"):
        allowed(state, [3, 4])


def nested(num_levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(num_levels):
        schema = {"type": "array", "items": schema}
    return schema


def chain(num_links: int, link: Callable[[str], Any]) -> Any:
    """A schema that refers to a schema that refers ..., in rooms of 400."""

    def place(number: int) -> str:
        return f"#/$defs/room{number // 400}/d{number}"

    rooms: dict[str, Any] = {}
    for number in range(num_links):
        rooms.setdefault(f"room{number // 400}", {})[f"d{number}"] = link(place(number + 1))
    rooms.setdefault(f"room{num_links // 400}", {})[f"d{num_links}"] = {"type": "integer"}
    return {"$defs": rooms, "$ref": place(0)}


def doubling(name: str) -> str:
    rules = "\n".join(f"{name}{i}: {name}{i + 1} {name}{i + 1}" for i in range(40))
    return f'start: {name}0\n{rules}\n{name}40: "a"'


PROPERTIES = {f"p{i}": {"type": "integer"} for i in range(200)}
HOSTILE = {
    "nested groups": Grammar("regex", "(" * 5000 + "a" + ")" * 5000),
    "open groups": Grammar("regex", "(" * 16_000),
    "many copies": Grammar("regex", "a{1000000}"),
    "copies of copies": Grammar("regex", "((((a{100}){100}){100}){100}){100}"),
    "optional copies": Grammar("regex", "(a?){5000}a{5000}"),
    "a long expression": Grammar("regex", "a" * 1_000_000),
    "look-around": Grammar("regex", "(?=a)b"),
    "references": Grammar("regex", r"(a)\1"),
    "nothing matches": Grammar("regex", r"[^\x00-\U0010ffff]"),
    "a chain of rules": Grammar(
        "lark", "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000))
    ),
    "nested rules": Grammar("lark", "start: " + "(" * 8000 + '"a"' + ")" * 8000),
    "doubling terminals": Grammar("lark", doubling("T")),
    "doubling rules": Grammar("lark", doubling("r")),
    "a rule of itself": Grammar("lark", "start: start"),
    "no rule": Grammar("lark", "start: ???"),
    "another's rule": Grammar("lark", "start: @other"),
    "deep": json_grammar(nested(100)),
    "deeper than JSON is read": Grammar("json", "[" * 30_000),
    "a schema of itself": json_grammar({"$ref": "#"}),
    "schemas of each other": json_grammar(
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    ),
    "elsewhere": json_grammar({"$ref": "http://169.254.169.254/latest"}),
    "many values": json_grammar({"enum": [f"v{i}" for i in range(100_000)]}),
    "many members": json_grammar({"type": "object", "properties": PROPERTIES | {
        f"q{i}": {} for i in range(1000)
    }}),
    "crossed": json_grammar({"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"p{i}_{j}": {"type": "integer"}}} for j in range(8)
    ]} for i in range(6)]}),
    "no type": json_grammar({"type": "bogus"}),
    "nothing": json_grammar(False),
    "contradiction": json_grammar({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    "not possible": json_grammar({"not": {"type": "string"}}),
    "unfulfillable": json_grammar({"type": "integer", "minimum": 5, "maximum": 3}),
    "not JSON": Grammar("json", "{"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_followed_is_refused_in_words(large_grammars: Grammars, name: str) -> None:
    with pytest.raises(GrammarError) as refused:
        large_grammars.compile(HOSTILE[name]).result()
    assert 10 < len(refused.value.message) < 400
    assert refused.value.http_status == 400


BIG_BUT_RIGHT = {
    "references": json_grammar(chain(1500, lambda to: {"$ref": to})),
    "references in lists": json_grammar(chain(1100, lambda to: {"allOf": [{"$ref": to}]})),
    "rules": Grammar("lark", "start: r0\n" + "\n".join(
        f"r{i}: r{i + 1}" for i in range(1200)) + '\nr1200: "a"'),
    "terminals": Grammar("lark", "start: T0\n" + "\n".join(
        f"T{i}: T{i + 1}" for i in range(1200)) + '\nT1200: "a"'),
    "values": json_grammar({"enum": [f"v{i}" for i in range(5000)]}),
    "members": json_grammar({"type": "object", "properties": PROPERTIES}),
    "copies": json_grammar({"$defs": {"b": {"type": "object", "properties": PROPERTIES}},
                            "anyOf": [{"$ref": "#/$defs/b"}] * 200}),
}  # fmt: skip


@pytest.mark.parametrize("name", BIG_BUT_RIGHT)
def test_the_largest_that_are_allowed_do_not_exhaust_the_stack(
    large_grammars: Grammars, name: str
) -> None:
    state = large_grammars.follow(BIG_BUT_RIGHT[name], 0)
    assert allowed(state, [])


def test_the_librarys_own_options_are_not_taken_from_a_schema(grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}
    odd = json_grammar(schema | {"x-guidance": {"item_separator": ";"}})
    assert walk(grammars, odd, 0, []) == walk(grammars, json_grammar(schema), 0, [])


def test_what_takes_too_long_is_refused(tokenizer_text: str) -> None:
    seconds = iter([0.0, 1.0, 0.0, 0.1])
    grammars = Grammars(
        lambda: tokenizer_text, EOS_IDS, max_compile_s=0.5, timer=lambda: next(seconds)
    )
    with pytest.raises(GrammarError, match="too long"):
        grammars.compile(Grammar("regex", "a")).result()
    grammars.compile(Grammar("regex", "b")).result()


def test_a_tokenizer_that_cannot_be_used_ends_requests_and_nothing_else() -> None:
    broken = Grammars(lambda: "{}", EOS_IDS)
    with pytest.raises(GrammarError, match="tokenizer"):
        broken.compile(Grammar("regex", "a")).result()


@pytest.mark.parametrize(
    "grammar", [Grammar("regex", "("), json_grammar({"type": "string", "pattern": "("})]
)
def test_what_is_wrong_with_a_pattern_is_said(grammars: Grammars, grammar: Grammar) -> None:
    with pytest.raises(GrammarError, match=r"regex parse error: unclosed group\.$"):
        grammars.compile(grammar).result()


def test_an_end_token_that_the_tokenizer_lacks_is_left_out(tokenizer_text: str) -> None:
    grammars = Grammars(lambda: tokenizer_text, [*EOS_IDS, 1 << 20])
    assert grammars.compile(Grammar("regex", "a")).result()
    without_end = Grammars(lambda: tokenizer_text, [1 << 20])
    with pytest.raises(GrammarError, match="tokenizer"):
        without_end.compile(Grammar("regex", "a")).result()


def test_few_grammars_are_kept(grammars: Grammars) -> None:
    first = Grammar("regex", "first")
    compiled = grammars.compile(first).result()
    assert grammars.compile(first).result() is compiled
    for number in range(MAX_CACHED + 3):
        grammars.compile(Grammar("regex", f"x{number}")).result()
    assert len(grammars._compiled) == MAX_CACHED
    assert grammars.compile(first).result() is not compiled


def test_compiled_grammars_are_bounded_in_bytes(tokenizer_text: str) -> None:
    """Those that are followed count, whether or not they are kept for others."""
    three = 3 * most_nbytes(Grammar("regex", "x0"))
    grammars = Grammars(lambda: tokenizer_text, EOS_IDS, max_nbytes=three)
    states = []

    def ready(number: int) -> bool:
        grammar = Grammar("regex", f"x{number}")
        if not grammars.is_ready(grammar) and grammar not in grammars._compiled:
            return False
        while not grammars.is_ready(grammar):
            pass
        return True

    for number in range(3):
        assert ready(number)
        states.append(grammars.follow(Grammar("regex", f"x{number}"), 0))
        assert ready(0), "what is there needs no more room"
    assert not ready(3) and grammars.nbytes == three
    again = grammars.follow(Grammar("regex", "x1"), 0)  # the same one
    states.pop(1)
    assert not ready(3)
    del again
    assert ready(3) and grammars.nbytes == three
    states.clear()
    huge = Grammars(lambda: tokenizer_text, EOS_IDS, max_nbytes=1)
    assert not huge.is_ready(Grammar("regex", "y")) and huge._compiled, "one alone always may"


def test_no_more_wait_than_may(tokenizer_text: str) -> None:
    grammars = Grammars(lambda: tokenizer_text, EOS_IDS)
    waiting: list[Future[Compiled]] = [Future() for _ in range(MAX_WAITING)]
    grammars._compiled.update((Grammar("regex", f"x{i}"), each) for i, each in enumerate(waiting))
    with pytest.raises(Overloaded):
        grammars.compile(Grammar("regex", "one more"))
    assert not grammars.is_ready(Grammar("regex", "x0"))
    waiting[0].set_exception(GrammarError("It is wrong."))
    with pytest.raises(GrammarError):
        grammars.is_ready(Grammar("regex", "x0"))
    assert grammars.compile(Grammar("regex", "one more")).result()


@pytest.fixture
def few_states(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    limits = grammar_module._LIMITS | {"max_lexer_states": 200}
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    yield


def test_answers_that_wear_a_grammar_out_do_not_end_later_ones(
    tokenizer_text: str, few_states: None
) -> None:
    grammars = Grammars(lambda: tokenizer_text, EOS_IDS)
    rng = random.Random(0)
    choices = ["".join(rng.choices("abcdefgh", k=8)) for _ in range(400)]
    words = Grammar("choice", json.dumps(choices))
    first = grammars.compile(words).result()
    num_worn = 0
    for seed in range(60):
        try:
            walk(grammars, words, seed, [])
        except Unavailable:  # its request is routed again, and finds it compiled anew
            num_worn += 1
            assert grammars.compile(words).result() is not first
            walk(grammars, words, seed, [])
    assert num_worn > 0


def test_an_answer_that_is_too_complex_by_itself_ends(
    tokenizer_text: str, few_states: None
) -> None:
    grammars = Grammars(lambda: tokenizer_text, EOS_IDS)
    with pytest.raises(GrammarError, match="too many states"):
        walk(grammars, Grammar("regex", r"(\w{1,20} ){5,4000}end"), 0, [])
    assert math.isinf(grammars._max_compile_s)


def test_tokens_that_the_model_has_no_row_for_are_in_no_mask() -> None:
    """Where the tokenizer's own vocabulary, not only its added tokens, is larger than the head."""
    text = (ASSETS / "demo-small" / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text)
    num_rows = 600
    grammars = Grammars(lambda: text, (0,), vocab_size=num_rows)
    state = grammars.follow(json_grammar({"type": "string", "maxLength": 40}), 0)
    rng, tokens = random.Random(1), list[int]()
    while 0 not in tokens:
        choices = allowed(state, tokens)
        assert choices and max(choices) < num_rows
        assert state.num_mask_nbytes * 8 < num_rows + 32
        tokens.append(rng.choice(choices))
    assert isinstance(json.loads(tokenizer.decode(tokens[:-1])), str)


def test_an_answer_that_nothing_may_follow_ends_in_words(
    tokenizer_text: str, grammars: Grammars
) -> None:
    """After `,` comes another property, but only "a" may be one, and it is there."""
    patterns = {"^a$": {"const": 1}}
    schema = {"type": "object", "patternProperties": patterns, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    state = grammars.follow(json_grammar(schema), 0)
    with pytest.raises(GrammarError, match="two patternProperties, or one and a property"):
        allowed(state, Tokenizer.from_str(tokenizer_text).encode('{"a":1, ').ids)
