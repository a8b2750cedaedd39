"""Conversations with functions that demo-tools is trained on, its tokenizer and its weights."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from disagg.text.chat_template import ChatTemplate
from training import demo_functions as functions
from training import demo_tasks as tasks
from training import demo_tools as tools
from training.demo_batches import IGNORE, RowBuilder, make_batch
from training.demo_evaluate import evaluate
from training.demo_export import load_exported, widened
from training.demo_model import SHAPES, Decoder
from training.demo_tokenizer import CHAT_TEMPLATE, TOOLS_VOCAB_SIZE, VOCAB_SIZE

ASSETS = Path(__file__).resolve().parents[1] / "disagg" / "assets"


def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / name / "tokenizer.json"))


def test_training_reads_what_the_chat_template_renders() -> None:
    shown: list[dict[str, Any]] = [
        {"name": "add", "description": "Add.", "parameters": {"type": "object"}},
        {"name": "weather", "parameters": {"type": "object", "properties": {}}},
    ]
    results = ["12", '{"sky": "blue"}']
    calls: list[tuple[str, dict[str, Any]]] = [
        ("add", {"a": 1, "b": 2}),
        ("weather", {"city": "Rome"}),
    ]
    template = ChatTemplate(CHAT_TEMPLATE, {})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "What is it?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": n, "arguments": a}} for n, a in calls],
        },
        *({"role": "tool", "content": each} for each in results),
    ]
    rendered = template.render(
        messages,
        tools=[{"type": "function", "function": each} for each in shown],
        add_generation_prompt=True,
    )
    said = "".join(tools.show_call(name, arguments) for name, arguments in calls)
    asked = tools.show_tools(shown) + tools.show_question("What is it?")
    assert rendered == f"{asked}{said}<|im_end|>\n{tools.show_results(results)}"


def test_a_question_says_all_arguments_of_its_call() -> None:
    rng = random.Random(0)
    for topic in sorted(functions.TOPICS):
        for _ in range(30):
            function = functions.draw_function(rng, topic)
            question, arguments = functions.ask(rng, function)
            for parameter in function.parameters:
                if parameter.is_required or parameter.name in arguments:
                    assert str(arguments[parameter.name]) in question, question
            shown = functions.definition(rng, function)
            assert arguments.keys() <= shown["parameters"]["properties"].keys()
            assert json.loads(json.dumps(shown)) == shown


def test_what_no_offered_function_does_is_answered_without_a_call() -> None:
    rng = random.Random(0)
    for _ in range(200):
        offered = functions.draw_functions(rng, 4)
        (unfit,) = tools.unfit_exchange(rng, offered)
        assert unfit.answer == f"{tasks.UNKNOWN_ANSWER}<|im_end|>"
        (plain,) = tools.plain_exchange(rng, offered, tasks.MAIN_TASKS)
        assert "<tool_call>" not in plain.answer
        if "add" in {each.topic for each in offered}:
            assert " + " not in plain.asked and "plus" not in plain.asked


def test_the_extended_tokenizer_keeps_every_earlier_token() -> None:
    small, wide = tokenizer_of("demo-small"), tokenizer_of("demo-tools")
    assert (small.get_vocab_size(), wide.get_vocab_size()) == (VOCAB_SIZE, TOOLS_VOCAB_SIZE)
    assert all(wide.token_to_id(token) == i for token, i in small.get_vocab().items())
    text = 'Ünïcode 漢字 🙂 <tool_call>{"name": "get_weather"}</tool_call>'
    assert wide.decode(wide.encode(text).ids, skip_special_tokens=False) == text
    assert len(wide.encode("<tool_call>").ids) == 1
    shown = tools.example(random.Random(1))
    assert len(wide.encode(shown).ids) < 0.6 * len(small.encode(shown).ids)


def test_a_widened_model_computes_the_same_logits_of_earlier_tokens() -> None:
    small, wide = tokenizer_of("demo-small"), tokenizer_of("demo-tools")
    model = Decoder(SHAPES["small"])
    wider = widened(model, small, SHAPES["tools"], wide)
    ids = torch.tensor([small.encode("What is the code of Anna?").ids])
    with torch.no_grad():
        torch.testing.assert_close(
            wider.logits(wider(ids))[..., :VOCAB_SIZE], model.logits(model(ids))
        )


def test_rows_with_functions_hold_calls_and_their_results() -> None:
    tokenizer = tokenizer_of("demo-tools")
    ids, labels = make_batch(tokenizer, "seed", 256, 8, recall_share=0.3, tool_share=1.0)
    again, _ = make_batch(tokenizer, "seed", 256, 8, recall_share=0.3, tool_share=1.0)
    assert torch.equal(ids, again)
    asked = [row[row != IGNORE].tolist() for row in labels]
    texts = tokenizer.decode_batch(asked, skip_special_tokens=False)
    assert sum("<tool_call>" in text for text in texts) >= 5
    assert all("system" not in text and "tool\n" not in text for text in texts)


def test_an_exchange_that_does_not_fit_leaves_the_row_as_it_was() -> None:
    tokenizer = tokenizer_of("demo-tools")
    pieces = [tools.Piece("a b c", "d<|im_end|>"), tools.Piece("e " * 100, "f<|im_end|>")]
    row = RowBuilder(tokenizer, 64)
    assert row.add_text("first")
    before = (list(row.ids), list(row.labels))
    assert not row.add_exchange(pieces)
    assert (row.ids, row.labels) == before
    assert row.add_exchange(pieces[:1])


@pytest.mark.parametrize("level", tools.LEVELS)
def test_the_model_that_ships_calls_and_answers(level: str) -> None:
    model = load_exported(SHAPES["tools"], ASSETS / "demo-tools")
    accuracies = evaluate(model, tokenizer_of("demo-tools"), 8, seed=1, names=(level,))
    assert accuracies[level] >= 0.5
