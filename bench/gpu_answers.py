"""Compares the answers of a bundled model on a GPU with those of the same model on this CPU.

    python -m bench.gpu_answers [--out build/gpu] [--only "float32"]

Random weights show whether kernels are right, and this shows whether everything between them is:
loading, graphs, prompts in chunks beside decodes, cached prefixes, drafts, sampling. `equal` counts
the answers that are the same token by token. In float32 all but a few must be; narrower types round
differently, and one other token changes the rest of an answer. `copies` are those of evicted KV to
host memory and back, while kernels write to other blocks.
"""

from __future__ import annotations

import argparse
import random
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from bench.gpu_device import eager_seconds
from bench.gpu_models import new_sequence
from bench.gpu_rows import Absent, Row, parser_of, run_part
from disagg.config import EngineConfig, SpeculativeConfig
from disagg.engine.device.build import build_engine
from disagg.engine.sched.sequence import Sequence
from disagg.messages import SamplingParams
from disagg.models.description import describe_model

MODEL = Path(__file__).parent.parent / "disagg" / "assets" / "demo-large"
LENGTHS, NUM_OUTPUT = (1, 5, 17, 64, 65, 200, 300, 700, 1100), 24
SAMPLED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 1.0, "top_k": 20, "repetition_penalty": 1.1, "seed": 8},
)
LEAST_EQUAL = {"float32": 0.9, "bfloat16": 0.5}
FLOAT32: dict[str, Any] = {"dtype": "float32"}
BFLOAT16: dict[str, Any] = {"dtype": "bfloat16"}
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
CASES: dict[str, dict[str, Any]] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float32, drafts": {**FLOAT32, "speculative_config": DRAFTS},
    "float32, no graphs": {**FLOAT32, "enforce_eager": True},
}
BUILD_S = 90.0  # two engines, kernels and graphs
BLOCK_NBYTES, NUM_COPIED = 8 << 20, 64  # 64 tokens of Llama-3-8B
NUM_WORK = 4096  # rows of the matrices that are multiplied meanwhile


def answers(device: str, settings: dict[str, Any], tiny: bool) -> list[list[int]]:
    """The answers of an engine, twice: the second time with cached prefixes."""
    config = EngineConfig(
        device=device,  # type: ignore[arg-type]
        block_size=64,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=256,
        **settings,
    )
    engine, _ = build_engine(config, describe_model(MODEL))
    found = []
    for number in range(1 if tiny else 2):
        rng, sequences = random.Random(3), list[Sequence]()
        for length in LENGTHS[:4] if tiny else LENGTHS:
            tokens = rng.choices(range(300, 1000), k=length)
            for asked in SAMPLED:
                name = f"{number}, {len(sequences)}"
                wanted = SamplingParams(max_tokens=NUM_OUTPUT, **asked)
                sequences.append(new_sequence(name, tokens, length, 0, 64, sampling=wanted))
                engine.submit(sequences[-1])
        while engine.has_work:
            engine.step()
        engine.check()
        found += [each.tokens[each.num_prompt_tokens :] for each in sequences]
    return found


@cache
def cpu_answers(dtype: str, tiny: bool) -> list[list[int]]:
    """Computed once for all cases with this dtype."""
    return answers("cpu", {"dtype": dtype}, tiny)


def compare(device: str, settings: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Raises `ArithmeticError` if too many answers differ."""
    on_cpu = cpu_answers(settings["dtype"], tiny)
    here = answers(device, settings, tiny)
    num_equal = sum(map(list.__eq__, here, on_cpu))
    found = {"answers": len(on_cpu), "equal": num_equal}
    found["first tokens"] = sum(a[:1] == b[:1] for a, b in zip(here, on_cpu, strict=True))
    if num_equal < LEAST_EQUAL[settings["dtype"]] * len(on_cpu):
        raise ArithmeticError(f"the answers are not a CPU's: {found}")
    return found


def copies(device: torch.device) -> dict[str, Any]:
    """Saves blocks, loads them elsewhere and reads evicted ones, beside kernels that write."""
    from disagg.engine.device.stream_copier import BlockReader, StreamCopier

    slab = torch.randn(3 * NUM_COPIED, BLOCK_NBYTES // 4, device=device)
    expected = slab[:NUM_COPIED].cpu().clone()
    work = torch.randn(NUM_WORK, NUM_WORK, device=device)
    copier, reader = StreamCopier(slab, NUM_COPIED), BlockReader(slab, NUM_COPIED)
    blocks = random.Random(1).sample(range(NUM_COPIED), NUM_COPIED)

    def compute() -> None:
        for _ in range(8):
            torch.mm(work, work)

    compute()
    late = reader(blocks)
    copier.save([(block, slot) for slot, block in enumerate(blocks)])
    compute()
    torch.cuda.synchronize(device)
    if copier.take_saved() != 1:
        raise RuntimeError("a copy that has ended is not reported")
    slab[:NUM_COPIED].fill_(-1.0)  # they belong to others now
    copier.load([(slot, 2 * NUM_COPIED + block) for slot, block in enumerate(blocks)])
    compute()
    torch.cuda.synchronize(device)
    (load_s,) = copier.take_loaded()
    if not torch.equal(slab[2 * NUM_COPIED :].cpu(), expected):
        raise ArithmeticError("blocks came back from host memory with other bytes")
    for block, take in zip(blocks, late, strict=True):
        read = torch.frombuffer(bytearray(take()), dtype=torch.float32)
        if not torch.equal(read, expected[block]):
            raise ArithmeticError(f"block {block} was overwritten before it was read")

    def save() -> None:
        copier.save([(block, block) for block in range(NUM_COPIED)])
        torch.cuda.synchronize(device)

    save_s = eager_seconds(save, device, 3)
    copier.close()
    gigabytes = NUM_COPIED * BLOCK_NBYTES / 1e9
    return {"load GB/s": gigabytes / load_s, "save GB/s": gigabytes / save_s}


def absent() -> dict[str, Any]:
    raise Absent("a CPU has no streams")


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    cases = dict([*CASES.items()][:2]) if arguments.tiny else CASES
    rows = [
        Row(name, partial(compare, arguments.device, settings, arguments.tiny), BUILD_S)
        for name, settings in cases.items()
    ]
    is_gpu = arguments.device == "cuda"
    return [*rows, Row("copies", partial(copies, torch.device("cuda")) if is_gpu else absent)]


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    run_part("gpu_answers", rows_of(arguments), arguments)


if __name__ == "__main__":
    main()
