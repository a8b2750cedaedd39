"""The APIs that are served, each by how it reads requests and writes answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from disagg.api.openai import responses
from disagg.api.openai.answers import ChoiceDelta, Job, RunningJob
from disagg.api.openai.requests import ChatRequest, CompletionRequest, read_request
from disagg.api.openai.understand import understand_chat, understand_completion
from disagg.api.served_model import ServedModel
from disagg.api.wanted import Wanted


class Request(Protocol):
    """What every API's request says."""

    @property
    def model(self) -> str | None: ...


Asked = TypeVar("Asked", bound=Request)


@dataclass(frozen=True)
class Api(Generic[Asked]):
    """
    Attributes:
        id_prefix: how the ids of its answers begin.
        read: a body to a request of the right shape, types and sizes. Raises `InvalidRequest`.
        understand: what a request for this model wants, and the lowest priority that its sender
            may ask for. Raises `InvalidRequest`.
        frames: makes the events of a streamed answer.
        body: makes a whole answer.
    """

    id_prefix: str
    read: Callable[[bytes], Asked]
    understand: Callable[[Asked, ServedModel, int], Wanted]
    frames: Callable[[Job], responses.Frames]
    body: Callable[[RunningJob, Sequence[ChoiceDelta]], bytes]


CHAT = Api(
    "chatcmpl-",
    partial(read_request, kind=ChatRequest),
    understand_chat,
    responses.ChatFrames,
    responses.chat_body,
)
COMPLETIONS = Api(
    "cmpl-",
    partial(read_request, kind=CompletionRequest),
    understand_completion,
    responses.CompletionFrames,
    responses.completion_body,
)
