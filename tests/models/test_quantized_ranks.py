"""Weights of few bits on several ranks: together they keep and compute what one process does, and
each reads its part of the file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor

from disagg.config import EngineConfig
from disagg.engine.device.check import check_engine
from disagg.engine.device.communicator import TorchCommunicator
from disagg.errors import StartupError
from disagg.kernels.cpu.library import find_step
from disagg.kernels.cpu.narrow_linear import NarrowLinear
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.ops import Experts
from disagg.kernels.packed_matrix import quantized
from disagg.kernels.packed_sizes import OnlineKind
from disagg.kernels.torch.ops import TorchOps
from disagg.models import weights
from disagg.models.checkpoint import StoredTensor
from disagg.models.communicator import Communicator
from disagg.models.decoder import CpuDecoder, Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.packing import LAYER_FIELDS, DeviceFormat, weights_nbytes
from disagg.models.share import WHOLE, Share
from disagg.models.weights import load_weights
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.quantized_files import all_tensors, nbytes_of, write_quantized
from tests.models.rank_threads import on_ranks
from tests.models.test_gguf import small_model
from tests.models.test_packed import FakeGpuOps, same
from tests.models.test_ranks import compute, eight_heads

CPU = torch.device("cpu")
# Columns of two and of four ranks are groups of 32.
SIZES = {**eight_heads("llama"), "intermediate_size": 128}
EXPERTS = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
Load = Callable[[Communicator | None], Decoder]


class QuantizingGpuOps(FakeGpuOps):
    """Quantises as a GPU does when it loads."""

    def __init__(self, kind: OnlineKind) -> None:
        super().__init__()
        self._gpu = TritonOps(1, 1, quantization=kind)

    def pack(self, weight: Any, bias: Tensor | None, largest: Any = None) -> Any:
        return super().pack(self._gpu._quantized(weight, largest), bias)

    def pack_table(self, weight: Any, bias: Tensor | None = None) -> Any:
        return TorchOps.pack(self, weight, bias)

    def pack_gated(self, weight: Any, bias: Tensor | None) -> Any:
        return super().pack_gated(self._gpu._quantized(weight), bias)

    def pack_experts(self, experts: Experts) -> Any:
        return self._gpu.pack_experts(experts)._experts


def check_ranks_compute_the_same(
    load: Load, num_ranks: int, place: Path, *, has_whole_experts: bool = False
) -> None:
    """As one process does that keeps the same numbers."""
    ids = [5 * each % 97 for each in range(30)]
    alone = compute(load(None), ids, same)

    def rank(communicator: Communicator) -> Any:
        return compute(load(communicator), ids, communicator.broadcast_)

    by_gloo = place if num_ranks == 2 else None
    first, *_ = on_ranks(num_ranks, rank, by_gloo, has_whole_experts=has_whole_experts)
    assert first.chosen == alone.chosen
    for found, wanted in zip(first.logits, alone.logits, strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("kind", ["fp8 blocks", "packed with zeros", "int8", "awq", "gptq"])
def test_a_rank_reads_only_its_part(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_quantized(tmp_path, "llama", kind, **SIZES).directory
    read, nbytes = weights.WeightReader._read, list[int]()

    def counted(reader: Any, name: str, stored: StoredTensor, box: Sequence[Any]) -> Tensor:
        found = read(reader, name, stored, box)
        if "_proj." in name:
            nbytes.append(found.nbytes)
        return found

    monkeypatch.setattr(weights.WeightReader, "_read", counted)
    sums = []
    for share in (WHOLE, *(Share(rank, 4) for rank in range(4))):
        nbytes.clear()
        model = describe_model(directory)
        list(load_weights(model, torch.float32, CPU, share=share).layers)
        sums.append(sum(nbytes))
    # One KV head of two, whole words and groups, and which group each column is of.
    assert max(sums[1:]) < 0.4 * sums[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_ranks_on_cpus_quantise_as_one_process_does(
    bits: Any, num_ranks: int, tmp_path: Path
) -> None:
    """Though a scale of int8 is that of a whole row, of which a rank has some columns."""
    sizes = {**SIZES, **({"intermediate_size": 80} if bits == "int8" else {})}
    model = describe_model(write_checkpoint(tmp_path, "llama", **sizes).directory)

    def load(communicator: Communicator | None) -> Decoder:
        decoder = load_model(
            model, torch.float32, CPU, quantization=bits, communicator=communicator
        )
        linear = decoder._layers[0].output
        assert isinstance(linear, NarrowLinear) and linear.bits == int(bits[3:])
        return decoder

    check_ranks_compute_the_same(load, num_ranks, tmp_path)


@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        *itertools.product(("fp8", "int8", "int4"), ("llama", "qwen2-moe")),
        ("fp8", "deepseek-v3"),  # whose sizes here cut groups of int4
        ("int8", "deepseek-v3"),
    ],
)
def test_ranks_on_gpus_quantise_as_one_process_does(
    kind: OnlineKind, variant: str, tmp_path: Path
) -> None:
    sizes = {**eight_heads(variant), "intermediate_size": 128}
    sizes |= EXPERTS if "moe" in variant else {}
    model = describe_model(write_checkpoint(tmp_path, variant, **sizes).directory)

    def load(communicator: Communicator | None) -> Decoder:
        ops = QuantizingGpuOps(kind)
        return load_model(
            model, torch.float32, CPU, quantization=kind, communicator=communicator, ops=ops
        )

    check_ranks_compute_the_same(load, 2, tmp_path)
    for share in (WHOLE, Share(1, 2)):
        check_quantised_nbytes(model, kind, share)


def check_quantised_nbytes(model: ModelDescription, kind: OnlineKind, share: Share) -> None:
    """What is counted for a GPU is what it keeps of floats that it quantises."""
    kept = {
        name: quantized(each, kind) if name.partition(".")[2] in LAYER_FIELDS else each
        for name, each in all_tensors(Path(model.source), share).items()
    }
    counted = weights_nbytes(model.config, DeviceFormat(4, quantization=kind), share)
    assert nbytes_of(kept) == counted


def _gguf(kind: Type) -> Callable[[Path], ModelDescription]:
    return lambda place: describe_model(write_gguf(place / "a.gguf", small_model(), kind=kind))


def _safetensors(kind: str) -> Callable[[Path], ModelDescription]:
    return lambda place: describe_model(write_quantized(place, "llama", kind, **SIZES).directory)


@pytest.mark.parametrize(
    ("write", "num_ranks"),
    [
        (_gguf(Type.Q4_0), 2),
        (_gguf(Type.Q4_1), 4),
        (_gguf(Type.Q8_0), 2),
        (_safetensors("awq"), 4),
        (_safetensors("packed"), 2),
        (_safetensors("packed 8 bits"), 4),
        (_safetensors("gptq in order of activations"), 2),
    ],
)
def test_ranks_on_cpus_keep_the_bits_of_a_checkpoint(
    write: Callable[[Path], ModelDescription], num_ranks: int, tmp_path: Path
) -> None:
    model = write(tmp_path)

    def load(communicator: Communicator | None) -> Decoder:
        nbytes: list[tuple[int, int]] = []
        decoder = load_model(
            model,
            torch.float32,
            CPU,
            lambda *so_far: nbytes.append(so_far),
            quantization="packed",
            communicator=communicator,
        )
        assert nbytes[-1][0] == nbytes[-1][1]
        down = decoder._layers[0].mlp.down  # type: ignore[union-attr]
        is_kept = isinstance(down, NarrowLinear)
        assert is_kept == (model.config.quantized is None or not model.config.quantized.has_order)
        return decoder

    check_ranks_compute_the_same(load, num_ranks, tmp_path)


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
        assert decoder.step_sentence.endswith("4 or 8 bits are compiled") == is_compiled
        down = decoder._layers[1].mlp.down  # type: ignore[union-attr]
        assert (down._library is not None) == is_compiled
        x = torch.randn(3, down.num_in, generator=torch.Generator().manual_seed(2)).bfloat16()
        wanted = x.float() @ down.widened().float().T
        torch.testing.assert_close(down(x).float(), wanted, atol=0.02, rtol=0.02)

    on_ranks(2, rank, tmp_path)


def test_int4_is_refused_where_ranks_would_cut_its_groups(tmp_path: Path) -> None:
    """Their scales would be others than those of one process, whose KV is shared."""
    model = describe_model(write_checkpoint(tmp_path, "llama", **eight_heads("llama")).directory)
    engine = EngineConfig(device="cpu", quantization="int4", tensor_parallel_size=2)
    with pytest.raises(
        StartupError, match=r"size = 2: 32 neighbouring .* would have 40 columns"
    ) as it:
        check_engine(engine, model)
    assert it.value.param == "quantization"


def test_ranks_on_gpus_agree_on_the_largest_by_a_group_beside_nccl(tmp_path: Path) -> None:
    def rank(communicator: Communicator) -> Tensor:
        assert isinstance(communicator, TorchCommunicator)
        communicator._is_cpu = False  # as of GPUs, whose group would wait for a rank that is gone
        own = communicator.share.rank
        return communicator.largest_(torch.tensor([1.0 + own, 3.0 - own]))

    for found in on_ranks(2, rank, tmp_path):
        assert found.tolist() == [2.0, 3.0]
