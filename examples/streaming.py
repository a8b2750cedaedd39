"""Two answers at the same time, as they are written, in a program with an event loop."""

import asyncio

from disagg import AsyncLLM, SamplingParams


async def show(llm: AsyncLLM, question: str) -> None:
    messages = [{"role": "user", "content": question}]
    async for piece in llm.stream(messages, SamplingParams(temperature=0, max_tokens=32)):
        for new in piece.outputs:
            print(f"{question} {new.text!r}", flush=True)


async def main() -> None:
    async with AsyncLLM("demo-small") as llm:
        await asyncio.gather(
            show(llm, "What is the capital of France?"), show(llm, "What is 2 + 3?")
        )


asyncio.run(main())
