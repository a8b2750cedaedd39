"""transformers: `python -m bench.peers.transformers CHECKPOINT THREADS static|continuous`.

`static` is `generate` with one static batch.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import torch

from bench.peers.turns import Generate, Prompts, answer

PAGE_SIZE, NUM_PAGES = 128, 96  # of continuous batching: room for every case


def static_batch(directory: Path) -> Generate:
    model = _load_peer(directory)

    def run(prompts: Prompts, num_new: int) -> list[list[int]]:
        batch = torch.tensor(prompts)
        out = model.generate(
            batch,
            attention_mask=torch.ones_like(batch),
            max_new_tokens=num_new,
            min_new_tokens=num_new,
            do_sample=False,
        )
        rows: list[list[int]] = out[:, batch.shape[1] :].tolist()
        return rows

    return run


class ContinuousBatching:
    """Started once and idle in between (which costs nothing), as in a server."""

    def __init__(self, directory: Path) -> None:
        import transformers

        greedy = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        paging = transformers.generation.configuration_utils.ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=NUM_PAGES, max_batch_tokens=1024
        )
        self._loop = _load_peer(directory).init_continuous_batching(
            generation_config=greedy, continuous_batching_config=paging
        )
        self._loop.start()

    def __call__(self, prompts: Prompts, num_new: int) -> list[list[int]]:
        request_ids = self._loop.add_requests(prompts, max_new_tokens=num_new)
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(request_ids):
            result = self._loop.get_result(timeout=1)
            if result is not None and result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
            elif not self._loop.is_running():
                raise SystemExit("transformers' continuous batching stopped")
        return [outputs[request_id] for request_id in request_ids]


def _load_peer(directory: Path) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    return transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()


def load() -> Generate:
    checkpoint, threads, batching = sys.argv[1:]
    torch.set_num_threads(int(threads))
    if batching == "static":
        return static_batch(Path(checkpoint))
    return ContinuousBatching(Path(checkpoint))


if __name__ == "__main__":
    answer(load)
