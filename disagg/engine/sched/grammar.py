"""Structured output: which tokens a grammar allows next.

The state of a grammar is a function of the answer's tokens, so a sequence that is rerouted or
recomputed replays its answer and continues. Grammars come from clients, so their size is bounded
before llguidance reads them, and their memory and time are bounded while it compiles. They are
compiled in a separate thread, which has a deep stack because llguidance recurses on nesting.
Ingresses check grammars with the same code with which workers compile them.

llguidance is imported with the first grammar, so a machine without it serves everything else.
Must not know logits, devices or requests.
"""

from __future__ import annotations

import json
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from disagg.engine.sched.json_schema import followable
from disagg.errors import GrammarError, Overloaded, Unavailable
from disagg.messages import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_SCHEMA_NBYTES = 65_536  # of a JSON schema or a list of choices
MAX_TEXT_NBYTES = 16_384  # of a regular expression or a Lark grammar
MAX_SCHEMA_DEPTH = 64
MAX_RULES = 500  # of a grammar in GBNF: the time of the converter may grow with their square
MAX_PROPERTIES = 500  # of one object: the cost of compiling grows with their square
MAX_WAITING = 64  # grammars that wait to be compiled
MAX_WORN = 64  # grammars that ran out of lexer states and are remembered
MAX_CACHED = 16  # unused compiled grammars that are kept; compiling takes about a millisecond
MAX_NBYTES = 512 << 20  # of all compiled grammars, whether in use or only kept
MAX_LEXER_STATES = 10_000  # of one grammar; an answer that needs more is rerouted
# Measured: 57 MB at 50,000 states, and 6.8 MB after compiling a schema of 65 kB.
LEXER_STATE_NBYTES = 1200
NBYTES_PER_SOURCE_BYTE = 110
NUM_PROBES = 3
OUT_OF_STATES = "too many states"  # in llguidance's error message
_WORDS = {
    "coerce_one_of": "oneOf is supported only if its alternatives exclude each other, as objects do"
    " that have a property with different constants; use anyOf instead",
    "NoExtension": "an answer could begin in a way that nothing may follow, as where two"
    " patternProperties, or one and a property, exclude each other",
}
# Recursion over a source of the largest size took 22 MB. Only pages that are touched take memory.
STACK_NBYTES = 128 << 20
# Between tokens of JSON: nothing, one space, or a new line and its indentation. Without a bound, a
# model may write white space until its tokens are used up.
WHITE_SPACE = r" |\n[ \t]{0,32}"

_GBNF_ROOT = re.compile(r"^[ \t]*root[ \t]*::=", re.MULTILINE)
_GBNF_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,  # at the default a{1000000} takes seconds
    "max_lexer_states": MAX_LEXER_STATES,  # of all answers that share a compiled grammar
    "verbose_errors": False,
}


class Compiled:
    """A compiled grammar.

    vocab_size: number of the tokenizer's tokens; the model may have rows beyond them.
    num_mask_nbytes: size of a mask, which has one bit for each of these tokens.
    num_followers: answers that have used it so far, each of which may have added lexer states.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, vocab_size: int) -> None:
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.num_mask_nbytes = -(-vocab_size // 32) * 4
        self.num_followers = 0
        self._matcher = matcher

    def matcher(self) -> LLMatcher:
        """A matcher at the beginning of an answer. All answers share the lexer states."""
        self.num_followers += 1
        return self._matcher.deep_copy()


class Grammars:
    """The compiled grammars of one model.

    Args:
        read_tokenizer: returns the text of the model's tokenizer.json; called when first needed.
        eos_token_ids: the only tokens that may follow a complete answer.
        vocab_size: the model has no tokens from here on, so no mask needs them.
        max_compile_s: seconds of CPU time; a grammar that takes longer is refused.
        timer: returns the CPU seconds of the calling thread.
        max_nbytes: memory of all compiled grammars; a new one waits until there is room.
    """

    def __init__(
        self,
        read_tokenizer: Callable[[], str],
        eos_token_ids: Sequence[int],
        *,
        vocab_size: int = 1 << 31,
        max_compile_s: float = math.inf,
        timer: Callable[[], float] = time.thread_time,
        max_nbytes: int = MAX_NBYTES,
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._eos_token_ids = list(eos_token_ids)
        self._vocab_size = vocab_size
        self._max_compile_s = max_compile_s
        self._timer = timer
        self._max_nbytes = max_nbytes
        self._tokenizer: LLTokenizer | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: OrderedDict[Grammar, Future[Compiled]] = OrderedDict()
        # For grammars that ran out of lexer states: how many answers may share one.
        self._max_followers: OrderedDict[Grammar, int] = OrderedDict()
        self._states: WeakSet[GrammarState] = WeakSet()

    @property
    def nbytes(self) -> int:
        """Upper bound of the memory of all compiled grammars."""
        followed = {id(compiled): compiled for compiled in self._followed()}
        of_followed = sum(most_nbytes(compiled.grammar) for compiled in followed.values())
        names = {compiled.grammar for compiled in followed.values()}
        return of_followed + sum(most_nbytes(each) for each in self._compiled if each not in names)

    def follow(self, grammar: Grammar, num_prompt_tokens: int) -> GrammarState:
        """The state at the beginning of an answer. It keeps the compiled grammar in memory.

        Waits for the compiler unless `is_ready` was true before. An engine's thread must therefore
        check `is_ready` first.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        compiled = self.compile(grammar).result()
        state = GrammarState(self, compiled, num_prompt_tokens)
        self._states.add(state)
        return state

    def compile(self, grammar: Grammar) -> Future[Compiled]:
        """Begin to compile a grammar, if it is not compiled. The future fails with `GrammarError`.

        Raises:
            GrammarError: the grammar is too large to be parsed.
            Overloaded: too many grammars wait to be compiled.
        """
        found = self._compiled.get(grammar)
        if found is not None and not self._has_enough_followers(grammar, found):
            self._compiled.move_to_end(grammar)
            return found
        check_size(grammar)
        if sum(not future.done() for future in self._compiled.values()) >= MAX_WAITING:
            raise Overloaded("Too many grammars wait to be compiled; try again shortly.")
        if self._thread is None:
            self._thread = _deep_thread()
        future = self._compiled[grammar] = self._thread.submit(self._compile, grammar)
        while len(self._compiled) > MAX_CACHED and self._let_one_go():
            pass
        return future

    def is_ready(self, grammar: Grammar) -> bool:
        """Whether a grammar is compiled. If not, it is being compiled or waits for room. Raises
        what `compile` raises."""
        if grammar not in self._compiled and not self._make_room(most_nbytes(grammar)):
            return False
        future = self.compile(grammar)
        if not future.done():
            return False
        future.result()
        return True

    def _followed(self) -> list[Compiled]:
        return [state.compiled for state in self._states]

    def _make_room(self, nbytes: int) -> bool:
        while self.nbytes + nbytes > self._max_nbytes:
            if not self._let_one_go():
                return not self._states  # one grammar is always allowed, however large
        return True

    def _let_one_go(self) -> bool:
        """Forget the least recently used compiled grammar that no answer uses."""
        names = {compiled.grammar for compiled in self._followed()}
        for grammar, future in self._compiled.items():
            if future.done() and grammar not in names:
                del self._compiled[grammar]
                return True
        return False

    def forget(self, worn: Compiled) -> None:
        """Forget a compiled grammar with its lexer states. The next answer compiles it again."""
        future = self._compiled.get(worn.grammar)
        if future is not None and future.done() and future.result() is worn:
            del self._compiled[worn.grammar]
        # All its answers may be rerouted to this worker at once, so each time it runs out of
        # states, half as many answers may share it.
        self._max_followers[worn.grammar] = max(1, worn.num_followers // 2)
        while len(self._max_followers) > MAX_WORN:
            self._max_followers.popitem(last=False)

    def _has_enough_followers(self, grammar: Grammar, future: Future[Compiled]) -> bool:
        most = self._max_followers.get(grammar)
        if most is None or not future.done() or future.exception() is not None:
            return False
        return future.result().num_followers >= most

    def _compile(self, grammar: Grammar) -> Compiled:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError as error:
            raise GrammarError(
                "Structured output needs the package llguidance, which this server does not have."
            ) from error
        if self._tokenizer is None:
            self._tokenizer = _load_tokenizer(
                self._read_tokenizer, self._eos_token_ids, self._vocab_size
            )
        tokenizer, began_s = self._tokenizer, self._timer()
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(tokenizer, _grammar_text(grammar), log_level=0, limits=limits)
        _probe(matcher)
        if self._timer() - began_s > self._max_compile_s:
            raise GrammarError("The grammar takes too long to compile; make it simpler.")
        return Compiled(grammar, matcher, tokenizer.vocab_size)


class GrammarState:
    """The grammar state of one answer. Owned by the engine's thread.

    Args:
        compiled: see `Grammars.follow`.
        num_prompt_tokens: the answer begins after so many tokens of the sequence.
    """

    __slots__ = (
        "__weakref__",
        "_ahead",
        "_begins_at",
        "_grammars",
        "_matcher",
        "_num_seen",
        "compiled",
    )

    def __init__(self, grammars: Grammars, compiled: Compiled, num_prompt_tokens: int) -> None:
        self._grammars = grammars
        self.compiled = compiled
        self._matcher = compiled.matcher()
        self._begins_at = self._num_seen = num_prompt_tokens
        self._ahead: list[int] = []  # tokens of a draft that the matcher has taken beyond these

    @property
    def num_mask_nbytes(self) -> int:
        return self.compiled.num_mask_nbytes

    def begin_at(self, num_tokens: int) -> None:
        """Set the number of tokens after which the grammar applies."""
        if num_tokens != self._begins_at:
            self._begins_at = self._num_seen = num_tokens
            self._ahead = []

    def fill_mask(self, tokens: Sequence[int], address: int, draft: Sequence[int] = ()) -> bool:
        """Write a mask of the allowed next tokens to `num_mask_nbytes` bytes at `address`.

        Bit i of the little-endian 32-bit words is set if token i is allowed.

        Args:
            tokens: the prompt and the answer so far; the tokens of the last call are a prefix.
            draft: tokens that may come next, and after which the mask is wanted.

        Returns:
            Whether the grammar allows the draft. If not, there is no mask.

        Raises:
            GrammarError: the grammar has too many lexer states, or the answer violates it.
            Unavailable: other answers have used up the grammar's lexer states.
        """
        allows = self._advance(tokens, draft)
        if allows and not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(address, self.num_mask_nbytes)
        if not self._matcher.is_error():
            return allows
        is_worn = OUT_OF_STATES in self._matcher.get_error()
        if is_worn and self.compiled.num_followers > 1:
            # Answers share the lexer states, and a compiled grammar never drops any. After it is
            # compiled again, it may have enough. A step must not wait for the compiler, so the
            # request is rerouted, and admitted when the grammar is compiled.
            self._grammars.forget(self.compiled)
            raise Unavailable(
                "Other answers have used up the lexer states of this request's grammar, which is"
                " now compiled again. Try again shortly."
            )
        _refuse_error(self._matcher)
        return False

    def forced(self, tokens: Sequence[int]) -> list[int]:
        """The next tokens, as far as the grammar allows only one. Args: see `fill_mask`.

        They are a draft like any other: the masks decide whether they are right.
        """
        self._advance(tokens, ())
        # It leaves an error as it is; `fill_mask` raises it.
        return [] if self._matcher.is_error() else self._matcher.compute_ff_tokens()

    def num_allowed(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        """How many tokens of a draft the grammar allows. Args: see `fill_mask`."""
        self._advance(tokens, ())
        # The matcher takes a token that the tokenizer does not have for an error of the answer.
        known = list(takewhile(self.compiled.vocab_size.__gt__, draft))
        return 0 if self._matcher.is_error() else self._matcher.validate_tokens(known)

    def _advance(self, tokens: Sequence[int], draft: Sequence[int]) -> bool:
        """Bring the matcher behind these tokens. Returns whether it takes the draft."""
        matcher, ahead = self._matcher, self._ahead
        news = list(tokens[self._num_seen :])
        wanted = [*news, *draft]
        num_kept = 0
        while num_kept < min(len(ahead), len(wanted)) and ahead[num_kept] == wanted[num_kept]:
            num_kept += 1
        if num_kept < len(ahead):
            matcher.rollback(len(ahead) - num_kept)
        if num_kept < len(news):
            matcher.consume_tokens(news[num_kept:])
            num_kept = len(news)
        rest = wanted[num_kept:]
        num_taken = 0 if matcher.is_error() else matcher.try_consume_tokens(rest) if rest else 0
        self._num_seen = len(tokens)
        self._ahead = wanted[len(news) : num_kept + num_taken]
        return num_taken == len(rest)


def most_nbytes(grammar: Grammar) -> int:
    """Upper bound of a compiled grammar's memory, with all lexer states that it may get."""
    return MAX_LEXER_STATES * LEXER_STATE_NBYTES + NBYTES_PER_SOURCE_BYTE * len(grammar.source)


def check_size(grammar: Grammar) -> None:
    """Raise `GrammarError` if a grammar is too large to be compiled in bounded time and stack."""
    nbytes = len(grammar.source.encode())
    max_nbytes = MAX_TEXT_NBYTES if grammar.kind in ("regex", "lark") else MAX_SCHEMA_NBYTES
    if nbytes > max_nbytes:
        raise GrammarError(
            f"The grammar has {nbytes} bytes; at most {max_nbytes} are allowed. Make it smaller."
        )
    if grammar.kind == "json":
        _check_schema(_loaded(grammar.source))


def _check_schema(schema: Any) -> None:
    if not isinstance(schema, dict):
        raise GrammarError("A schema must be a JSON object.")
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [part for value in level for part in _parts(value)]
        if not level:
            return
    raise GrammarError(f"The schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.")


def _parts(value: Any) -> list[Any]:
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        return []
    if len(value) > MAX_PROPERTIES:
        raise GrammarError(
            f"An object of the schema has {len(value)} members; at most {MAX_PROPERTIES} are"
            " allowed."
        )
    return list(value.values())


def _loaded(source: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise GrammarError("The schema is not JSON, or is nested too deeply.") from error


def _grammar_text(grammar: Grammar) -> str:
    """A grammar in llguidance's format."""
    from llguidance import LLMatcher

    match grammar.kind:
        case "json":
            schema = followable(_loaded(grammar.source))
            schema.pop("x-guidance", None)  # clients must not set the library's options
            overrides: Any = {"whitespace_pattern": WHITE_SPACE}
            return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=overrides)
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.source)
        case "choice":
            # Lark writes strings as JSON does.
            choices = " | ".join(json.dumps(choice) for choice in _loaded(grammar.source))
            return LLMatcher.grammar_from_lark(f"start: {choices}")
        case "lark":
            return LLMatcher.grammar_from_lark(_as_lark(grammar.source))


def _as_lark(source: str) -> str:
    """A grammar in Lark's notation, which llguidance reads. It ships a converter from GBNF.

    GBNF (`root ::= "yes" | "no"`) is the notation of llama.cpp and of vLLM's examples.

    Args:
        source: the grammar, in GBNF if it has a rule `root ::= ...`, else in Lark's notation.

    Raises:
        GrammarError: the grammar is GBNF and invalid, or has too many rules.
    """
    if not _GBNF_ROOT.search(source):
        return source
    if source.count("::=") > MAX_RULES:
        raise GrammarError(f"The grammar has more than {MAX_RULES} rules. Make it smaller.")
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return gbnf_to_lark(_GBNF_ESCAPE.sub(_written_out, source))
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(f"The grammar is not valid GBNF: {str(error)[:200]}.") from error


def _written_out(escape: re.Match[str]) -> str:
    """The character of an escape such as `\\u00e9`.

    The converter (llguidance 1.9) drops the zeros, so that the next characters become digits.
    """
    digits = escape[1] or escape[2]
    if digits is None:
        return escape[0]
    code = int(digits, 16)
    if 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is half a character")
    return rf"\x{code:02x}" if code < 0x80 else chr(code)  # ASCII may have a meaning of its own


def _deep_thread() -> ThreadPoolExecutor:
    """An executor with one thread that has a deep stack; it ends with the process."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
    usual_nbytes = threading.stack_size(STACK_NBYTES)
    try:
        executor.submit(int).result()  # the thread starts with the first call
    finally:
        threading.stack_size(usual_nbytes)
    return executor


def _load_tokenizer(
    read: Callable[[], str], eos_token_ids: list[int], vocab_size: int
) -> LLTokenizer:
    """The tokens that the tokenizer and the model both have.

    The model can write the text of an added token that it lacks, such as "[PAD]", in other tokens,
    which a mask must allow. An end token that the tokenizer lacks cannot be in a mask.
    """
    from llguidance import LLTokenizer

    try:
        tokenizer = json.loads(read())
        added = tokenizer.get("added_tokens") or []
        tokenizer["added_tokens"] = added = [each for each in added if each["id"] < vocab_size]
        _drop_beyond(tokenizer["model"], vocab_size)
        vocab = tokenizer["model"]["vocab"]  # a list, or ids by text
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        num_ids = 1 + max(chain(ids, (each["id"] for each in added)))
        ends = [each for each in eos_token_ids if each < num_ids]
        return LLTokenizer(json.dumps(tokenizer), eos_token=ends)
    except Exception as error:  # the library raises nothing narrower
        raise GrammarError(
            f"This model's tokenizer cannot follow a grammar: {_first_line(str(error))}."
        ) from error


def _drop_beyond(model: dict[str, Any], vocab_size: int) -> None:
    """Remove tokens that the model has no row for, and the merges that make them."""
    vocab = model["vocab"]
    if len(vocab) <= vocab_size:
        return
    if isinstance(vocab, list):
        model["vocab"] = vocab[:vocab_size]
        return
    model["vocab"] = kept = {text: each for text, each in vocab.items() if each < vocab_size}
    pairs = [each.split(" ") if isinstance(each, str) else each for each in model.get("merges", ())]
    if "merges" in model:
        model["merges"] = [
            pair for pair in pairs if all(text in kept for text in (*pair, "".join(pair)))
        ]


def _probe(matcher: LLMatcher) -> None:
    """Follow a grammar for a few tokens of a possible answer.

    Raises:
        GrammarError: no answer fits the grammar, or its answers need too many lexer states.
    """
    _refuse_error(matcher)
    answer = matcher
    for _ in range(NUM_PROBES):
        mask = int.from_bytes(answer.compute_bitmask(), "little")
        _refuse_error(answer)
        if not mask:
            raise GrammarError("The grammar allows nothing that this model can write.")
        answer = answer.deep_copy()
        answer.consume_token((mask & -mask).bit_length() - 1)
        if answer.is_stopped():
            break
    _refuse_error(answer)


def _refuse_error(matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(f"The grammar cannot be followed: {_in_words(matcher.get_error())}.")


def _in_words(error: str) -> str:
    """An error of the library as clients understand it, who know neither its options nor names."""
    for name, words in _WORDS.items():
        if name in error:
            return words
    # The pattern and what is wrong with it are on different lines.
    _, is_pattern, rest = error.partition("regex parse error:")
    _, _, problem = rest.partition("error: ")
    return f"regex parse error: {_first_line(problem)}" if is_pattern else _first_line(error)


def _first_line(text: str) -> str:
    """The first line of an error, without the grammar that the library repeats after it."""
    return text.strip().partition("\n")[0][:200].rstrip(".")
