"""OpenVINO GenAI, continuous batching: `python -m bench.peers.openvino CHECKPOINT THREADS`.

With `export` instead of threads it converts the checkpoint, which needs torch. A separate process
does that, so the memory that is measured is the engine's alone.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.limits import MAX_SEQS
from bench.peers.turns import Generate, answer
from disagg.kernels.cpu.library import cpu_flags


def export(checkpoint: str, converted: Path) -> None:
    """OpenVINO's own format, with its tokenizer."""
    import openvino
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForCausalLM
    from transformers import AutoTokenizer

    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False
    )
    model.save_pretrained(converted)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"eos_token": "<end>"})  # without any it cannot be converted
    for part, name in zip(
        convert_tokenizer(tokenizer, with_detokenizer=True),
        ("openvino_tokenizer", "openvino_detokenizer"),
        strict=True,
    ):
        openvino.save_model(part, converted / f"{name}.xml")


def _precision() -> str:
    """Its paged attention takes no bf16 on a CPU that has AVX-512 without bf16."""
    flags = cpu_flags()
    has_bf16 = "avx512f" not in flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16"))
    return "bf16" if has_bf16 else "f32"


def load() -> Generate:
    import openvino
    import openvino_genai

    checkpoint, threads = sys.argv[1:]
    converted = Path(checkpoint) / "openvino"
    subprocess.run([sys.executable, "-m", "bench.peers.openvino", checkpoint, "export"], check=True)
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 1  # GB
    scheduler.max_num_seqs = MAX_SEQS
    pipeline = openvino_genai.ContinuousBatchingPipeline(
        str(converted),
        scheduler,
        "CPU",
        {"INFERENCE_PRECISION_HINT": _precision(), "INFERENCE_NUM_THREADS": threads},
    )

    def generate(prompts: list[list[int]], num_new: int) -> list[list[int]]:
        greedy = openvino_genai.GenerationConfig()
        greedy.max_new_tokens = num_new
        greedy.ignore_eos = True
        greedy.do_sample = False
        tensors = [openvino.Tensor(np.array([prompt], np.int64)) for prompt in prompts]
        results: list[Any] = pipeline.generate(tensors, [greedy] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]

    return generate


if __name__ == "__main__":
    if sys.argv[2] == "export":
        export(sys.argv[1], Path(sys.argv[1]) / "openvino")
    else:
        answer(load)
