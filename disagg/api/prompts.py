"""From a request's messages, texts or ids to checked token ids.

A text that cannot fit is refused by its length, before it is tokenized. Long texts are tokenized in
a thread, so that they do not block the event loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from disagg.api.openai.requests import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
    prompts,
)
from disagg.api.openai.tools import Tool, offered
from disagg.api.served_model import ServedModel
from disagg.errors import ContextLengthExceeded, InvalidRequest
from disagg.text.chat_template import RENDER_LIMIT_S, ChatTemplate, TemplateTooSlow

INLINE_NUM_CHARS = 8192  # more than this goes to a thread
INLINE_S = 0.02  # a template that takes longer, even for less, goes there too
MESSAGE_COST_NUM_CHARS = 64  # rendering a message costs about as much as encoding so many


async def chat_tokens(model: ServedModel, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of the rendered messages, in which only the template writes control tokens."""
    messages, template = request.messages or [], model.template
    if template is None:
        raise InvalidRequest(
            f"The model {model.name!r} has no chat template, so it cannot take messages; use"
            " /v1/completions, or start the server with --chat-template.",
            code="invalid_prompt",
            param="messages",
        )
    tools = offered(request) if isinstance(request, ChatRequest) else request.tools or ()
    num_chars = sum(map(_num_chars, messages)) + (len(msgspec.json.encode(tools)) if tools else 0)
    _check_fits(max(len(messages), _fewest_tokens(num_chars, model)), model, "messages")
    return await _maybe_in_thread(
        num_chars + len(messages) * MESSAGE_COST_NUM_CHARS,
        lambda limit_s: _encode_messages(model, template, request, tools, limit_s),
    )


async def text_tokens(model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
    """Token ids of a prompt as it stands, control tokens written out in it included."""
    _check_fits(_fewest_tokens(len(text), model), model, "prompt")
    encode = model.tokenizer.encode
    return await _maybe_in_thread(
        len(text), lambda limit_s: encode(text, add_special_tokens=add_special_tokens)
    )


async def completion_tokens(
    model: ServedModel, request: CompletionRequest
) -> tuple[list[list[int]], list[str]]:
    """The token ids of each prompt, and the prompts' texts if they are to be repeated."""
    special = request.add_special_tokens is not False
    token_lists, echoes = [], []
    for prompt in prompts(request):
        if isinstance(prompt, str):
            token_ids = await text_tokens(model, prompt, special)
        else:
            token_ids = prompt
            check_ids(token_ids, model, "prompt")
        token_lists.append(token_ids)
        if request.echo:
            echoes.append(prompt if isinstance(prompt, str) else model.tokenizer.decode(token_ids))
    return token_lists, echoes


def check_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    if token_ids and max(token_ids) >= model.vocab_size:
        raise InvalidRequest(
            f"Invalid {param}: token id {max(token_ids)} is not below the vocabulary size of"
            f" {model.name!r}, {model.vocab_size}.",
            code="invalid_value",
            param=param,
        )


def _encode_messages(
    model: ServedModel,
    template: ChatTemplate,
    request: ChatRequest | TokenizeRequest,
    tools: Sequence[Tool],
    limit_s: float,
) -> list[int]:
    shield = model.tokenizer.shield
    rendered = template.render(
        [_plain_message(message, shield) for message in request.messages or []],
        tools=[_shielded(msgspec.to_builtins(tool), shield) for tool in tools],
        add_generation_prompt=request.add_generation_prompt is not False,
        arguments={
            name: shield(value) if isinstance(value, str) else value
            for name, value in (request.chat_template_kwargs or {}).items()
        },
        limit_s=limit_s,
    )
    _check_fits(_fewest_tokens(len(rendered), model), model, "messages")
    return model.tokenizer.encode_chat(rendered)


def _plain_message(message: ChatMessage, shield: Callable[[str], str]) -> dict[str, Any]:
    """A message as templates know it: plain types, one text, `developer` as `system`.

    Parts are joined by newlines, so that words of two parts do not run together.
    """
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text or part.refusal or "" for part in content)
    plain: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": None if content is None else shield(content),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = shield(value)
    if message.tool_calls:
        plain["tool_calls"] = [
            {
                "id": shield(call.id or ""),
                "type": "function",
                "function": {
                    "name": shield(call.function.name),
                    "arguments": _arguments(call.function.arguments, shield),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str, shield: Callable[[str], str]) -> Any:
    """Arguments of an earlier tool call; templates print objects, requests carry JSON text."""
    try:
        return _shielded(json.loads(text or "{}"), shield)
    except (ValueError, RecursionError):
        return shield(text)


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """JSON in which no string becomes a control token."""
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


def _num_chars(message: ChatMessage) -> int:
    if message.content is None or isinstance(message.content, str):
        return len(message.content or "")
    return sum(len(part.text or "") for part in message.content)


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
