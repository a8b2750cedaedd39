"""The demo models' tokenizer: byte-level BPE over our own conversations, digits one by one.

Single digits make every number a string of the same ten tokens, which arithmetic and the recall of
codes need.  All 256 bytes are in the vocabulary, so any UTF-8 text can be encoded.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training import demo_tasks as tasks
from training import demo_tools as tools
from training import demo_world as world
from training.demo_tasks import Turn

VOCAB_SIZE = 1024
TOOLS_VOCAB_SIZE = 1152
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PAD_ID, IM_START_ID, IM_END_ID = 0, 1, 2
MAX_LENGTH = 2048

# Words take their leading space along; a digit never does, so "7" is the same token everywhere.
WORD_PATTERN = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# demo-small and demo-large learned nothing about tools: with them, calls can only be forced.
CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- for tool in tools -%}{{- tool['function'] | tojson -}}{{- '\\n' -}}{%- endfor -%}
{{- 'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- else -%}
{%- for part in message['content'] or [] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>' -}}{{- call['function'] | tojson -}}{{- '</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def _corpus(seed: int, num_texts: int) -> list[str]:
    """Return texts of every task, words and templates in about the proportion training has."""
    rng = random.Random(seed)
    kinds = tuple(tasks.FACT_KINDS)
    texts: list[str] = []
    for _ in range(num_texts):
        facts = tasks.draw_facts(rng, 6, kinds)
        turns: list[Turn] = [tasks.mixed_turn(rng), tasks.knowledge_turn(rng), tasks.chat_turn(rng)]
        turns.append(tasks.recall_turn(rng, facts))
        texts.append(tasks.document(rng, facts, 3))
        texts += [f"user\n{turn.question}\nassistant\n{turn.answer}" for turn in turns]
        # A word opens an answer without its space: the bare form must become a token too.
        texts += [" ".join(turn.answer for turn in turns), "system\n" + tasks.SYSTEM_TEXTS[0]]
        texts += [turn.answer.split()[0] for turn in turns]
        texts += [rng.choice(world.LIST_WORDS) for _ in range(3)]
        texts += [rng.choice(world.PLACES + world.COLOURS)]
    return texts


def train_tokenizer(seed: int = 0, num_texts: int = 6000) -> Tokenizer:
    """Train the byte-level BPE; deterministic in `seed`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(seed, num_texts), trainer)
    return tokenizer


def extend_tokenizer(tokenizer: Tokenizer, seed: int = 0, num_texts: int = 1500) -> Tokenizer:
    """Return the tokenizer with more merges, of shown functions, and with the marks of calls.

    All earlier tokens keep their ids, and earlier merges come first, so that the model that knows
    them can be trained on.  Functions then take half of the tokens.  Deterministic in `seed`.
    """
    content = json.loads(tokenizer.to_str())
    vocabulary, merges = content["model"]["vocab"], content["model"]["merges"]
    counts: Counter[tuple[str, ...]] = Counter()
    rng = random.Random(seed)
    for _ in range(num_texts):
        for line in tools.example(rng).replace(tools.CALL_END, tools.CALL_BEGIN).splitlines():
            for text in line.split(tools.CALL_BEGIN):
                words = tokenizer.pre_tokenizer.pre_tokenize_str(text)
                counts.update(
                    tuple(token.value for token in tokenizer.model.tokenize(word))
                    for word, _ in words
                )
    while len(vocabulary) < TOOLS_VOCAB_SIZE - 2:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in counts.items():
            for pair in pairwise(word):
                pairs[pair] += count
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(list(best))
        vocabulary.setdefault("".join(best), len(vocabulary))
        counts = Counter({_merged(word, best): count for word, count in counts.items()})
    extended = Tokenizer.from_str(json.dumps(content))
    marks = (tools.CALL_BEGIN, tools.CALL_END)
    extended.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    return extended


def _merged(word: tuple[str, ...], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for token in word:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return tuple(merged)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the folder's tokenizer; where there is none yet, train it and put it there.

    A model is worth nothing with any other tokenizer, so once trained it is never trained again.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer().save(str(path))
    return Tokenizer.from_file(str(path))


def load_tools_tokenizer(folder: Path, base: Path) -> Tokenizer:
    """Return the folder's tokenizer for calls; where there is none, extend the one in `base`."""
    path = folder / "tokenizer-tools.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        extend_tokenizer(Tokenizer.from_file(str(base / "tokenizer.json"))).save(str(path))
    return Tokenizer.from_file(str(path))


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json, special_tokens_map.json, chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    pad, im_start, im_end = SPECIAL_TOKENS
    named: dict[str, object] = {
        "eos_token": im_end,
        "pad_token": pad,
        "additional_special_tokens": [im_start],
    }
    settings = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    for name, content in (("tokenizer_config", settings), ("special_tokens_map", named)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
