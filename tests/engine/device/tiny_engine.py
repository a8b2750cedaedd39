"""A real engine with a tiny model (a fixture of `conftest`), and what is asked of it."""

from __future__ import annotations

from typing import Any

from disagg.config import EngineConfig
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import Grammar
from tests.generate_requests import new_sequence

EOS_ID = 257
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    block_size=4,
    max_model_len=512,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    num_gpu_blocks_override=256,
)


def sequence(
    grammar: Grammar | None,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (),
    draft: tuple[int, ...] = (),
    **sampling: Any,
) -> Sequence:
    fields = {"max_tokens": 400, "stop_token_ids": (EOS_ID,), "temperature": 1.0, **sampling}
    name = f"{grammar}{prompt}{output}{draft}{fields}"
    fields |= {"request_id": name, "grammar": grammar, "draft_token_ids": draft}
    return new_sequence(prompt, output, **fields)


def run(engine: Engine, *sequences: Sequence) -> list[str | None]:
    """How each of them ended."""
    ends: dict[Sequence, str | None] = {}
    for each in sequences:
        engine.submit(each)
    while engine.has_work:
        for event in engine.step():
            if event.is_last:
                ends[event.sequence] = event.finish_reason or str(event.error)
        engine.check()
    return [ends[each] for each in sequences]


def answer(of: Sequence) -> list[int]:
    return of.tokens[of.num_prompt_tokens :]
