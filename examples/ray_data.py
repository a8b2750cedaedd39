"""Questions answered in Ray Data: `python examples/ray_data.py [NUMBER [URL]]`

By workers of its own, or by the fleet at URL. Killed and started again it goes on: rows whose
answers are written are not computed again. The checkpoints' filter, the actor that asks, and a task
take a CPU of Ray each.
"""

import os
import sys
from pathlib import Path

import pyarrow.dataset
import ray
from ray.data.checkpoint import CheckpointConfig

from disagg.data import DisaggProcessorConfig, build_processor

number = int(sys.argv[1]) if sys.argv[1:] else 256
if sys.argv[2:]:
    who = DisaggProcessorConfig(url=sys.argv[2])
else:
    who = DisaggProcessorConfig(model_source="demo-small")

if "RAY_ADDRESS" not in os.environ:
    ray.init(num_cpus=max(3, os.cpu_count() or 1))
ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
    id_column="id",
    checkpoint_path=str(Path("checkpoint").resolve()),
    delete_checkpoint_on_success=False,  # so that after its end there is nothing left to do
)
processor = build_processor(
    who,
    preprocess=lambda row: {
        "messages": [{"role": "user", "content": f"What is {row['id']} + 1?"}],
        "sampling_params": {"temperature": 0, "max_tokens": 8},
    },
    postprocess=lambda row: {"id": row["id"], "answer": row["generated_text"]},
)
# What is written at a time, and lost by a kill, is a block: here a batch of 64 rows.
questions = ray.data.range(number, override_num_blocks=max(1, number // 64))
processor(questions).write_parquet(str(Path("answers").resolve()))
print(f"{pyarrow.dataset.dataset('answers').count_rows()} of {number} rows are answered.")
