"""Quantised checkpoints that stay quantised: the same floats, the same logits, bytes as counted.

What a GPU multiplies is done here by the reference of its kernel; `interpreted_packed.py` compares
the two.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from disagg.capacity.gpus import CPU_CORE, GPUS
from disagg.capacity.roofline import placements
from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import step_times
from disagg.config import EngineConfig
from disagg.engine.device.check import choose
from disagg.kernels import reference
from disagg.kernels.activation import Activation
from disagg.kernels.cpu.linear import PlainLinear
from disagg.kernels.ops import Experts
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.torch.ops import TorchOps
from disagg.models.communicator import Communicator
from disagg.models.decoder import load_model
from disagg.models.description import describe_model
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.quantized_values import Quantized
from disagg.models.share import WHOLE, Share
from tests.models.paging import logits_of
from tests.models.quantized_files import KINDS, all_tensors, nbytes_of, write_quantized
from tests.models.rank_threads import on_ranks
from tests.models.test_ranks import compute, eight_heads

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj"


class ReferenceProduct(PlainLinear):
    """The reference, where a decoder on a CPU wants a product."""

    def __init__(self, weight: PackedMatrix, bias: Tensor | None) -> None:
        self._matrix, self._its_bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return reference.packed_linear(x, self._matrix, self._its_bias)


class FakeGpuOps(TorchOps):
    """Keeps packed matrices as a GPU does."""

    keeps_packed: Literal["gpu", "cpu"] | None = "gpu"

    def pack(self, weight: Any, bias: Tensor | None, largest: Any = None) -> Any:
        if isinstance(weight, PackedMatrix):
            return ReferenceProduct(weight, bias)
        return super().pack(weight, bias, largest)

    def pack_experts(self, experts: Experts) -> Any:
        return (
            experts if isinstance(experts.gate_up, PackedMatrix) else super().pack_experts(experts)
        )

    def mix_experts(self, x: Tensor, logits: Tensor, experts: Any) -> Tensor:
        if isinstance(experts, Experts):
            return reference.mix_experts(x, logits, experts)
        return super().mix_experts(x, logits, experts)

    def pack_gated(self, weight: Any, bias: Tensor | None) -> Any:
        if isinstance(weight, PackedMatrix):
            return (ReferenceProduct(weight, bias),)
        return super().pack_gated(weight, bias)

    def project_gated(self, x: Tensor, weight: Any, activation: Activation = "silu") -> Tensor:
        if len(weight) == 1:
            return reference.gated_mul(weight[0](x), activation)
        return super().project_gated(x, weight, activation)


def same(token: Tensor) -> Tensor:
    """What one rank agrees on with itself."""
    return token


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_stands_for_the_same_floats(kind: str, tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", kind, **eight_heads("llama")).directory
    model = describe_model(directory)
    num_packed = {}
    for share in (WHOLE, Share(0, 2), Share(1, 2)):
        found = all_tensors(directory, share, keeps_packed="gpu")
        wanted = all_tensors(tmp_path / "floats", share)
        assert found.keys() == wanted.keys()
        kept = [each for each in found.values() if isinstance(each, PackedMatrix)]
        num_packed[share] = len(kept)
        for name, its in wanted.items():
            own = found[name]
            own = own.widened(torch.float32) if isinstance(own, PackedMatrix) else own
            assert torch.equal(own, its), (name, share)
        nbytes = nbytes_of(found)
        counted = weights_nbytes(model.config, DeviceFormat(4, kept=model.tensors), share)
        assert nbytes == counted
    assert num_packed[WHOLE] == 4 * model.config.num_layers
    # Of `down`, a rank of two has 40 columns: groups of 16 are cut in two, and both ranks widen it,
    # so that they plan alike. In an order of activations, so is `output`, of which they have 64.
    format = model.config.quantized
    assert format is not None
    cut = 1 + ("order" in kind) if format.group_size or format.block else 0
    for rank in range(2):
        assert num_packed[Share(rank, 2)] == (4 - cut) * model.config.num_layers


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("qwen3-mixed-windows", "fp8 blocks"),
        ("phi3", "float rows"),
        ("mistral-sliding", "int8 with zeros"),
        ("llama-tied-biased-llama3", "packed with zeros"),
        ("qwen2", "awq"),
        ("qwen2", "gptq in order of activations"),
        ("qwen3-moe-dense-first", "fp8 tensor"),
        ("qwen2-moe", "gptq 8 bits"),
        ("qwen3-moe", "fp8 blocks"),
        ("mixtral", "awq"),
        ("qwen2-moe-dense-between", "gptq uneven groups"),
        ("deepseek-v3", "fp8 blocks"),
    ],
)
def test_logits_are_those_of_the_widened_weights(variant: str, kind: str, tmp_path: Path) -> None:
    model = describe_model(write_quantized(tmp_path, variant, kind).directory)
    found, wanted = (
        logits_of(load_model(model, torch.float32, CPU, ops=ops))
        for ops in (FakeGpuOps(), TorchOps())
    )
    assert wanted.abs().max() > 0.5
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["fp8 blocks", "packed with zeros", "gptq"])
def test_a_head_keeps_its_bits(kind: str, tmp_path: Path) -> None:
    """Also the part of a rank, whose rows begin inside a block of scales."""
    directory = write_quantized(tmp_path, "llama", kind, with_head=True).directory
    model = describe_model(directory)
    for share in (WHOLE, Share(0, 2), Share(1, 2)):
        found = all_tensors(directory, share, keeps_packed="gpu")
        wanted = all_tensors(tmp_path / "floats", share)["lm_head"]
        assert isinstance(found["lm_head"], PackedMatrix)
        assert torch.equal(found["lm_head"].widened(torch.float32), wanted)
        nbytes = nbytes_of(found)
        assert nbytes == weights_nbytes(model.config, DeviceFormat(4, kept=model.tensors), share)
    packed, wide = (
        compute(load_model(describe_model(place), torch.float32, CPU, ops=ops), [*range(30)], same)
        for place, ops in ((directory, FakeGpuOps()), (tmp_path / "floats", TorchOps()))
    )
    for left, right in zip(packed.logits, wide.logits, strict=True):
        torch.testing.assert_close(left, right, atol=2e-5, rtol=0)


SMALL_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}


@pytest.mark.parametrize("kind", ["fp8 blocks", "int8 with zeros", "packed with zeros", "awq"])
def test_experts_keep_their_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a layer are one matrix, of which there never is a wide one; the parts of ranks have
    rows of gate and of up of each expert."""
    monkeypatch.setattr(Quantized, "widened", lambda *_: pytest.fail("a matrix was widened"))
    sizes = SMALL_EXPERTS | eight_heads("qwen2-moe")
    directory = write_quantized(tmp_path, "qwen2-moe", kind, **sizes).directory
    model = describe_model(directory)
    for share in (WHOLE, Share(0, 2), Share(1, 2)):
        found = all_tensors(directory, share, keeps_packed="gpu")
        wanted = all_tensors(tmp_path / "floats", share)
        for field in ("gate_up", "down", "shared_gate_up", "shared_down"):
            own = found[f"1.{field}"]
            assert isinstance(own, PackedMatrix), field
            assert torch.equal(own.widened(torch.float32), wanted[f"1.{field}"])
        nbytes = nbytes_of(found)
        assert nbytes == weights_nbytes(model.config, DeviceFormat(4, kept=model.tensors), share)


def test_experts_in_orders_of_their_own_are_widened_and_counted_so(tmp_path: Path) -> None:
    kind = "gptq in order of activations"
    directory = write_quantized(tmp_path, "qwen2-moe", kind, **SMALL_EXPERTS).directory
    model, found = describe_model(directory), all_tensors(directory, keeps_packed="gpu")
    for field, is_packed in (("gate_up", False), ("down", False), ("shared_gate_up", True)):
        assert isinstance(found[f"1.{field}"], PackedMatrix) == is_packed
    nbytes = nbytes_of(found)
    assert nbytes == weights_nbytes(model.config, DeviceFormat(4, kept=model.tensors))
    assert shape_of(model).has_widened_experts


def test_groups_that_ranks_cut_become_smaller_ones(tmp_path: Path) -> None:
    """48 columns each, of groups of 32: 16 columns share a scale then."""
    sizes = {**eight_heads("llama"), "intermediate_size": 96}
    directory = write_quantized(tmp_path, "llama", "gptq uneven groups", **sizes).directory
    for share in (Share(0, 2), Share(1, 2)):
        own = all_tensors(directory, share, keeps_packed="gpu")["1.down"]
        wanted = all_tensors(tmp_path / "floats", share)["1.down"]
        assert isinstance(own, PackedMatrix) and own.group == 16
        assert torch.equal(own.widened(torch.float32), wanted)


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        ("llama", "fp8 blocks"),
        ("llama", "awq"),
        ("llama", "gptq in order of activations"),
        ("qwen3-moe", "fp8 blocks"),
        ("qwen2-moe", "packed with zeros"),
        ("deepseek-v3", "fp8 blocks"),
    ],
)
def test_ranks_keep_their_parts(variant: str, kind: str, tmp_path: Path) -> None:
    sizes = eight_heads(variant) | (SMALL_EXPERTS if "moe" in variant else {})
    place = write_quantized(tmp_path, variant, kind, **sizes).directory
    model, ids = describe_model(place), [5 * each % 97 for each in range(30)]
    alone = compute(load_model(model, torch.float32, CPU), ids, same)

    def rank(communicator: Communicator) -> Any:
        decoder = load_model(model, torch.float32, CPU, communicator=communicator, ops=FakeGpuOps())
        return compute(decoder, ids, communicator.broadcast_)

    first, _ = on_ranks(2, rank, tmp_path)
    for found, wanted in zip(first.logits, alone.logits, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


def test_matrices_in_different_orders_are_widened(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which config.json does not say: so are parts of columns in an order that it denies."""
    directory = write_quantized(tmp_path, "llama", "gptq in order of activations").directory
    found = all_tensors(directory, keeps_packed="gpu")
    assert isinstance(found["0.down"], PackedMatrix) and found["0.down"].order is not None
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.g_idx"
    tensors[name] = tensors[name].flip(0)
    save_file(tensors, directory / "model.safetensors")
    found = all_tensors(directory, keeps_packed="gpu")
    assert isinstance(found["0.gate_up"], PackedMatrix)
    assert isinstance(found["1.gate_up"], Tensor)
    assert "up_proj.weight: converted to floats" in caplog.text


def test_a_gpu_plans_with_the_bytes_that_it_keeps(tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", "awq").directory
    engine = EngineConfig(device="cpu", dtype="bfloat16", block_size=16, max_num_seqs=4)
    plans = {}
    for name, place in (("packed", directory), ("floats", tmp_path / "floats")):
        model = describe_model(place)
        plans[name] = choose(engine, model, WHOLE).plan_memory(1 << 30, (4, 64))
    config = describe_model(directory).config
    assert plans["floats"].weights_nbytes == weights_nbytes(config, DeviceFormat(2))
    assert plans["packed"].weights_nbytes < 0.65 * plans["floats"].weights_nbytes
    assert plans["packed"].num_kv_tokens(engine, 1 << 30) > 0


@pytest.mark.parametrize(
    ("variant", "kind"),
    [
        *product(("llama", "qwen2-moe"), ("awq", "fp8 rows")),
        ("qwen2-moe", "gptq in order of activations"),
        ("qwen2-moe", "gptq rows in order of activations"),
    ],
)
def test_disagg_plan_counts_what_a_gpu_keeps(variant: str, kind: str, tmp_path: Path) -> None:
    """Except for norms and biases; scales of the files may have other types than it assumes."""
    sizes = SMALL_EXPERTS if variant == "qwen2-moe" else {}
    directory = write_quantized(tmp_path, variant, kind, **sizes).directory
    model, floats = describe_model(directory), describe_model(tmp_path / "floats")
    packed, wide = shape_of(model), shape_of(floats)
    kept = weights_nbytes(model.config, DeviceFormat(2, kept=model.tensors))
    whole = weights_nbytes(floats.config, DeviceFormat(2))
    others = whole - wide.weights_nbytes("bf16")  # norms and biases
    assert 0 < others < 0.02 * whole
    assert packed.weights_nbytes("bf16") + others == pytest.approx(kept, rel=0.02)
    table = 2 * packed.num_head_params
    if variant == "llama":
        assert packed.read_nbytes(1, "bf16") == packed.weights_nbytes("bf16") - table
    assert packed.weights_nbytes("fp8") == wide.weights_nbytes("fp8")
    on_cpu, on_gpu = (placements(packed, gpu)[0] for gpu in (CPU_CORE, GPUS["h100"]))
    assert on_cpu.weights_nbytes == wide.weights_nbytes("bf16") != on_gpu.weights_nbytes
    assert on_gpu.weights_nbytes == packed.weights_nbytes("bf16")
    assert step_times(packed, "") == step_times(wide, "")


def test_disagg_plan_counts_what_several_gpus_widen(tmp_path: Path) -> None:
    """Matrices of which each has some columns, in an order of activations."""
    kind = "gptq in order of activations"
    sizes = {**eight_heads("llama"), "hidden_size": 64, "intermediate_size": 128}
    model = describe_model(write_quantized(tmp_path, "llama", kind, **sizes).directory)
    shares = [Share(rank, 2) for rank in range(2)]
    format = DeviceFormat(2, kept=model.tensors)
    kept = [weights_nbytes(model.config, format, each) for each in shares]
    of_one, of_two = placements(shape_of(model), GPUS["h100"])[:2]
    assert of_two.weights_nbytes == pytest.approx(sum(kept), rel=0.1)
    assert of_one.weights_nbytes < 0.8 * of_two.weights_nbytes
