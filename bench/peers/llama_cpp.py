"""llama.cpp by its C API: `python -m bench.peers.llama_cpp CHECKPOINT THREADS`.

All sequences are decoded in one batch, as in llama.cpp's server.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import gguf_file
from bench.peers.limits import MAX_SEQS
from bench.peers.turns import Generate, answer

MAX_TOKENS = MAX_SEQS * 1280  # each sequence has a cache of its own, for the longest prompt too
MAX_BATCH = 2048


class LlamaCpp:
    def __init__(self, file: Path, threads: int) -> None:
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            str(file).encode(), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_seq_max = MAX_TOKENS, MAX_SEQS
        options.n_batch, options.n_ubatch = MAX_BATCH, MAX_BATCH
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        self._batch = llama_cpp.llama_batch_init(MAX_BATCH, 0, 1)

    def __call__(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        per_step = max(1, MAX_BATCH // len(prompts[0]))  # prompts have one length
        for first in range(0, len(prompts), per_step):
            chosen = range(first, min(first + per_step, len(prompts)))
            tokens = self._step({index: (0, prompts[index]) for index in chosen})
            for index, token in zip(chosen, tokens, strict=True):
                outputs[index].append(token)
        for num_done in range(1, num_new):
            position = len(prompts[0]) + num_done - 1
            tokens = self._step(
                {index: (position, output[-1:]) for index, output in enumerate(outputs)}
            )
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs

    def _step(self, new_tokens: dict[int, tuple[int, list[int]]]) -> list[int]:
        """The next token of each sequence, after its tokens from a position on."""
        batch: Any = self._batch
        row = 0
        for sequence, (position, tokens) in new_tokens.items():
            for offset, token in enumerate(tokens):
                batch.token[row] = token
                batch.pos[row] = position + offset
                batch.n_seq_id[row] = 1
                batch.seq_id[row][0] = sequence
                batch.logits[row] = offset == len(tokens) - 1
                row += 1
        batch.n_tokens = row
        status = self._lib.llama_decode(self._context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode returned {status}")
        shape = (len(new_tokens), self._vocab)
        logits = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), shape)
        chosen: list[int] = logits.argmax(axis=1).tolist()
        return chosen


def load() -> Generate:
    checkpoint, threads = sys.argv[1:]
    file = gguf_file.write(Path(checkpoint), Path(checkpoint) / "model.gguf")
    return LlamaCpp(file, int(threads))


if __name__ == "__main__":
    answer(load)
