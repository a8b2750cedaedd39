"""vLLM on CPUs: `python -m bench.peers.vllm CHECKPOINT THREADS` in its environment.

vLLM uses the threads that it finds, one for each core.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys

from bench.peers.limits import ENGINE
from bench.peers.turns import Generate, answer


def load() -> Generate:
    from vllm import LLM, SamplingParams

    checkpoint, _ = sys.argv[1:]
    engine = LLM(model=checkpoint, **ENGINE)

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        greedy = SamplingParams(
            temperature=0, max_tokens=num_new, ignore_eos=True, detokenize=False
        )
        outputs = engine.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], greedy, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    answer(load)
