"""Measures the cost of structured output: compiling grammars, and a mask for each token.

    python -m bench.grammar [--tiny]

`demo` is the bundled models' vocabulary of 1,024 tokens. `large` is a synthetic vocabulary of
128,000 words that are as long as those of large models. `load` happens once in each process that
gets a grammar, `compile` once for each grammar. `mask` is the engine's work for a token: it applies
the last token and fills the mask of the next one. Answers are random tokens among the allowed ones.
`apply` puts one mask on a row of logits (CPU, one thread). An answer without a grammar costs none
of this.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.report import finish, print_table
from disagg.config import ASSETS
from disagg.engine.device.token_masks import TokenMasks
from disagg.engine.sched.grammar import Grammars
from disagg.messages import Grammar

DEMO = ASSETS / "demo-small" / "tokenizer.json"
DEMO_EOS_ID = 2
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 4},
        "about": {"type": "string", "maxLength": 600},
    },
    "required": ["name", "age", "tags", "about"],
    "additionalProperties": False,
}
GRAMMARS = {
    "any object": Grammar("json", '{"type":"object"}'),
    "schema": Grammar("json", json.dumps(PERSON)),
    "expression": Grammar("regex", r"([a-z]{2,12} ){20,200}[0-9]+"),
    "choice": Grammar("choice", json.dumps([f"answer number {i}" for i in range(100)])),
}


def made_up_tokenizer(num_tokens: int) -> str:
    rng = random.Random(0)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = dict.fromkeys(alphabet)
    while len(words) < num_tokens:
        letters = "".join(rng.choices("etaoinshrdlucmfwypvbgkqjxz", k=rng.randint(2, 9)))
        words[rng.choice(("Ġ", "", "")) + rng.choice((letters, letters.capitalize()))] = None
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    return str(core.to_str())


def seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


def rows_of(name: str, text: str, eos_id: int, num_steps: int) -> list[dict[str, Any]]:
    grammars = Grammars(lambda: text, (eos_id,))
    load_s = seconds(grammars.compile(Grammar("regex", "warm up")).result)
    num_tokens = Tokenizer.from_str(text).get_vocab_size()
    rows = []
    for kind, grammar in GRAMMARS.items():
        compile_s = seconds(lambda it=grammar: grammars.compile(it).result())  # type: ignore[misc]
        fills, applies = walk(grammars, grammar, eos_id, num_tokens, num_steps)
        rows.append(
            {
                "vocabulary": name,
                "grammar": kind,
                "load ms": load_s * 1e3,
                "compile ms": compile_s * 1e3,
                "mask us": statistics.median(fills) * 1e6,
                "mask p99 us": sorted(fills)[len(fills) * 99 // 100] * 1e6,
                "apply us": statistics.median(applies) * 1e6,
            }
        )
    return rows


def walk(
    grammars: Grammars, grammar: Grammar, eos_id: int, num_tokens: int, num_steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of filling and of applying each mask."""
    rng = random.Random(1)
    fills: list[float] = []
    applies: list[float] = []
    state, tokens = grammars.follow(grammar, 0), list[int]()
    mask = torch.empty(state.num_mask_nbytes // 4, dtype=torch.int32)
    logits, cpu = torch.zeros(1, num_tokens), torch.device("cpu")

    def fill() -> None:
        state.fill_mask(tokens, mask.data_ptr())

    def apply() -> None:
        TokenMasks([0], mask.unsqueeze(0), cpu).apply_(logits)

    while len(fills) < num_steps:
        fills.append(seconds(fill))
        applies.append(seconds(apply))
        allowed = (logits[0] == 0).nonzero().flatten().tolist()
        tokens.append(rng.choice(allowed))
        logits.zero_()
        if tokens[-1] == eos_id:
            state, tokens = grammars.follow(grammar, 0), []
    return fills, applies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a rehearsal in seconds")
    is_tiny = parser.parse_args().tiny
    torch.set_num_threads(1)
    num_tokens, num_steps = (2_000, 50) if is_tiny else (128_000, 2_000)
    rows = rows_of("demo", DEMO.read_text(encoding="utf-8"), DEMO_EOS_ID, num_steps)
    rows += rows_of("large", made_up_tokenizer(num_tokens), num_tokens, num_steps)
    print_table(rows)
    finish("grammar", rows)


if __name__ == "__main__":
    main()
