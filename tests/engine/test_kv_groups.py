"""Engines whose layers have windows or recurrent states answer as transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from disagg.blocks import hash_blocks, hash_root
from disagg.config import EngineConfig, SpeculativeConfig
from disagg.engine.device import check
from disagg.engine.device.build import build_engine
from disagg.engine.device.kv_cache import KVCache
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import TokenEvent
from disagg.errors import StartupError
from disagg.kv_groups import one_group
from disagg.messages import GenerateRequest, SamplingParams
from disagg.models.description import describe_model
from tests.grids import some
from tests.models.checkpoints import Checkpoint, write_checkpoint

SIZE = 4
NUM_NEW = 8
LENGTHS = [(1, 190), (2, 90), (3, 150), (4, 5)]  # of prompts, by their seeds
# Full attention and windows in turns; more layers with windows than without; only windows; and
# layers of a window that do not fill their last group. In gemma3n layers share KV.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma2": {},
    "gemma3": {"num_hidden_layers": 5, "layer_types": [*"wwfwf"]},
    "gemma3n": {},
    "gpt-oss": {"num_hidden_layers": 4},
    "mistral-sliding": {},
    "olmo3": {},
    "phi3-sliding": {},
    "qwen3-mixed-windows": {},  # which a compiled step computes in bfloat16
}
STATES: dict[str, dict[str, Any]] = {
    name: {} for name in ("qwen3-next", "qwen3-next-odd", "qwen3.5", "qwen3.5-odd", "qwen3.5-moe")
}


# Of these each run has some: windows beside full attention and alone, and a state.
EACH_RUN = ["gemma3", "gemma3n", "gpt-oss", "mistral-sliding", "qwen3-mixed-windows"]
EACH_STATE = ["qwen3-next", "qwen3.5-odd"]


@pytest.fixture(scope="module", params=some([*EACH_RUN, *EACH_STATE], [*VARIANTS, *STATES]))
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    name: str = request.param
    changes = {**VARIANTS, **STATES}[name]
    if "layer_types" in changes:
        kinds = {"w": "sliding_attention", "f": "full_attention"}
        changes = {**changes, "layer_types": [kinds[each] for each in changes["layer_types"]]}
    return write_checkpoint(tmp_path_factory.mktemp(name) / "m", name, **changes)


def new_engine(checkpoint: Checkpoint, **changes: Any) -> tuple[Engine, KVCache]:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": SIZE,
        "max_model_len": 240,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 256,
    }
    config = EngineConfig(**{**settings, **changes})
    return build_engine(config, describe_model(checkpoint.directory))


def new_sequence(
    name: str,
    prompt: list[int],
    output: tuple[int, ...] = (),
    *,
    hand_over: bool = False,
    logprobs: int | None = None,
) -> Sequence:
    root, tokens = hash_root("test", SIZE), [*prompt, *output]
    request = GenerateRequest(
        request_id=name,
        model="m",
        token_ids=tuple(tokens),
        num_prompt_tokens=len(prompt),
        hash_root=root,
        block_hashes=tuple(hash_blocks(root, tokens, SIZE)),
        sampling=SamplingParams(
            max_tokens=NUM_NEW, temperature=0.0, logprobs=logprobs, prompt_logprobs=logprobs
        ),
        deadline_unix_s=1e12,
    )
    return Sequence(request, hand_over=hand_over)


def drawn(num_tokens: int, seed: int = 5) -> list[int]:
    numbers = torch.randint(0, 97, (num_tokens,), generator=torch.Generator().manual_seed(seed))
    return [int(number) for number in numbers]


def run(engine: Engine, *sequences: Sequence) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        events += engine.step()
        engine.check(())
    assert engine.pool.num_free == engine.pool.num_blocks
    return events


def assert_greedy(checkpoint: Checkpoint, *sequences: Sequence, within: float = 1e-4) -> None:
    """Each token has the largest logit of transformers after those before it, or nearly."""
    for sequence in sequences:
        logits, first = checkpoint.logits(sequence.tokens), sequence.num_prompt_tokens
        assert len(sequence.tokens) == first + NUM_NEW
        for position in range(first, len(sequence.tokens)):
            own = logits[position - 1]
            assert own.max() - own[sequence.tokens[position]] <= within, position


def test_chunks_and_prefix_hits(checkpoint: Checkpoint) -> None:
    engine, cache = new_engine(checkpoint)
    assert engine.pool.groups.num_partial and cache.shape.num_layers < 5
    long, short = new_sequence("long", drawn(190)), new_sequence("short", drawn(30, 6))
    run(engine, long, short)
    turn = new_sequence("turn", [*long.tokens, *drawn(9, 7)])
    fork = new_sequence("fork", [*drawn(190)[:120], 3, 4, 5])
    run(engine, turn, fork)
    # States are saved at the ends of a prompt's chunks of 48 tokens, and of the answer's last row.
    hits = (196, 96) if engine.pool.groups.num_states else (196, 120)
    assert (turn.num_cached_tokens, fork.num_cached_tokens) == hits
    assert_greedy(checkpoint, long, short, turn, fork)


def test_preemption_where_only_one_fits(checkpoint: Checkpoint) -> None:
    num_tokens = 190 + NUM_NEW
    groups = new_engine(checkpoint)[0].pool.groups
    num_blocks = groups.num_at_most(num_tokens)
    assert num_blocks < groups.num_groups * groups.num_rows(num_tokens)
    sizes = {"max_model_len": num_tokens, "num_gpu_blocks_override": num_blocks}
    engine, _ = new_engine(checkpoint, **sizes)
    sequences = [new_sequence(str(seed), drawn(length, seed)) for seed, length in LENGTHS]
    run(engine, *sequences)
    assert_greedy(checkpoint, *sequences)


def test_hand_over(checkpoint: Checkpoint) -> None:
    """Only the blocks within windows move, into a cache full of what others have left."""
    (source, source_cache), (target, target_cache) = new_engine(checkpoint), new_engine(checkpoint)
    target_cache.slab.fill_(7.0)
    leaving = new_sequence("leaving", drawn(190), hand_over=True)
    source.submit(leaving)
    while source.has_work:
        source.step()
    groups, num_tokens = target.pool.groups, leaving.num_computed
    needed = groups.needed(num_tokens)
    moved = target.reserve(len(needed))
    assert moved is not None and num_tokens == 190
    assert len(moved) < groups.num_groups * groups.num_rows(num_tokens)
    for index, block_id in zip(needed, moved, strict=True):
        target_cache.write_block(block_id, source_cache.read_block(leaving.block_ids[index]))
    arriving = new_sequence("arriving", drawn(190), (leaving.tokens[-1],))
    arriving.block_ids, arriving.num_computed = groups.table(moved, num_tokens), num_tokens
    target.join(arriving)
    run(target)
    assert_greedy(checkpoint, arriving)


@pytest.mark.parametrize(
    ("variant", "asked", "said"),
    [
        ("qwen3-next", {"tensor_parallel_size": 2}, "recurrent states .* cannot be divided yet"),
        (
            "qwen3-next",
            {"speculative_config": SpeculativeConfig(method="ngram")},
            "speculative_config is not",
        ),
        ("qwen3-next", {"enable_lora": True}, "enable_lora is not supported for Qwen3NextFor"),
        ("qwen3-next", {"block_size": 1}, "block_size = 1 is too small .* Set block_size = 2"),
        ("gemma3n", {"tensor_parallel_size": 2}, "several residual streams .* divided yet"),
        (
            "gemma3n",
            {"speculative_config": SpeculativeConfig(method="early_exit", exit_layer=2)},
            "early_exit is not possible for .* ngram or draft_model",
        ),
    ],
)
def test_what_is_not_supported_with_states_or_streams_is_refused(
    variant: str, asked: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, variant)
    with pytest.raises(StartupError, match=said):
        new_engine(checkpoint, **asked)


def test_a_model_with_recurrent_states_cannot_draft(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "m", "qwen3")
    drafts = write_checkpoint(tmp_path / "drafts", "qwen3-next").directory
    asked = SpeculativeConfig(method="draft_model", model=str(drafts))
    with pytest.raises(StartupError, match=r"drafts cannot draft: .* have a recurrent state"):
        new_engine(checkpoint, speculative_config=asked)


@pytest.mark.parametrize("format", ["auto", "int8"])
@pytest.mark.parametrize("checkpoint", some(EACH_RUN, VARIANTS), indirect=True)
def test_bfloat16_is_as_with_one_group(
    checkpoint: Checkpoint, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are the compiled step and compiled attention, where this machine has them: they find the
    blocks of each layer, so that no log-probability differs in a bit."""
    settings = {"dtype": "bfloat16", "kv_cache_dtype": format}
    prompts = drawn(150), drawn(70, 6)

    def logprobs() -> list[object]:
        engine, _ = new_engine(checkpoint, **settings)
        sequences = [new_sequence(str(len(each)), each, logprobs=3) for each in prompts]
        events = run(engine, *sequences)
        assert len(events) == NUM_NEW * len(prompts)
        return [*(each.logprobs for each in events), *(each.prompt_logprobs for each in sequences)]

    in_groups = logprobs()
    monkeypatch.setattr(check, "group_layers", lambda _, sources: one_group(sources))
    assert logprobs() == in_groups
