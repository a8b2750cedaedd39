"""`LLM`: a model in this process, for programs without an event loop, and for notebooks."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from disagg.llm.async_llm import AsyncLLM, Messages, Params, Prompt
from disagg.llm.outputs import RequestOutput
from disagg.llm.params import SamplingParams

T = TypeVar("T")


class LLM:
    """`AsyncLLM`, which has the arguments and the errors, with methods that wait.

        with LLM("demo-small") as llm:
            for output in llm.generate(["1 + 1 =", "2 + 2 ="], SamplingParams(temperature=0)):
                print(output.outputs[0].text)

    It loads the model at once and ends with `close`, its `with` block, or the program. Methods may
    be called from several threads, whose requests share batches.
    """

    def __init__(
        self, model: str, *, num_prefill: int = 0, num_decode: int = 1, **settings: Any
    ) -> None:
        self._llm = AsyncLLM(model, num_prefill=num_prefill, num_decode=num_decode, **settings)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="llm", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, self._llm, self._loop, thread)
        self._close.atexit = False  # by then no thread can begin, and workers need one to end
        threading._register_atexit(self._close)  # type: ignore[attr-defined]
        try:
            self._wait(self._llm.start())
        except BaseException:
            self._close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """See `AsyncLLM.generate`. Ctrl-C ends all of it."""
        return self._wait(self._llm.generate(prompts, sampling_params, use_tqdm=use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        **fields: Any,
    ) -> list[RequestOutput]:
        """See `AsyncLLM.chat`. Ctrl-C ends all of it."""
        return self._wait(self._llm.chat(messages, sampling_params, use_tqdm=use_tqdm, **fields))

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **fields: Any,
    ) -> Iterator[RequestOutput]:
        """See `AsyncLLM.stream`."""
        outputs = self._llm.stream(prompt, sampling_params, **fields)
        try:
            while (output := self._wait(_next(outputs))) is not None:
                yield output
        finally:
            self._wait(outputs.aclose())

    def close(self) -> None:
        """End the workers and free their memory."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._close.alive:
            work.close()
            raise RuntimeError("This LLM is closed.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also Ctrl-C
            future.cancel()
            raise


async def _next(outputs: Any) -> RequestOutput | None:
    return await anext(outputs, None)


def _end(llm: AsyncLLM, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def close() -> None:
        await llm.close()
        await loop.shutdown_default_executor()

    try:
        asyncio.run_coroutine_threadsafe(close(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
