"""Answers in Ray Data: a processor in the shape of `ray.data.llm`'s.

    processor = build_processor(
        DisaggProcessorConfig(model_source="demo-small"),
        preprocess=lambda row: {"messages": [{"role": "user", "content": row["question"]}],
                                "sampling_params": {"max_tokens": 16}},
        postprocess=lambda row: {"answer": row["generated_text"], "question": row["question"]},
    )
    dataset = processor(dataset)

Needs `pip install "ray[data]"`. Row by row it asks what `disagg batch` asks line by line.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import msgspec

from disagg.batch.ask import Patience
from disagg.batch.over_http import asking
from disagg.errors import DisaggError, StartupError

Row = dict[str, Any]
ERROR = "__inference_error__"  # the column of `should_continue_on_error`, as in `ray.data.llm`
NOTHING: Row = {
    "generated_text": "",
    "generated_tokens": [],
    "num_input_tokens": 0,
    "num_generated_tokens": 0,
    "finish_reason": "",
}


@dataclass(frozen=True)
class DisaggProcessorConfig:
    """Who answers, and how rows are given to them. Names are those of `ray.data.llm`.

    Attributes:
        model_source: a model for workers of this job's own, as `disagg serve` takes it.
        url: or the URL of a running fleet, whose other requests go first.
        model: the name of the model there, if it serves several.
        api_key: the fleet's.
        engine_kwargs: settings of the own workers' engines, as those of `disagg.LLM`.
        concurrency: number of actors, or their least and largest number; each has a worker of its
            own, or sends to the fleet.
        batch_size, max_concurrent_batches: rows of a batch, and batches at a time in an actor.
        num_gpus: of each actor; None: one for each rank if the cluster has GPUs.
        should_continue_on_error: a row that is refused does not end the job: its column
            `__inference_error__`, else "", says why, and `postprocess` does not see it. A fleet
            that is full is no error: rows wait.
    """

    model_source: str | None = None
    url: str | None = None
    model: str | None = None
    api_key: str | None = None
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    concurrency: int | tuple[int, int] = 1
    batch_size: int = 64
    max_concurrent_batches: int = 8
    num_gpus: float | None = None
    should_continue_on_error: bool = False

    def __post_init__(self) -> None:
        if (self.model_source is None) == (self.url is None):
            raise StartupError(
                "Give either model_source, for workers of this job's own, or the url of a fleet."
            )


class AnswerBatches:
    """Callable for `Dataset.map_batches` with `batch_format="pyarrow"`; see `build_processor`."""

    def __init__(self, config: DisaggProcessorConfig) -> None:
        self._config = config
        self._stack = AsyncExitStack()
        self._started: asyncio.Task[Patience] | None = None

    async def __call__(self, batch: Any) -> AsyncGenerator[dict[str, list[Any]], None]:
        rows: list[Row] = batch.to_pylist()
        self._started = self._started or asyncio.create_task(self._start())
        ask = await self._started
        answers = await asyncio.gather(*(self._answer(ask, row) for row in rows))
        columns = dict.fromkeys(name for answer in answers for name in answer)
        yield {name: [answer.get(name) for answer in answers] for name in columns}

    async def close(self) -> None:
        """End the own workers, which otherwise end with the process."""
        await self._stack.aclose()

    async def _start(self) -> Patience:
        config = self._config
        if config.url is not None:
            asks = asking(config.url, config.api_key)
            return await self._stack.enter_async_context(asks)
        from disagg.llm.own_fleet import answering  # torch, which those who only ask do without

        own = answering([str(config.model_source)], config.engine_kwargs)
        return (await self._stack.enter_async_context(own))[0]

    async def _answer(self, ask: Patience, row: Row) -> Row:
        try:
            path, body = request_of(row, self._config.model)
            reply = await ask(path, msgspec.json.encode(body))
            if reply.status != 200:
                raise DisaggError(reply.body[:1000].decode(errors="replace"))
            fine = {ERROR: ""} if self._config.should_continue_on_error else {}
            return row | answer_of(msgspec.json.decode(reply.body)) | fine
        except DisaggError as error:
            if not self._config.should_continue_on_error:
                raise RuntimeError(f"A row was refused: {error.message} {row!r}"[:2000]) from error
            return row | NOTHING | {ERROR: error.message}


def request_of(row: Row, model: str | None) -> tuple[str, Row]:
    """The path and body of the request that a row asks for.

    A row has `messages` or `prompt`, and may have `sampling_params` and `tools`. Arrow gives all
    rows of a column the same keys: those that are None are left out.

    Raises:
        StartupError: it has neither.
    """
    is_chat = row.get("messages") is not None
    if not is_chat and row.get("prompt") is None:
        raise StartupError("The row has neither messages nor prompt; `preprocess` must make one.")
    names = ("messages", "tools") if is_chat else ("prompt",)
    fields = {name: row.get(name) for name in names} | dict(row.get("sampling_params") or {})
    fields |= {"model": model, "return_token_ids": True}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    return path, _without_none(fields)


def answer_of(body: Row) -> Row:
    """The columns of an answer."""
    choice, usage = body["choices"][0], body["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return {
        "generated_text": text or "",
        "generated_tokens": choice.get("token_ids") or [],
        "num_input_tokens": usage["prompt_tokens"],
        "num_generated_tokens": usage["completion_tokens"],
        "finish_reason": choice["finish_reason"],
    }


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(each) for name, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def build_processor(
    config: DisaggProcessorConfig,
    preprocess: Callable[[Row], Row] | None = None,
    postprocess: Callable[[Row], Row] | None = None,
) -> Callable[[Any], Any]:
    """A function from a `ray.data.Dataset` to one with the answers.

    Args:
        preprocess: makes `messages` or `prompt`, and `sampling_params` and `tools`, of a row; its
            other columns stay.
        postprocess: makes a row of the result from all columns and `generated_text`,
            `generated_tokens`, `num_input_tokens`, `num_generated_tokens`, `finish_reason`.
    """

    # Here, as Ray sends these functions to its processes.
    def prepare(row: Row) -> Row:
        return row if preprocess is None else row | preprocess(row)

    def finish(row: Row) -> Row:
        if row.get(ERROR) or postprocess is None:
            return row
        error = {ERROR: ""} if ERROR in row else {}
        return postprocess(row) | error

    def process(dataset: Any) -> Any:
        answered = dataset.map(prepare).map_batches(
            AnswerBatches,
            fn_constructor_args=(config,),
            batch_format="pyarrow",
            batch_size=config.batch_size,
            compute=_actors(config),
            num_gpus=_num_gpus(config),
            udf_modifying_row_count=False,
        )
        return answered.map(finish)

    return process


def _actors(config: DisaggProcessorConfig) -> Any:
    from ray.data import ActorPoolStrategy

    num = config.concurrency
    least, most = (num, num) if isinstance(num, int) else num
    return ActorPoolStrategy(
        min_size=least,
        max_size=most,
        max_concurrent_calls_per_actor=config.max_concurrent_batches,
    )


def _num_gpus(config: DisaggProcessorConfig) -> float:
    if config.num_gpus is not None or config.url is not None:
        return config.num_gpus or 0
    import ray

    has_gpus = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0
    return config.engine_kwargs.get("tensor_parallel_size", 1) if has_gpus else 0
