"""The third step of a request: the token ids of its prompts.

A prompt that cannot fit is refused by its length, before it is tokenized. Long prompts are
tokenized in a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from disagg.api.json_body import load_arguments
from disagg.api.off_loop import off_loop
from disagg.api.served_model import ServedModel
from disagg.api.wanted import Conversation, JsonText, Prompt, Text
from disagg.errors import ContextLengthExceeded, InvalidRequest
from disagg.text.chat_template import RENDER_LIMIT_S
from disagg.text.template_sandbox import TemplateTooSlow

INLINE_NUM_CHARS = 8192  # more than this goes to a thread
INLINE_S = 0.02  # a template that takes longer, even for less, goes there too
MESSAGE_COST_NUM_CHARS = 64  # rendering a message costs about as much as encoding so many


async def tokenise(
    prompts: Sequence[Prompt], model: ServedModel, nbytes: int = 0
) -> list[list[int]]:
    """The token ids of each prompt; those that are given as such are not looked at.

    Args:
        nbytes: of the body that they came in.

    Raises:
        InvalidRequest: the model has no chat template, or its template refuses a conversation.
        ContextLengthExceeded: it is clear that a prompt is too long.
    """
    return [await _token_ids(prompt, model, nbytes) for prompt in prompts]


async def _token_ids(prompt: Prompt, model: ServedModel, nbytes: int) -> list[int]:
    if isinstance(prompt, Conversation):
        return await _conversation(prompt, model, nbytes)
    if not isinstance(prompt, Text):
        return prompt
    text, special = prompt.text, prompt.add_special_tokens
    _check_fits(_fewest_tokens(len(text), model), model, "prompt")
    encode = model.tokenizer.encode
    return await _maybe_in_thread(
        len(text), lambda limit_s: encode(text, add_special_tokens=special)
    )


async def _conversation(asked: Conversation, model: ServedModel, nbytes: int) -> list[int]:
    template, shield = model.template, model.tokenizer.shield
    if template is None:
        raise InvalidRequest(
            f"The model {model.name!r} has no chat template, so it cannot take messages; use"
            " /v1/completions, or start the server with --chat-template.",
            code="invalid_prompt",
            param="messages",
        )
    cost = await off_loop(nbytes, lambda: _cost_num_chars(asked, model))

    def encode(limit_s: float) -> list[int]:
        rendered = template.render(
            [_shielded_message(message, shield) for message in asked.messages],
            tools=[_shielded(tool, shield) for tool in asked.tools],
            add_generation_prompt=asked.add_generation_prompt,
            arguments={
                name: shield(value) if isinstance(value, str) else value
                for name, value in asked.template_arguments.items()
            },
            limit_s=limit_s,
        )
        _check_fits(_fewest_tokens(len(rendered), model), model, "messages")
        return model.tokenizer.encode_chat(rendered)

    return await _maybe_in_thread(cost, encode)


def _cost_num_chars(asked: Conversation, model: ServedModel) -> int:
    """What rendering costs, as the length of a text. Raises `ContextLengthExceeded`."""
    num_messages = len(asked.messages)
    num_tools_chars = len(msgspec.json.encode(asked.tools)) if asked.tools else 0
    num_chars = num_tools_chars + sum(len(each["content"] or "") for each in asked.messages)
    _check_fits(max(num_messages, _fewest_tokens(num_chars, model)), model, "messages")
    # Earlier calls as well, which a template may leave out.
    return num_tools_chars + _num_chars(asked.messages) + num_messages * MESSAGE_COST_NUM_CHARS


def _shielded_message(message: dict[str, Any], shield: Callable[[str], str]) -> dict[str, Any]:
    """Its keys and its role are ours, and templates compare them."""
    return {
        name: value if name == "role" else _shielded(value, shield)
        for name, value in message.items()
    }


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """JSON in which no string becomes a control token."""
    if isinstance(value, JsonText):
        with suppress(ValueError):  # what is no JSON is shown as the model wrote it
            return _shielded(load_arguments(value or "{}"), shield)
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [_shielded(item, shield) for item in value]
    if isinstance(value, dict):
        return {shield(name): _shielded(item, shield) for name, item in value.items()}
    return value


async def _maybe_in_thread(num_chars: int, encode: Callable[[float], list[int]]) -> list[int]:
    """`encode`, which is told how many seconds its template has."""
    if num_chars <= INLINE_NUM_CHARS:
        with suppress(TemplateTooSlow):
            return encode(INLINE_S)
    return await asyncio.to_thread(encode, RENDER_LIMIT_S)


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


def _fewest_tokens(num_chars: int, model: ServedModel) -> int:
    """A text of so many characters has at least so many tokens, whatever it says."""
    return -(-num_chars // model.tokenizer.longest_num_chars)


def _check_fits(fewest: int, model: ServedModel, param: str) -> None:
    if fewest >= model.max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has at least {fewest} tokens; the model {model.name!r} takes at most"
            f" {model.max_model_len - 1}. Shorten the prompt.",
            param=param,
        )
