"""Our engine against transformers: the same tokens, whatever chunks, caches and preemptions do."""

from __future__ import annotations

import dataclasses
import random
from array import array
from collections.abc import MutableSequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import transformers
from torch.nn import functional

from bench.random_models import random_decoder
from disagg.config import EngineConfig
from disagg.engine.device import build, choices, prompt_scores
from disagg.engine.device.build import build_engine
from disagg.engine.device.check import check_engine
from disagg.engine.device.sampler import Chosen
from disagg.engine.engine import Engine
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.errors import ModelError, NotEnoughMemory, RequestError, StartupError
from disagg.kernels.kv_pages import KVPages
from disagg.messages import Pooling, StartStep, TokenLogprobs
from disagg.models.batch import Batch
from disagg.models.decoder import Decoder
from disagg.models.description import describe_model
from disagg.time_model import StepFeatures
from tests import generate_requests
from tests.models.roundings import assert_off_as_roundings

BLOCK_SIZE = 4
VOCAB_SIZE = 128
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
}


Made: TypeAlias = tuple[transformers.PreTrainedModel, Path]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Other families are compared with transformers by their logits: `tests/models`."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=16)).eval()
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    return model, directory


def config(**changes: object) -> EngineConfig:
    defaults: dict[str, object] = {
        "dtype": "float32",
        "device": "cpu",
        "block_size": BLOCK_SIZE,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 7,
        "num_gpu_blocks_override": 18,
    }
    return EngineConfig(**{**defaults, **changes})  # type: ignore[arg-type]


def new_sequence(
    name: str,
    prompt: list[int],
    output: tuple[int, ...] = (),
    draft: tuple[int, ...] = (),
    **sampling: Any,
) -> Sequence:
    sampling |= {"request_id": name, "draft_token_ids": draft}
    return generate_requests.new_sequence(prompt, output, block_size=BLOCK_SIZE, **sampling)


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for sequence in sequences:
        engine.submit(sequence)
    while engine.has_work:
        engine.step()
        engine.check()
    return [sequence.tokens[sequence.num_prompt_tokens :] for sequence in sequences]


def prompts() -> list[list[int]]:
    rng = random.Random(1)
    drawn = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (1, 5, 17, 30, 26)]
    return [*drawn, [*drawn[3][:20], 1, 2, 3], drawn[3]]


def reference(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """The next 16 tokens."""
    return _generated(model, tuple(prompt))


@cache
def _generated(model: transformers.PreTrainedModel, prompt: tuple[int, ...]) -> list[int]:
    with torch.no_grad():
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=16,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in tokens[0, len(prompt) :]]


def test_greedy_tokens_are_those_of_transformers(checkpoint: Made) -> None:
    model, directory = checkpoint
    engine, _ = build_engine(config(), describe_model(directory))
    sequences = [new_sequence(str(i), p, temperature=0.0) for i, p in enumerate(prompts())]
    outputs = run(engine, sequences)
    assert engine.scheduler.num_preempted > 0
    assert any(sequence.num_cached_tokens > 0 for sequence in sequences)
    for prompt, output in zip(prompts(), outputs, strict=True):
        assert output == reference(model, prompt)
    assert engine.pool.num_free == 18


def test_sampled_tokens_do_not_depend_on_batch_chunks_or_worker(checkpoint: Made) -> None:
    """Also a request that moved, with the tokens it had, goes on as if nothing had happened."""
    _, directory = checkpoint
    sampling: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "seed": 5,
        "presence_penalty": 0.3,
    }
    tight, _ = build_engine(config(), describe_model(directory))
    roomy, _ = build_engine(
        config(max_num_batched_tokens=64, num_gpu_blocks_override=100), describe_model(directory)
    )
    together = run(tight, [new_sequence(str(i), p, **sampling) for i, p in enumerate(prompts())])
    for i, prompt in enumerate(prompts()):
        assert run(roomy, [new_sequence(str(i), prompt, **sampling)]) == [together[i]]
        moved = new_sequence("moved", prompt, tuple(together[i][:6]), **sampling)
        assert run(roomy, [moved]) == [together[i]]


def test_a_draft_changes_no_token_and_no_logprob(checkpoint: Made) -> None:
    """Right to its end, wrong somewhere, wrong at once; whole or in the pieces of small steps."""
    _, directory = checkpoint
    asked: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "min_tokens": 3}
    asked |= {"logprobs": 2, "stop_token_ids": (3, 50)}
    plain, _ = build_engine(config(max_num_batched_tokens=64), describe_model(directory))
    undrafted = [said(plain, new_sequence("plain", each, **asked)) for each in prompts()[1:4]]
    for max_num_batched_tokens in (64, 7):
        engine, _ = build_engine(
            config(max_num_batched_tokens=max_num_batched_tokens), describe_model(directory)
        )
        for prompt, expected in zip(prompts()[1:4], undrafted, strict=True):
            answer = tuple(token_id for token_id, _ in expected)
            for num_right in (0, 1, 5, 15):
                wrong = tuple((token_id + 1) % VOCAB_SIZE for token_id in answer[num_right:])
                draft = answer[:num_right] + wrong
                found = said(engine, new_sequence("drafted", prompt, draft=draft, **asked))
                assert [token_id for token_id, _ in found] == list(answer)
                for (_, logprobs), (_, wanted) in zip(found, expected, strict=True):
                    assert logprobs.logprob == pytest.approx(wanted.logprob, abs=1e-5)
                    assert [token for token, _ in logprobs.top] == [t for t, _ in wanted.top]
        assert engine.scheduler.num_accepted > 0
        assert engine.scheduler.num_drafted > engine.scheduler.num_accepted
        assert engine.pool.num_free == engine.pool.num_blocks


def said(engine: Engine, sequence: Sequence) -> list[tuple[int, TokenLogprobs]]:
    """An answer's tokens with their log-probabilities."""
    engine.submit(sequence)
    pairs: list[tuple[int, TokenLogprobs]] = []
    while engine.has_work:
        for event in engine.step():
            assert event.logprobs is not None
            pairs += zip(event.token_ids, event.logprobs, strict=True)
    return pairs


def test_logprobs_are_those_of_transformers(checkpoint: Made) -> None:
    model, directory = checkpoint
    engine, _ = build_engine(config(), describe_model(directory))
    prompt = prompts()[2]
    engine.submit(new_sequence("r", prompt, temperature=0.0, logprobs=2, max_tokens=4))
    events = [event for _ in range(9) for event in engine.step()]
    tokens = [event.token_ids[0] for event in events]
    with torch.no_grad():
        logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    expected = torch.log_softmax(logits, dim=-1)
    for event, row in zip(events, expected, strict=True):
        assert event.logprobs is not None
        (found,) = event.logprobs
        assert found.logprob == pytest.approx(float(row[event.token_ids[0]]), abs=1e-4)
        assert [token_id for token_id, _ in found.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize("rows_at_once", [64, 3])
def test_logprobs_of_prompts_are_those_of_transformers(
    checkpoint: Made,
    rows_at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the chunks, the company and the preemptions, and though their prefix is cached."""
    monkeypatch.setattr(prompt_scores, "ROWS_AT_ONCE", rows_at_once)
    model, directory = checkpoint
    engine, _ = build_engine(config(), describe_model(directory))
    for turn in range(2):
        scored = [
            new_sequence(f"{turn} {i}", p, temperature=0.0, prompt_logprobs=2)
            for i, p in enumerate(prompts())
        ]
        plain = new_sequence(f"{turn} plain", prompts()[3], temperature=0.0)
        outputs = run(engine, [*scored[:3], plain, *scored[3:]])
        for prompt, output in zip(prompts(), outputs[:3], strict=False):
            assert output == reference(model, prompt)
        for sequence, prompt in zip(scored, prompts(), strict=True):
            found = sequence.take_prompt_logprobs()
            assert found is not None and sequence.take_prompt_logprobs() is None
            check_prompt_logprobs(model, prompt, found)
        assert all(each.num_cached_tokens == 0 for each in scored)
        assert plain.prompt_logprobs is None
    assert plain.num_cached_tokens > 0
    assert engine.scheduler.num_preempted > 0


def check_prompt_logprobs(
    model: transformers.PreTrainedModel, prompt: list[int], found: tuple[TokenLogprobs, ...]
) -> None:
    with torch.no_grad():
        logits = model(torch.tensor([prompt])).logits[0, :-1]
    expected = torch.log_softmax(logits, dim=-1)
    for token_id, row, scores in zip(prompt[1:], expected, found, strict=True):
        assert scores.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
        assert [i for i, _ in scores.top] == row.topk(2).indices.tolist()
        assert scores.rank == 1 + int((row > row[token_id]).sum())


@pytest.mark.parametrize(
    ("dtype", "num_blocks"), [("float32", 18), ("float32", 90), ("bfloat16", 90)]
)
def test_pooled_prompts_are_those_of_transformers(
    checkpoint: Made, dtype: str, num_blocks: int
) -> None:
    """Whatever the chunks, the company and the preemptions, and with cached prefixes, of which some
    leave a single token to compute."""
    model, directory = checkpoint
    sizes = config(dtype=dtype, num_gpu_blocks_override=num_blocks)
    engine, _ = build_engine(sizes, describe_model(directory))

    def embeddings(model: Any, num_draws: int) -> torch.Tensor:
        return functional.normalize(ends(model, num_draws, "hidden_states"), dim=-1)

    def scores(model: Any, num_draws: int) -> torch.Tensor:
        return ends(model, num_draws, "logits")[..., [5, 3]]

    for turn in range(2):
        pooled = {
            asked: [
                new_sequence(f"{turn} {asked.token_ids} {i}", p, max_tokens=1, pooling=asked)
                for i, p in enumerate(prompts())
            ]
            for asked in (Pooling(), Pooling((5, 3)))
        }
        plain = [
            new_sequence(f"{turn} plain {i}", prompts()[i], temperature=0.0, prompt_logprobs=1)
            for i in (3, 4)
        ]
        mixed = [each for pair in zip(*pooled.values(), strict=True) for each in pair]
        *answers, last, _ = run(engine, [*plain, *mixed])
        assert dtype != "float32" or answers[0] == reference(model, prompts()[3])
        assert len(last) == 1 and all(each.pooled is None for each in plain)
        for asked, compute in ((Pooling(), embeddings), (Pooling((5, 3)), scores)):
            raw = [bytearray(each.pooled or b"") for each in pooled[asked]]
            found = torch.stack([torch.frombuffer(each, dtype=torch.float32) for each in raw])
            if dtype == "float32":
                with torch.no_grad():
                    torch.testing.assert_close(found, compute(model, 1), atol=1e-4, rtol=1e-4)
            else:
                assert_off_as_roundings(found, model, compute)
    if num_blocks == 18:
        assert engine.scheduler.num_preempted > 0
    else:
        assert pooled[Pooling()][2].num_cached_tokens == len(prompts()[2]) - 1


def ends(model: Any, num_draws: int, name: str) -> torch.Tensor:
    """What a model says of the last token of each prompt, so many times over."""
    found = []
    for prompt in prompts():
        output = model(torch.tensor([prompt] * num_draws), output_hidden_states=True)
        whole = output.logits if name == "logits" else output.hidden_states[-1]
        found.append(whole[:, -1])
    return torch.stack(found, 1).flatten(0, 1)


def test_decodes_are_not_looked_at_for_prompts_to_score() -> None:
    """A step has hundreds of them, and their prompts are computed."""

    class Untouched:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} of a decode is looked at")

    scored = new_sequence("r", prompts()[2], temperature=0.0, prompt_logprobs=1)
    num_tokens = len(prompts()[2])
    decodes: list[Any] = [Untouched() for _ in range(3)]
    plan = StepPlan([*decodes, scored], [1, 1, 1, num_tokens], 3, StepFeatures())
    assert prompt_scores.scored_rows(plan) == [(scored, 3, num_tokens - 1)]


def test_a_prompt_that_was_answered_in_part_is_scored_no_more(checkpoint: Made) -> None:
    """Its client has the log-probabilities: they came with the first token, from elsewhere."""
    engine, _ = build_engine(config(), describe_model(checkpoint[1]))
    moved = new_sequence("moved", prompts()[2], (5,), temperature=0.0, prompt_logprobs=1)
    run(engine, [moved])
    assert moved.take_prompt_logprobs() is None


def test_a_step_that_reads_no_token_is_waited_for(
    checkpoint: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU its KV would still be on the way when other workers are told of it."""
    engine, _ = build_engine(config(max_num_batched_tokens=8), describe_model(checkpoint[1]))
    waits: list[list[int]] = []
    sampled = Chosen.sampled

    def waiting(self: Chosen) -> list[Any]:
        waits.append([*self.token_ids.shape])
        return [*sampled(self)]

    monkeypatch.setattr(Chosen, "sampled", waiting)
    engine.submit(new_sequence("long", [*range(1, 21)], max_tokens=2))
    for num_waits, num_tokens in ((1, 0), (2, 0), (3, 1), (4, 1)):  # three chunks, a decode
        events = engine.step()
        assert len(waits) == num_waits and waits[-1] == [num_tokens]
        assert sum(len(each.token_ids) for each in events) == num_tokens
    assert not engine.has_work


def test_settings_reach_the_engine(checkpoint: Made) -> None:
    _, directory = checkpoint
    tables: list[MutableSequence[int]] = []
    told: list[StartStep] = []

    def new_generations(num_blocks: int) -> MutableSequence[int]:
        tables.append(array("Q", [5]) * num_blocks)
        return tables[0]

    model = describe_model(directory)
    engine, kv_cache = build_engine(
        config(max_model_len=None, block_size=None, num_gpu_blocks_override=9, dtype="bfloat16"),
        model,
        progress=told.append,
        new_generations=new_generations,
    )
    assert engine.pool.generations is tables[0] and len(tables[0]) == 9
    assert engine.pool.block_size == kv_cache.block_size == 16
    assert engine.scheduler.max_model_len == model.config.max_model_len == 128
    assert kv_cache.pages.format.name == "bfloat16" and model.fingerprint in kv_cache.layout
    *weights, blocks, last = told
    assert all(step.phase == "weights" for step in weights)
    assert weights[0].num_done < weights[-1].num_done == weights[-1].num_total
    assert [blocks, last] == [StartStep("kv_blocks", 0, 9, 4, 7), StartStep("warm_up")]
    with pytest.raises(RequestError, match="between 0 and 127"):
        engine.submit(new_sequence("r", [1, VOCAB_SIZE]))


def test_steps_get_the_threads_that_were_measured_for_their_size(
    checkpoint: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.get_num_threads()
    used: list[tuple[int, int]] = []
    forward = Decoder.forward

    def note_threads(decoder: Decoder, batch: Batch, pages: KVPages) -> torch.Tensor:
        used.append((len(batch.token_ids), torch.get_num_threads()))
        return forward(decoder, batch, pages)

    try:
        # Room for more tokens than the model has positions, which no step may reach.
        several = config(num_threads=2, num_gpu_blocks_override=200)
        engine, _ = build_engine(several, describe_model(checkpoint[1]))
        engine.runner.threads.limits = [(1, 1)]  # type: ignore[attr-defined]
        monkeypatch.setattr(Decoder, "forward", note_threads)
        run(engine, [new_sequence("a", [1, 2, 3, 4, 5], max_tokens=4)])
    finally:
        torch.set_num_threads(before)
    assert used == [(5, 2), (1, 1), (1, 1), (1, 1)]


def test_the_automatic_dtype_is_what_the_cpu_multiplies_fast(
    checkpoint: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = checkpoint
    for has_bfloat16, is_compiled, dtype in [
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ]:
        monkeypatch.setattr(choices, "cpu_multiplies_bfloat16", lambda has=has_bfloat16: has)
        monkeypatch.setattr(choices, "is_step_compiled", lambda is_so=is_compiled: is_so)
        _, kv_cache = build_engine(config(dtype="auto"), describe_model(directory))
        assert kv_cache.pages.values.dtype is dtype


def test_an_engine_is_built_around_weights_from_elsewhere(checkpoint: Made) -> None:
    """Of a checkpoint's shapes, but not its numbers: what benches measure."""
    _, directory = checkpoint
    model = describe_model(directory)
    built, _ = build_engine(config(), model)
    drawn, _ = build_engine(
        config(),
        model,
        load=lambda model, dtype, device, progress: random_decoder(model.config, dtype, device),
    )
    outputs = [
        run(engine, [new_sequence("a", [1, 2, 3], max_tokens=8)])[0] for engine in (built, drawn)
    ]
    assert len(outputs[1]) == 8 and outputs[0] != outputs[1]
    assert all(0 <= token_id < model.config.vocab_size for token_id in outputs[1])


def test_what_cannot_work_is_refused_at_start(
    checkpoint: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, directory = checkpoint
    with pytest.raises(StartupError, match="the model has 128 positions"):
        build_engine(config(max_model_len=129), describe_model(directory))
    with pytest.raises(NotEnoughMemory, match="needs 16 KV blocks"):
        build_engine(config(num_gpu_blocks_override=15), describe_model(directory))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(StartupError, match="finds no GPU"):
        build_engine(config(device="cuda"), describe_model(directory))


def test_the_check_refuses_what_building_would_without_loading(
    checkpoint: Made,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, directory = checkpoint
    monkeypatch.delattr(build, "load_model")
    check_engine(config(), describe_model(directory))
    with pytest.raises(NotEnoughMemory, match="needs 16 KV blocks"):
        check_engine(config(num_gpu_blocks_override=15), describe_model(directory))
    with pytest.raises(StartupError, match="the model has 128 positions"):
        check_engine(config(max_model_len=129), describe_model(directory))
    with pytest.raises(ModelError):
        check_engine(config(), describe_model(tmp_path / "nowhere"))


def test_a_gpu_computes_in_half_precision(checkpoint: Made) -> None:
    _, directory = checkpoint
    model = describe_model(directory).config
    for stored, dtype in [
        ("float32", "bfloat16"),
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
    ]:
        stored_model = dataclasses.replace(model, dtype=stored)
        assert choices.choose_dtype(config(dtype="auto"), stored_model, "cuda") == dtype
    assert choices.choose_dtype(config(), model, "cuda") == "float32"


def test_a_model_that_overflows_float16_is_not_computed_in_it(checkpoint: Made) -> None:
    _, directory = checkpoint
    model = dataclasses.replace(
        describe_model(directory).config, family="Gemma3ForCausalLM", dtype="float16"
    )
    assert choices.choose_dtype(config(dtype="auto"), model, "cuda") == "bfloat16"
    with pytest.raises(StartupError, match=r"Gemma3ForCausalLM become larger than float16's"):
        choices.choose_dtype(config(dtype="float16"), model, "cpu")


@pytest.mark.parametrize(
    ("flags", "multiplies"),
    [("flags : sse2 amx_bf16", True), ("flags : avx512_bf16 sse2", True), ("flags : avx2", False)],
)
def test_the_cpus_flags_tell_what_it_multiplies(
    flags: str, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: flags)
    assert choices.cpu_multiplies_bfloat16() is multiplies


def test_a_machine_without_cpu_flags_is_taken_for_a_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read_text(path: Path, encoding: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert not choices.cpu_multiplies_bfloat16()


def test_the_number_of_threads_is_set(checkpoint: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    _, directory = checkpoint
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    build_engine(config(num_threads=3), describe_model(directory))
    assert asked == [3]
