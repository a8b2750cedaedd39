"""How to choose tokens, with the names and defaults of vLLM's `SamplingParams`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

DEFAULT_MAX_TOKENS = 16  # vLLM's


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What an answer must follow; exactly one is set (docs/api.md#structured-output)."""

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class SamplingParams(msgspec.Struct, kw_only=True):
    """The sampling parameters of one request. They are checked when it is sent.

    Attributes:
        max_tokens: None: as many as fit the context.
        logprobs: number of most likely tokens whose log-probabilities are returned at each position
            beside the chosen one's; None: no log-probabilities.
        prompt_logprobs: the same for the prompt's tokens.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = DEFAULT_MAX_TOKENS
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def fields(self) -> dict[str, Any]:
        """The fields of a request to `/v1/completions` that ask for the same."""
        named = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return {name: value for name, value in named if value is not None}

    def chat_fields(self) -> dict[str, Any]:
        """As `fields`, of a request to `/v1/chat/completions`."""
        fields = self.fields()
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        return fields
