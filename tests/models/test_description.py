"""A model's directory has one reader, and that finds what is where."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from disagg.api.served_model import ServedModel
from disagg.capacity.shapes import read_shape
from disagg.errors import ModelError
from disagg.models.description import describe_model
from tests.api.fakes import byte_level_core
from tests.api.test_service import model_directory
from tests.models.test_damaged_checkpoints import POINTER

TOOL_USE = """
{%- macro show(items) %}
    {%- if items %}{{ items[0].name }}{{ show(items[1:]) }}{% endif %}
{%- endmacro %}

  tool: {{ show(tools) }}
"""
PACKAGE = Path(__file__).parents[2] / "disagg"
READERS = (
    "models/description.py",
    "models/checkpoint.py",
    "models/gguf_model.py",
    "models/hub.py",
    "models/pooling.py",  # by a function that the description gives it
    "ingress/plan_requests.py",  # which writes what a request sends as one, to be described
)
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
    "model.safetensors.index.json",
)


def _nodes(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Of the sources with one of `words`, by their places."""
    for source in sorted(PACKAGE.rglob("*.py")):
        text = source.read_text()
        if any(word in text for word in words):
            for node in ast.walk(ast.parse(text)):
                yield str(source.relative_to(PACKAGE)), node


def test_nobody_else_names_a_file_of_it() -> None:
    """Messages and comments may; text that is a file's name or ends a path with it is to open it,
    and so is a pattern."""
    found = set()
    for place, node in _nodes(*FILES, ".safetensors"):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.rpartition("/")[2]
            if name in FILES or name.removeprefix("*") in (".safetensors", ".safetensors*"):
                found.add(place)
    assert found == set(READERS)


def test_nobody_else_reads_headers() -> None:
    """Others take the description's tensors; their type, and the sizes of theirs, are known to who
    loads them."""
    for place, node in _nodes("disagg.models.checkpoint"):
        if isinstance(node, ast.ImportFrom) and node.module == "disagg.models.checkpoint":
            names = {alias.name for alias in node.names}
            is_reader = place in (*READERS, "models/adapter.py")
            assert is_reader or names <= {"StoredTensor", "DTYPE_NBYTES", "Range"}, place


def test_what_is_not_asked_for_is_not_read(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    for name in FILES[1:]:
        (directory / name).write_text(POINTER)
    model = describe_model(directory)
    assert read_shape(str(directory)).config.vocab_size == model.config.vocab_size == 400
    (directory / "model.safetensors").unlink()
    for ask in (
        lambda: model.defaults,
        lambda: model.chat_template,
        lambda: model.special_tokens,
        lambda: model.tensors,
        model.read_tokenizer,
    ):
        with pytest.raises(ModelError, match="git-LFS pointer"):
            ask()


def test_where_templates_are_found(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    assert describe_model(directory).chat_template is None
    config: dict[str, Any] = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "rag", "template": "{{ documents[0].text }}"},
            {"name": "tool_use", "template": TOOL_USE},
            {"name": "default", "template": "{{ bos_token }}config"},
        ],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert describe_model(directory).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert rendered(directory) == "<s>config"
    assert rendered(directory, tools=[{"name": "look"}]) == "\n  tool: look"
    assert rendered(directory, documents=[{"text": "grounds"}]) == "grounds"
    assert rendered(directory, None, [{"name": "look"}], [{"text": "a"}]) == "\n  tool: look"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}file")
    assert rendered(directory) == "<s>file"
    assert rendered(directory, tools=[{"name": "look"}]) == "<s>file"  # the file counts alone
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0].name }}")
    assert rendered(directory) == "<s>file"
    assert rendered(directory, tools=[{"name": "look"}]) == "look"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(directory, str(tmp_path / "mine.jinja")) == "mine"
    with pytest.raises(ModelError, match=r"Cannot read the chat template .*: No such file"):
        rendered(directory, str(tmp_path / "absent.jinja"))
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        rendered(directory)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read as JSON"):
        rendered(directory)


def test_an_end_token_that_the_model_does_not_have_is_ignored(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [399, 400, 128009]}')
    model = describe_model(directory)
    assert model.eos_token_ids == (399,)
    (remark,) = model.remarks
    assert "The end token 400, 128009" in remark and "not below 400" in remark


def rendered(
    directory: Path,
    chat_template: str | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    documents: Sequence[Mapping[str, str]] = (),
) -> str:
    model = ServedModel.from_description(
        describe_model(directory), name="m", block_size=16, chat_template=chat_template
    )
    assert model.template is not None
    return model.template.render([], tools=tools, documents=documents)


@pytest.mark.parametrize("tools", [(), [{"name": "look"}, {"name": "rest"}]])
@pytest.mark.parametrize(
    "default", ["  {{ bos_token }}  \n\n", "{% set show = 'a' %}\n {{ show }} "]
)
def test_named_templates_are_transformers(
    tmp_path: Path, default: str, tools: list[dict[str, Any]]
) -> None:
    """White space at both ends, and macros that call themselves, as in Hermes-2-Pro."""
    directory = model_directory(tmp_path)
    named = {"tool_use": TOOL_USE, "default": default}
    config = [{"name": name, "template": source} for name, source in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": config})
    )
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level_core(), bos_token="<s>")
    reference.chat_template = named
    hello = [{"role": "user", "content": "hello"}]
    expected = reference.apply_chat_template(hello, tools=tools or None, tokenize=False)
    assert rendered(directory, tools=tools) == expected


def test_an_adapter_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"is a LoRA adapter, .* alone; serve its model with"):
        describe_model(tmp_path)


def test_a_tokenizer_is_not_made_up(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    os.remove(directory / "tokenizer.json")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json. Save the tokenizer"):
        describe_model(directory).read_tokenizer()
