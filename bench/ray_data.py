"""Many short prompts in Ray Data: `python -m bench.ray_data disagg|vllm MODEL NUMBER`

In either's environment: the code between `ray.data.llm`'s shape and its answers is the same. Prints
the seconds of a whole job, with its start, and the tokens of its answers as JSON.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

MAX_TOKENS = 8
PARAMS: dict[str, Any] = {"temperature": 0, "max_tokens": MAX_TOKENS}


def messages_of(number: int) -> list[dict[str, str]]:
    """The question with this number, of all ways that are compared."""
    return [{"role": "user", "content": f"What is {number % 50} + {number % 37}?"}]


def processor_of(engine: str, model: str, functions: dict[str, Any]) -> Callable[[Any], Any]:
    if engine == "disagg":
        from disagg import data

        return data.build_processor(data.DisaggProcessorConfig(model_source=model), **functions)
    from ray.data import llm

    from bench.peers.limits import CACHE_NBYTES, MAX_MODEL_LEN

    config = llm.vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs={"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": CACHE_NBYTES},
        placement_group_config={"bundles": [{"CPU": 1}]},
        batch_size=64,
    )
    processor: Callable[[Any], Any] = llm.build_processor(config, **functions)
    return processor


def main() -> None:
    import ray

    engine, model, number = sys.argv[1:]
    ray.init("local", include_dashboard=False, num_cpus=8, log_to_driver=False)
    functions = {
        "preprocess": lambda row: {"messages": messages_of(row["id"]), "sampling_params": PARAMS},
        "postprocess": lambda row: {"id": row["id"], "tokens": row["num_generated_tokens"]},
    }
    processor = processor_of(engine, model, functions)
    rows = ray.data.range(int(number), override_num_blocks=max(1, int(number) // 64))
    with tempfile.TemporaryDirectory() as into:
        began_s = time.perf_counter()
        processor(rows).write_parquet(into)
        took_s = time.perf_counter() - began_s
        answered = ray.data.read_parquet(into).to_pandas()
    assert sorted(answered["id"]) == list(range(int(number)))
    print(json.dumps({"took_s": took_s, "num_tokens": int(answered["tokens"].sum())}))


if __name__ == "__main__":
    main()
