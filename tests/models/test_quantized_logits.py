"""Quantised checkpoints are computed as transformers computes the floats that they stand for, on
GPUs and CPUs, by one process and by ranks; and so are weights that are quantised while loading."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from disagg.engine.device.communicator import TorchCommunicator
from disagg.kernels.cpu.library import find_step
from disagg.kernels.cpu.narrow_linear import NarrowLinear
from disagg.kernels.packed_matrix import quantized
from disagg.kernels.packed_sizes import OnlineKind
from disagg.models.communicator import Communicator
from disagg.models.decoder import CpuDecoder, Decoder, load_model, scores_of
from disagg.models.description import ModelDescription, describe_model
from disagg.models.packing import LAYER_FIELDS, DeviceFormat, weights_nbytes
from disagg.models.share import WHOLE, Share
from tests.grids import some
from tests.models.checkpoints import assert_logits_are_transformers, write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.gpu_ops import FakeGpuOps, QuantizingGpuOps
from tests.models.paging import logits_of
from tests.models.quantized_files import GPT_OSS, all_tensors, nbytes_of, write_quantized
from tests.models.rank_threads import on_ranks
from tests.models.test_gguf import small_model
from tests.models.test_ranks import compute, eight_heads

CPU = torch.device("cpu")
Write = Callable[[Path], ModelDescription]
# Each family that may be quantised; `test_popular` writes them into docs/reference/models.md.
OF_FAMILIES = [
    ("qwen3-mixed-windows", "fp8 blocks"),
    ("phi3", "float rows"),
    ("mistral-sliding", "int8 with zeros"),
    ("llama-tied-biased-llama3", "packed with zeros"),
    ("qwen2", "awq"),
    ("qwen2", "gptq in order of activations"),
    ("qwen3-moe-dense-first", "fp8 tensor"),
    ("qwen2-moe", "gptq 8 bits"),
    ("mixtral", "gptq uneven groups"),
    ("qwen3-next", "fp8 blocks"),
    ("qwen3.5", "float rows"),
    ("qwen3.5-moe", "fp8 blocks"),
    ("deepseek-v2-groups", "float rows"),
    ("deepseek-v3", "fp8 blocks"),
    ("deepseek-v3.2", "fp8 blocks"),
    ("glm-moe-dsa", "float rows"),
    ("glm4-moe", "float rows"),
    ("glm4-moe-lite", "int8"),
    ("minimax-m2", "fp8 blocks"),
    ("gemma", "int8"),
    ("gemma2", "awq"),
    ("gemma3", "fp8 blocks"),
    ("gemma3n", "awq"),
    ("olmo2", "float rows"),
    ("olmo3", "packed with zeros"),
    ("gpt-oss", "mxfp4"),
    ("olmoe", "int8"),
    ("smollm3", "awq"),
    ("ministral3", "fp8 blocks"),
    ("granite", "packed with zeros"),
    ("glm", "gptq 8 bits"),
    ("glm4", "float rows"),
    ("exaone4", "fp8 blocks"),
    ("seed-oss", "awq"),
    ("ernie4-5", "int8 with zeros"),
    ("phi3-longrope", "fp8 blocks"),
    ("llama", "nvfp4 of modelopt"),
    ("qwen3-moe", "nvfp4"),
    ("qwen3", "mxfp4 packed"),
]


@pytest.mark.parametrize(("variant", "kind"), OF_FAMILIES)
def test_logits_are_those_of_the_widened_weights(variant: str, kind: str, tmp_path: Path) -> None:
    """Also where they are not widened."""
    sizes: dict[str, Any] = GPT_OSS if kind == "mxfp4" else {}
    checkpoint = write_quantized(tmp_path, variant, kind, **sizes)
    assert_logits_are_transformers(checkpoint)
    scores = scores_of(describe_model(checkpoint.directory).config)
    assert_logits_are_transformers(checkpoint, ops=FakeGpuOps(scores=scores))


def _bits_of(decoder: Decoder) -> set[int]:
    """Of the narrow matrices of a CPU."""
    mlp = decoder._layers[0].mlp
    found = (decoder._layers[0].output, mlp.down)  # type: ignore[union-attr]
    return {each.bits for each in found if isinstance(each, NarrowLinear)}


ON_CPUS = [
    ("llama", "awq", {4}),
    ("qwen3", "packed 8 bits", {8}),
    ("gemma2", "packed with zeros", {4}),
    ("phi3", "int8", {8}),
    ("llama", "gptq in order of activations", set()),
]


@pytest.mark.parametrize(("variant", "kind", "bits"), ON_CPUS)
def test_logits_of_cpus_that_keep_the_bits(
    variant: str, kind: str, bits: set[int], tmp_path: Path
) -> None:
    checkpoint = write_quantized(tmp_path, variant, kind)
    assert_logits_are_transformers(checkpoint, quantization="packed")
    model = describe_model(checkpoint.directory)
    assert _bits_of(load_model(model, torch.float32, CPU, quantization="packed")) == bits


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1, Type.Q8_0, Type.Q5_0])
def test_logits_of_gguf_blocks_that_a_cpu_keeps(kind: Type, tmp_path: Path) -> None:
    """Of Q5_0, which it widens, too."""
    tied = kind == Type.Q4_0
    model = small_model(tie_word_embeddings=tied, num_hidden_layers=2)
    described = describe_model(write_gguf(tmp_path / "model.gguf", model, kind=kind))
    assert described.config.dtype == "bfloat16"
    wide = load_model(described, torch.float32, CPU)
    decoder = load_model(described, torch.float32, CPU, quantization="packed")
    found, wanted = logits_of(decoder), logits_of(wide)
    assert wanted.abs().max() > 0.05
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
    bits = {Type.Q8_0: {8}, Type.Q5_0: set[int]()}.get(kind, {4})
    tables = decoder._embedding, decoder._lm_head
    assert _bits_of(decoder) == bits == {e.bits for e in tables if isinstance(e, NarrowLinear)}
    assert (tables[0] is tables[1]) == tied


# Columns of two and of four ranks are groups of 32.
SIZES: dict[str, Any] = {**eight_heads("llama"), "intermediate_size": 128}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}


def _same(token: Tensor) -> Tensor:
    """What one rank agrees on with itself."""
    return token


def _check_ranks_compute_the_same(
    load: Callable[[Communicator | None], Decoder],
    num_ranks: int,
    place: Path,
    *,
    has_whole_experts: bool = False,
) -> None:
    """As one process does that keeps the same numbers."""
    ids = [5 * each % 97 for each in range(30)]
    alone = compute(load(None), ids, _same)

    def rank(communicator: Communicator) -> Any:
        return compute(load(communicator), ids, communicator.broadcast_)

    by_gloo = place if num_ranks == 2 else None
    first, *_ = on_ranks(num_ranks, rank, by_gloo, has_whole_experts=has_whole_experts)
    assert first.chosen == alone.chosen
    for found, wanted in zip(first.logits, alone.logits, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


def _gguf(kind: Type) -> Write:
    return lambda place: describe_model(write_gguf(place / "a.gguf", small_model(), kind=kind))


def _stored(variant: str, kind: str, **sizes: Any) -> Write:
    sizes = {**eight_heads(variant), **sizes}
    return lambda place: describe_model(write_quantized(place, variant, kind, **sizes).directory)


@pytest.mark.parametrize(
    ("write", "options", "num_ranks", "has_whole_experts"),
    [
        (_stored("deepseek-v3", "fp8 blocks"), {"ops": FakeGpuOps()}, 2, False),
        (_stored("qwen2-moe", "packed with zeros", **EXPERTS), {"ops": FakeGpuOps()}, 2, True),
        (_stored("llama", "nvfp4", intermediate_size=128), {"ops": FakeGpuOps()}, 4, False),
        (_stored("llama", "awq", intermediate_size=128), {"quantization": "packed"}, 4, False),
        (_gguf(Type.Q4_1), {"quantization": "packed"}, 4, False),
    ],
    ids=[
        "latents on GPUs",
        "whole experts on GPUs",
        "fp4 on GPUs",
        "words on CPUs",
        "blocks on CPUs",
    ],
)
def test_ranks_compute_with_the_bits_of_a_checkpoint(
    write: Write,
    options: dict[str, Any],
    num_ranks: int,
    has_whole_experts: bool,
    tmp_path: Path,
) -> None:
    """What each has is tested in `test_quantized_weights`."""
    model = write(tmp_path)

    def load(communicator: Communicator | None) -> Decoder:
        return load_model(model, torch.float32, CPU, communicator=communicator, **options)

    _check_ranks_compute_the_same(load, num_ranks, tmp_path, has_whole_experts=has_whole_experts)


@pytest.mark.parametrize(
    ("kind", "num_ranks"), some([("int8", 2), ("int4", 4)], [("int8", 4), ("int4", 2)])
)
def test_ranks_on_cpus_quantise_as_one_process_does(
    kind: OnlineKind, num_ranks: int, tmp_path: Path
) -> None:
    """Though a scale of int8 is that of a whole row, of which a rank has some columns."""
    sizes = {**SIZES, **({"intermediate_size": 80} if kind == "int8" else {})}
    model = describe_model(write_checkpoint(tmp_path, "llama", **sizes).directory)

    def load(communicator: Communicator | None) -> Decoder:
        decoder = load_model(
            model, torch.float32, CPU, quantization=kind, communicator=communicator
        )
        assert _bits_of(decoder) == {int(kind.removeprefix("int"))}
        return decoder

    _check_ranks_compute_the_same(load, num_ranks, tmp_path)


@pytest.mark.parametrize(
    ("kind", "variant", "has_whole_experts"),
    some(
        [
            ("fp8", "deepseek-v3", False),  # whose sizes here cut groups of int4
            ("int8", "qwen2-moe", False),
            ("int4", "llama", False),
            ("fp8", "qwen2-moe", True),
            ("int4", "qwen2-moe", True),
        ],
        [
            ("fp8", "llama", False),
            ("fp8", "qwen2-moe", False),
            ("int8", "llama", False),
            ("int8", "deepseek-v3", False),
            ("int8", "qwen2-moe", True),
            ("int4", "qwen2-moe", False),
        ],
    ),
)
def test_ranks_on_gpus_quantise_as_one_process_does(
    kind: OnlineKind, variant: str, has_whole_experts: bool, tmp_path: Path
) -> None:
    sizes = {**eight_heads(variant), "intermediate_size": 128}
    if "moe" in variant:  # whole experts need no whole groups for two ranks, but for one
        of_experts = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}
        sizes |= of_experts if has_whole_experts else EXPERTS
    model = describe_model(write_checkpoint(tmp_path, variant, **sizes).directory)

    def load(communicator: Communicator | None) -> Decoder:
        ops = QuantizingGpuOps(kind)
        return load_model(
            model, torch.float32, CPU, quantization=kind, communicator=communicator, ops=ops
        )

    _check_ranks_compute_the_same(load, 2, tmp_path, has_whole_experts=has_whole_experts)
    for share in (WHOLE, Share(1, 2, has_whole_experts)):
        kept = {
            name: quantized(each, kind) if name.partition(".")[2] in LAYER_FIELDS else each
            for name, each in all_tensors(Path(model.source), share).items()
        }
        counted = weights_nbytes(model.config, DeviceFormat(4, quantization=kind), share)
        assert nbytes_of(kept) == counted


def test_ranks_ask_nothing_of_each_other_for_scales_of_experts(tmp_path: Path) -> None:
    """They have unequal numbers of them."""
    sizes = eight_heads("qwen3-moe")
    model = describe_model(write_checkpoint(tmp_path, "qwen3-moe", **sizes).directory)

    def num_asked(communicator: Communicator) -> int:
        asked, largest = 0, communicator.largest_

        def counted(x: Tensor) -> Tensor:
            nonlocal asked
            asked += 1
            return largest(x)

        communicator.largest_ = counted  # type: ignore[method-assign]
        ops = QuantizingGpuOps("int8")
        load_model(model, torch.float32, CPU, communicator=communicator, ops=ops)
        return asked

    num_layers = model.config.num_layers
    assert on_ranks(2, num_asked, has_whole_experts=True) == [num_layers] * 2  # of attention
    assert on_ranks(2, num_asked) == [2 * num_layers] * 2


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_products_of_ranks_are_compiled_though_their_steps_are_not(
    bits: Any, tmp_path: Path
) -> None:
    model = describe_model(write_checkpoint(tmp_path, "llama", **SIZES).directory)

    def rank(communicator: Communicator) -> None:
        decoder = load_model(
            model, torch.bfloat16, CPU, quantization=bits, communicator=communicator
        )
        assert not isinstance(decoder, CpuDecoder)
        is_compiled = find_step().loaded is not None
        down = decoder._layers[1].mlp.down  # type: ignore[union-attr]
        assert (down._library is not None) == is_compiled
        x = torch.randn(3, down.num_in, generator=torch.Generator().manual_seed(2)).bfloat16()
        wanted = x.float() @ down.widened().float().T
        torch.testing.assert_close(down(x).float(), wanted, atol=0.02, rtol=0.02)

    on_ranks(2, rank, tmp_path)


def test_ranks_on_gpus_agree_on_the_largest_by_a_group_beside_nccl(tmp_path: Path) -> None:
    def rank(communicator: Communicator) -> Tensor:
        assert isinstance(communicator, TorchCommunicator)
        communicator._is_cpu = False  # as of GPUs, whose group would wait for a rank that is gone
        own = communicator.share.rank
        return communicator.largest_(torch.tensor([1.0 + own, 3.0 - own]))

    for found in on_ranks(2, rank, tmp_path):
        assert found.tolist() == [2.0, 3.0]
