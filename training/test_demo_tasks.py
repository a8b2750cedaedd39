"""The demo models' tasks, tokenizer, training loop and exported folders."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path

import jinja2
import pytest
import torch
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import demo_tasks as tasks
from training import demo_world as world
from training import train_demo_models as training
from training.demo_batches import IGNORE, RowBuilder, make_batch
from training.demo_evaluate import all_levels, evaluate
from training.demo_export import export, load_exported
from training.demo_model import SHAPES, Decoder
from training.demo_tokenizer import CHAT_TEMPLATE, IM_END_ID, VOCAB_SIZE

ASSETS = Path(__file__).resolve().parents[1] / "disagg" / "assets"
MODELS = ("demo-small", "demo-large", "demo-tools")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(ASSETS / "demo-large" / "tokenizer.json"))


def turns_named(prefix: str, count: int = 200) -> list[tasks.Turn]:
    """Return `count` turns, drawn from both mixtures in turn."""
    rng = random.Random(prefix)
    mixtures = (tasks.MAIN_TASKS, tasks.FINAL_TASKS)
    drawn = (tasks.mixed_turn(rng, mixtures[draw % 2]) for draw in range(count * 20))
    return [turn for turn in drawn if turn.task.startswith(prefix)][:count]


def test_equal_seeds_give_equal_turns_and_other_seeds_others() -> None:
    first, again, other = (
        [tasks.mixed_turn(rng) for _ in range(50)]
        for rng in (random.Random(1), random.Random(1), random.Random(2))
    )
    assert first == again
    assert first != other


def test_arithmetic_answers_are_right() -> None:
    signs = {"plus": "+", "minus": "-", "times": "*"}
    for turn in turns_named("add") + turns_named("subtract") + turns_named("multiply"):
        text = " ".join(signs.get(word, word) for word in turn.question.split())
        match = re.search(r"(\d+) ?([-+*]) ?(\d+)", text)
        assert match, turn
        first, sign, second = int(match[1]), match[2], int(match[3])
        right = {"+": first + second, "-": first - second, "*": first * second}[sign]
        assert turn.answer == str(right)
        assert right >= 0


def test_the_final_mixture_is_mostly_arithmetic_with_longer_operands() -> None:
    assert sum(weight for weight, _ in tasks.FINAL_TASKS) == pytest.approx(1.0)
    rng = random.Random(4)
    names = [tasks.mixed_turn(rng, tasks.FINAL_TASKS).task for _ in range(2000)]
    arithmetic = [name for name in names if name.startswith(("add", "subtract", "multiply"))]
    assert 0.7 < len(arithmetic) / len(names) < 0.82
    assert {"add-5", "subtract-4", "multiply-3"} <= set(arithmetic)


def test_a_final_runs_batches_hold_the_final_mixture(tokenizer: Tokenizer) -> None:
    main, final = (
        make_batch(tokenizer, "seed", 256, 8, recall_share=0.0, mixture=mixture)[0]
        for mixture in (tasks.MAIN_TASKS, tasks.FINAL_TASKS)
    )
    pattern = re.compile(r"\d+ ?(?:[-+*]|plus|minus|times) ?\d+")
    num_main, num_final = (
        sum(len(pattern.findall(text)) for text in tokenizer.decode_batch(ids.tolist()))
        for ids in (main, final)
    )
    assert num_final > 1.5 * num_main


def test_sorted_reversed_and_copied_answers_hold_the_words_of_the_question() -> None:
    for turn in turns_named("sort-words"):
        words = turn.question.split(": ")[1].split()
        assert turn.answer.split() == sorted(words)
    for turn in turns_named("sort-numbers"):
        numbers = [int(word) for word in turn.question.split(": ")[1].split()]
        descending = "large to small" in turn.question
        assert [int(word) for word in turn.answer.split()] == sorted(numbers, reverse=descending)
    for turn in turns_named("reverse"):
        text = turn.question.split(": ")[1]
        whole = text[::-1] if text.isdigit() else " ".join(reversed(text.split()))
        assert turn.answer == whole
    for turn in turns_named("copy"):
        assert turn.answer == turn.question.split(": ")[1]


def test_no_two_facts_of_a_document_answer_the_same_question() -> None:
    rng = random.Random(0)
    facts = tasks.draw_facts(rng, 60, tuple(tasks.FACT_KINDS))
    assert len({(id(fact.kind), fact.subject) for fact in facts}) == 60
    text = tasks.document(rng, facts, 10)
    assert all(fact.value in text and fact.subject in text for fact in facts)


def test_the_words_recall_asks_for_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in world.NAMES + world.PLACES + world.COLOURS + world.LIST_WORDS:
        assert len(tokenizer.encode(f" {word}").ids) == 1, word


def test_any_text_survives_the_tokenizer_and_digits_stay_single(tokenizer: Tokenizer) -> None:
    text = "Ünïcode 漢字 🙂\n\ttab  two spaces, 'quotes' <b>"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert len(tokenizer.encode("9081726354").ids) == 10


def test_training_reads_what_the_chat_template_renders(tokenizer: Tokenizer) -> None:
    template = jinja2.Environment(autoescape=True).from_string(
        "{% autoescape false %}" + CHAT_TEMPLATE + "{% endautoescape %}"
    )
    turn = tasks.Turn("What is 1 + 2?", "3", "add-1")
    messages = [{"role": "user", "content": turn.question}]
    asked, answer = tasks.render(turn)
    assert template.render(messages=messages, add_generation_prompt=True) == asked
    row = RowBuilder(tokenizer, 64)
    row.add_turn(turn)
    messages.append({"role": "assistant", "content": turn.answer})
    whole = template.render(messages=messages, add_generation_prompt=False)
    assert row.ids == tokenizer.encode(whole).ids
    assert [label for label in row.labels if label != IGNORE] == tokenizer.encode(answer).ids


def test_the_chat_template_shows_tools_and_their_calls() -> None:
    function = {"name": "add", "parameters": {"type": "object"}}
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
    ]
    template = jinja2.Environment(autoescape=True).from_string(
        "{% autoescape false %}" + CHAT_TEMPLATE + "{% endautoescape %}"
    )
    shown = template.render(messages=messages, tools=[{"type": "function", "function": function}])
    system, _, asked = shown.partition("<|im_end|>\n")
    assert json.loads(system.splitlines()[1]) == function
    said = asked.split("<|im_end|>\n")
    assert said[1].startswith("<|im_start|>assistant\n<tool_call>")
    assert json.loads(said[1].partition("<tool_call>")[2].removesuffix("</tool_call>"))
    assert said[2] == "<|im_start|>tool\n3"


def test_the_models_that_ship_have_this_chat_template() -> None:
    for name in MODELS:
        settings = json.loads((ASSETS / name / "tokenizer_config.json").read_text())
        assert settings["chat_template"] == CHAT_TEMPLATE


def test_labels_are_the_next_tokens_of_answers_only(tokenizer: Tokenizer) -> None:
    ids, labels = make_batch(tokenizer, "seed", 512, 4, recall_share=0.5)
    again, _ = make_batch(tokenizer, "seed", 512, 4, recall_share=0.5)
    assert torch.equal(ids, again)
    shifted = torch.cat((ids[:, 1:], torch.zeros(4, 1, dtype=torch.int64)), dim=1)
    asked = labels[:, :-1] != IGNORE
    assert torch.equal(labels[:, :-1][asked], shifted[:, :-1][asked])
    assert 0.1 < (labels != IGNORE).float().mean() < 0.6
    assert (labels == IM_END_ID).any(-1).all()


@pytest.mark.parametrize("distance", [500, 1500])
def test_the_asked_fact_stands_as_far_back_as_the_level_says(
    tokenizer: Tokenizer, distance: int
) -> None:
    level = next(level for level in all_levels() if level.name == f"recall-{distance}")
    turn = level.make(random.Random(3), tokenizer)
    tail = turn.question[turn.question.rindex(turn.answer) :]
    assert distance <= len(tokenizer.encode(tail).ids) < 2048


def arguments_for(folder: Path, final: bool = False) -> argparse.Namespace:
    return argparse.Namespace(
        model="small",
        final=final,
        export=False,
        steps=3,
        batch_tokens=512,
        rate=4e-3,
        seed=0,
        device="cpu",
        folder=folder,
        compile=False,
    )


def test_a_resumed_run_ends_where_an_unbroken_one_does(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    unbroken = training.Trainer(arguments_for(tmp_path / "a"), tokenizer)
    unbroken.run()
    broken = training.Trainer(arguments_for(tmp_path / "b"), tokenizer)
    broken.step()
    broken.save()
    resumed = training.Trainer(arguments_for(tmp_path / "b"), tokenizer)
    assert resumed.progress.step == 1
    resumed.run()
    for name, tensor in unbroken.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_the_final_run_begins_where_the_main_one_ended_and_resumes_like_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    main = training.Trainer(arguments_for(tmp_path), tokenizer)
    main.step()
    main.save()
    final = training.Trainer(arguments_for(tmp_path, final=True), tokenizer)
    assert final.progress == training.Progress("final")
    for name, tensor in main.model.state_dict().items():
        assert torch.equal(tensor, final.model.state_dict()[name]), name
    final.arguments.batch_tokens = 2048
    final.step()
    final.save()
    resumed = training.Trainer(arguments_for(tmp_path, final=True), tokenizer)
    assert (resumed.progress.schedule, resumed.progress.step) == ("final", 1)
    with pytest.raises(SystemExit, match="final"):
        training.Trainer(arguments_for(tmp_path), tokenizer)


@pytest.mark.parametrize("schedule", [training.MAIN, training.FINAL], ids=lambda s: s.name)
def test_the_learning_rate_warms_up_stays_and_ends_at_zero(schedule: training.Schedule) -> None:
    late = 10 * training.WARMUP_STEPS
    assert schedule.rate_factor(0, 0.0) == 0.0
    assert schedule.rate_factor(late, schedule.decay_from) == pytest.approx(1.0)
    assert 0.0 < schedule.rate_factor(late, 0.99) < 0.1
    assert schedule.rate_factor(late, 1.0) == 0.0


def test_rows_of_every_length_are_seen_to_the_end() -> None:
    assert training.MAIN.stage_at(0.0).rows == ((256, 0.6),)
    for schedule in (training.MAIN, training.FINAL):
        assert {length for length, _ in schedule.stage_at(1.0).rows} == {256, 512, 1024, 2048}


def test_an_exported_model_is_the_trained_one_in_bfloat16(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    model = Decoder(SHAPES["small"])
    export(model, tokenizer, tmp_path)
    again = load_exported(SHAPES["small"], tmp_path)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor.bfloat16().float())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_what_we_trained(name: str, tokenizer: Tokenizer) -> None:
    import transformers  # takes seconds

    folder = ASSETS / name
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_exported(SHAPES[name.removeprefix("demo-")], folder)
    ids = torch.randint(VOCAB_SIZE, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = reference(ids).logits, ours.logits(ours(ids, torch.float32))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_the_large_model_answers(tokenizer: Tokenizer) -> None:
    model = load_exported(SHAPES["large"], ASSETS / "demo-large")
    accuracies = evaluate(model, tokenizer, num_samples=4, seed=1, names=("recall-500", "chat"))
    assert min(accuracies.values()) >= 0.5


def test_all_models_together_stay_small() -> None:
    files = [path for name in MODELS for path in (ASSETS / name).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 20e6
