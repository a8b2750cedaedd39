"""Chat templates of real models, which the source archive of llama-cpp-python carries.

`make test-families` fetches it (77 MB).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template

from disagg.errors import InvalidRequest
from disagg.text.chat_template import ChatTemplate
from disagg.text.tool_parsers.registry import tool_format_of
from tests.families.test_real_tokenizers import CALLED, FETCHED, TOOL

TEMPLATES = FETCHED / "templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Templates whose calls are read back, by format. Those of other formats are refused with tools.
READ = {
    "glm45": 7, "granite": 1, "hermes": 10, "kimi_k2": 3, "llama3_json": 3, "minimax_m2": 1,
    "mistral": 4, "openai": 1, "qwen3_coder": 5, "deepseek_v3": 1, "deepseek_v32": 3, "gemma4": 2,
    "lfm2": 3, "cohere_command3": 2, "gigachat3": 2, "minimax": 3, "nemotron_json": 1,
    "minicpm5": 1, "hy_v3": 1, "functionary": 1,
}  # fmt: skip


def templates() -> dict[str, str]:
    files = sorted(Path(TEMPLATES).glob("*.jinja"))
    assert files, "make test-families fetches them"
    return {file.stem: file.read_text() for file in files}


def by_transformers(source: str, messages: Any) -> str | None:
    """The prompt as transformers renders it; None if it fails."""
    try:
        prompt: str = _compile_jinja_template(source).render(
            messages=messages, tools=[TOOL], documents=None, add_generation_prompt=True, **TOKENS
        )
    except (jinja2.TemplateError, TypeError, ValueError):
        return None
    return prompt


def test_prompts_are_those_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    seen: Counter[str] = Counter()
    for name, source in templates().items():
        for messages in (CALLED[:1], CALLED):
            expected = by_transformers(source, messages)
            try:
                rendered = ChatTemplate(source, TOKENS).render(messages, tools=[TOOL])
            except InvalidRequest:
                rendered = None
            assert rendered == expected, name
            seen["equal" if rendered is not None else "fail in both"] += 1
    with capsys.disabled():
        print(f"\nPrompts of transformers and of ours: {dict(seen)}")


def test_calls_that_templates_show_are_read_back(capsys: pytest.CaptureFixture[str]) -> None:
    found: Counter[str] = Counter()
    for source in templates().values():
        template = ChatTemplate(source, TOKENS)
        form = tool_format_of(template)
        if template.shows_tools:
            found[form.names[0] if form is not None else "unknown"] += 1
    with capsys.disabled():
        print(f"\nFormats of calls: {dict(found)}")
    found.pop("unknown")
    assert dict(found) == READ
