"""The third step of a request: the token ids of its prompts.

A prompt that cannot fit is refused by its length, before it is tokenized. Long prompts are
tokenized in a thread, so that they do not block the event loop, and between short ones it goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec

from disagg.api.json_body import load_arguments, off_loop
from disagg.api.refusals import invalid_value, too_long
from disagg.api.request_spec import Conversation, JsonText, Prompt, Text
from disagg.api.served_model import ServedModel
from disagg.errors import InvalidRequest
from disagg.text.chat_template import RENDER_LIMIT_S, CallShape, TemplateTooSlow

INLINE_NUM_CHARS = 8192  # longer prompts go to a thread
INLINE_S = 0.02  # a template that takes longer is rendered again in a thread
MANY_CHARS_A_TOKEN = 8  # usual texts have four; a text that fits only with more is counted first
CALL_SHAPE = CallShape()
# Two threads, as in `off_loop`, but separate ones, so that slow templates do not delay the parsing
# of bodies. Encoding does not use them: it releases the interpreter lock.
_RENDERERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="render")
MESSAGE_COST_NUM_CHARS = 64  # rendering a message takes as long as encoding this many characters
MOST_TO_CUT = 4  # a prompt that is cut may have this many times the model's context length

END_OF_CONTENT = "\ufdd1"  # marks the end of a message to continue; a noncharacter as in `BREAK`


async def tokenize_prompts(
    prompts: Sequence[Prompt], model: ServedModel, nbytes: int = 0, most: int | None = None
) -> list[list[int]]:
    """The token ids of each prompt. Prompts that are token ids already are returned unchanged.

    Args:
        nbytes: size of the request's body.
        most: number of last tokens to which each prompt is cut; None to keep prompts whole.

    Raises:
        InvalidRequest: the model has no chat template, or its template refuses a conversation.
        ContextLengthExceeded: a prompt is certainly too long.
    """
    if most is not None:
        model = replace(model, max_model_len=MOST_TO_CUT * model.max_model_len)
    found: list[list[int]] = []
    for prompt in prompts:
        if found:
            await asyncio.sleep(0)  # thousands of short prompts would block the event loop, too
        token_ids = await _token_ids(prompt, model, nbytes)
        found.append(token_ids if most is None else token_ids[-most:])
    return found


async def _token_ids(prompt: Prompt, model: ServedModel, nbytes: int) -> list[int]:
    if isinstance(prompt, Conversation):
        return await _conversation(prompt, model, nbytes)
    if not isinstance(prompt, Text):
        return prompt
    text, special = prompt.text, prompt.add_special_tokens
    _check_fits(_fewest_tokens(len(text), model), model, "prompt")

    def encode() -> list[int]:
        _check_text(text, model, "prompt")
        return model.tokenizer.encode(text, add_special_tokens=special)

    return encode() if len(text) <= INLINE_NUM_CHARS else await asyncio.to_thread(encode)


async def _conversation(conversation: Conversation, model: ServedModel, nbytes: int) -> list[int]:
    template, shield = model.template, model.tokenizer.shield
    if template is None:
        raise InvalidRequest(
            f"The model {model.name!r} has no chat template, so it cannot take messages; use"
            " /v1/completions, or start the server with --chat-template.",
            code="invalid_prompt",
            param="messages",
        )
    cost = await off_loop(nbytes, lambda: _cost_num_chars(conversation, model))

    def render(limit_s: float) -> str:
        shape = template.call_shape
        messages = [_shield_message(message, shield, shape) for message in conversation.messages]
        if conversation.continue_final_message:
            messages[-1]["content"] += END_OF_CONTENT
        if conversation.images or template.needs_parts:
            for message in messages:
                if isinstance(message["content"], str):
                    message["content"] = [{"type": "text", "text": message["content"]}]
        rendered = template.render(
            messages,
            tools=[_shield(tool, shield) for tool in conversation.tools],
            documents=[_shield(document, shield) for document in conversation.documents],
            add_generation_prompt=conversation.add_generation_prompt,
            arguments={
                name: shield(value) if isinstance(value, str) else value
                for name, value in conversation.template_arguments.items()
            },
            limit_s=limit_s,
        )
        if conversation.continue_final_message:
            rendered, end, _ = rendered.rpartition(END_OF_CONTENT)
            if not end:
                raise invalid_value(
                    "continue_final_message",
                    "the chat template does not render the last message.",
                )
        return rendered

    def encode(rendered: str) -> list[int]:
        _check_text(rendered, model, "messages")
        return model.tokenizer.encode_chat(rendered)

    if cost <= INLINE_NUM_CHARS:
        with suppress(TemplateTooSlow):
            return encode(render(INLINE_S))
    loop = asyncio.get_running_loop()
    rendered = await loop.run_in_executor(_RENDERERS, render, RENDER_LIMIT_S)
    return await asyncio.to_thread(encode, rendered)


def _cost_num_chars(conversation: Conversation, model: ServedModel) -> int:
    """The cost of rendering, as a number of characters. Raises `ContextLengthExceeded`."""
    num_messages = len(conversation.messages)
    contents = [each["content"] for each in conversation.messages]
    num_chars = _num_chars(conversation.tools) + _num_chars(contents)
    _check_fits(max(num_messages, _fewest_tokens(num_chars, model)), model, "messages")
    # This includes earlier calls and documents, although a template may leave them out.
    others = conversation.tools, conversation.documents
    num_other_chars = len(msgspec.json.encode(others)) if any(others) else 0
    return (
        num_other_chars + _num_chars(conversation.messages) + num_messages * MESSAGE_COST_NUM_CHARS
    )


def _shield_message(
    message: dict[str, Any], shield: Callable[[str], str], shape: CallShape
) -> dict[str, Any]:
    """A message whose texts cannot become control tokens.

    Keys and the role stay as they are: they do not come from clients, and templates compare them.
    """
    shielded = {
        name: value if name == "role" else _shield(value, shield, shape)
        for name, value in message.items()
    }
    if shielded["content"] is None:
        shielded["content"] = shape.no_content
    return shielded


def _shield(value: Any, shield: Callable[[str], str], shape: CallShape = CALL_SHAPE) -> Any:
    """A JSON value in which no string can become a control token."""
    if isinstance(value, JsonText) and not shape.has_text_arguments:
        with suppress(ValueError):  # invalid JSON stays as the model wrote it
            return _shield(load_arguments(value or "{}"), shield)
    if isinstance(value, JsonText):
        return shield(value or "{}")
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [_shield(item, shield, shape) for item in value]
    if isinstance(value, dict):
        return {shield(name): _shield(item, shield, shape) for name, item in value.items()}
    return value


def _num_chars(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        value = list(value.values())
    return sum(map(_num_chars, value)) if isinstance(value, list | tuple) else 0


def _fewest_tokens(num_chars: int, model: ServedModel) -> int:
    """The smallest number of tokens that any text of `num_chars` characters can have."""
    return -(-num_chars // model.tokenizer.longest_num_chars)


def _check_text(text: str, model: ServedModel, param: str) -> None:
    """Raises `ContextLengthExceeded` for a text that is certainly too long, at a bounded cost.

    Encoding takes up to 200 bytes of memory per character, and the length of the longest token is
    a weak bound: with the tokens of Llama 3 and Qwen 3, 16 MB of text might fit 128k tokens.
    """
    _check_fits(_fewest_tokens(len(text), model), model, param)
    most = model.max_model_len
    if len(text) > MANY_CHARS_A_TOKEN * most and model.tokenizer.has_more_tokens(text, most):
        _check_fits(most, model, param)


def _check_fits(fewest: int, model: ServedModel, param: str) -> None:
    if fewest >= model.max_model_len:
        raise too_long(
            f"The prompt is too long: it has at least {fewest} tokens.", model.max_model_len, param
        )
