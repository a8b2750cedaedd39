from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from disagg.errors import InvalidRequest
from disagg.text.chat_template import CallShape, ChatTemplate, TemplateTooSlow
from tests.api.fakes import CHATML, byte_level_core

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if loop.first and system %}[{{ system }}] {% endif %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ '[INST] ' ~ message['content'] ~ ' [/INST]' }}{% endif %}
    {%- if not loop.last %}{% continue %}{% endif %}
{{ eos_token }}
{% endfor %}
"""
TOOLS = """{%- set space = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{% set space.last = loop.index0 %}{% endif -%}
<{{ m.role }}>{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor -%}
{%- endfor -%}
{{ space.last }} {{ messages | tojson(indent=2) }} {{ strftime_now('%Y') | length }}
{{- dict(a=1) | tojson }}{{ '<é>' | tojson }}
{%- if enable_thinking is defined and enable_thinking is false %} quiet{% endif %}"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "  be kind "},
        {"role": "user", "content": "1 < 2 & 'x'\n\n"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "ünïcode 😀"},
    ],
    [
        {"role": "user", "content": "weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
    ],
]


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("source", [CHATML, LLAMA, TOOLS])
def test_equal_to_transformers(
    source: str, conversation: list[dict[str, Any]], generation_prompt: bool
) -> None:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    reference = PreTrainedTokenizerFast(tokenizer_object=byte_level_core(), **tokens)
    expected = reference.apply_chat_template(
        conversation,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=generation_prompt,
        enable_thinking=False,
    )
    rendered = ChatTemplate(source, tokens).render(
        conversation,
        add_generation_prompt=generation_prompt,
        arguments={"enable_thinking": False},
    )
    assert rendered == expected


PARTS = "{% for m in messages %}{% for p in m.content %}IMAGE{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "mark", "needs_parts"),
    [
        (CHATML, None, False),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None, False),
        (PARTS.replace("IMAGE", "{{ p.text }}"), None, False),
        (
            PARTS.replace("IMAGE", "{{ '<image>\n' if p.type == 'image' else p.text }}"),
            "<image>\n",
            True,
        ),
        (
            "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
            "{% for p in m.content %}{% if p.type == 'image' or 'image_url' in p %}"
            "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in p %}"
            "{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}",
            "<|vision_start|><|image_pad|><|vision_end|>",
            False,
        ),
    ],
    ids=["texts only", "prints the list", "leaves images out", "as Llava", "as Qwen2-VL"],
)
def test_what_a_template_writes_for_an_image(
    source: str, mark: str | None, needs_parts: bool
) -> None:
    template = ChatTemplate(source, {})
    assert (template.image_mark, template.needs_parts) == (mark, needs_parts)


def test_a_template_that_refuses_is_the_clients_error() -> None:
    twice = [{"role": "user", "content": "a"}] * 2
    with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
        ChatTemplate(LLAMA, {}).render(twice)
    assert (caught.value.code, caught.value.param) == ("invalid_prompt", "messages")


def test_output_is_bounded() -> None:
    source = "{% for i in range(50000) %}{{ 'a' * 1000 }}{% endfor %}"
    with pytest.raises(InvalidRequest, match="too long"):
        ChatTemplate(source, {}).render([])


def test_time_is_an_argument() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2020, 1, 2))
    assert template.render([]) == "02 Jan 2020"


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SELF_CALLING = """{% macro again(n) %}{% if n %}{{ again(n - 1) }}{{ again(n - 1) }}{% endif %}
{% endmacro %}{{ again(60) }}"""


@pytest.mark.parametrize("source", [ENDLESS, SELF_CALLING], ids=["loops", "calls"])
def test_time_is_bounded(source: str) -> None:
    timer = itertools.count().__next__  # a second passes between two looks
    with pytest.raises(TemplateTooSlow, match=r"longer than 7 s"):
        ChatTemplate(source, {}, timer=timer).render([], limit_s=7)
    assert timer() == 7 + 2


def test_each_rendering_and_each_thread_has_its_own_time() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    messages = [{"content": str(number)} for number in range(50)]
    wanted = "".join(str(number) for number in range(50))
    with pytest.raises(TemplateTooSlow):
        template.render(messages, limit_s=-1.0)
    with ThreadPoolExecutor(4) as pool:
        late = [pool.submit(template.render, messages, limit_s=-1.0) for _ in range(20)]
        rendered = [pool.submit(template.render, messages) for _ in range(20)]
        assert {each.result() for each in rendered} == {wanted}
        assert all(isinstance(each.exception(), TemplateTooSlow) for each in late)


CALL = "{% for call in message.tool_calls %}{{ call.function.name }}:"
AS_JSON, AS_TEXT = "{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}"
SHOWN = {
    CallShape(): CALL + AS_JSON,
    # Qwen3's looks into the text of each message.
    CallShape(no_content=""): "{% if 'x' in message.content %}{% endif %}" + CALL + AS_JSON,
    # DeepSeek V3's adds arguments to a text, and looks at calls only where there is no text.
    CallShape(True): "{% if message.content is none %}" + CALL + AS_TEXT + "{% endfor %}{% endif %}"
    "{% for never in [] %}",
    CallShape(True, ""): "{{ message.content + '' }}" + CALL + AS_TEXT,
}


@pytest.mark.parametrize("shape", SHOWN)
def test_a_template_takes_earlier_calls_in_the_shape_that_it_was_written_for(
    shape: CallShape,
) -> None:
    source = "{% for message in messages if message.role == 'assistant' %}" + SHOWN[shape]
    template = ChatTemplate(source + "{% endfor %}{% endfor %}", {})
    assert template.call_shape == shape


@pytest.mark.parametrize(
    "content",
    [
        "{{ message.content }}",  # GLM-4.6 and MiniMax-M2
        "{{ 'None: ' ~ message.content }}",
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{{ message.content | string }}{% endif %}",
    ],
)
def test_a_message_without_text_is_not_the_word_none(content: str) -> None:
    source = f"{{% for message in messages %}}{content}{CALL}{AS_JSON}{{% endfor %}}{{% endfor %}}"
    assert ChatTemplate(source, {}).call_shape == CallShape(no_content="")


def test_a_template_without_calls_gets_the_usual_shape() -> None:
    for source in ("{{ raise_exception('no') }}", "{% for m in 5 %}{% endfor %}"):
        assert ChatTemplate(source, {}).call_shape == CallShape()


def test_what_a_template_reads_from_outside_is_known() -> None:
    source = """{%- if not thinking is defined %}{% set thinking = false %}{% endif %}
    {%- macro show(item, effort) %}{{ item ~ effort ~ identity }}{% endmacro %}
    {%- for message in messages %}{% set content = message.content %}{{ show(content, bos_token) }}
    {%- endfor %}{{ content }}{{ tools }}{{ strftime_now('%d') }}{{ namespace(x=colour) }}"""
    assert ChatTemplate(source, {"bos_token": "<s>"}).arguments == {
        "thinking",
        "identity",
        "colour",
    }
