"""`--quantization int8` and `int4`: what is counted, what is refused, and whose KV it is."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import pytest
import torch

from bench.shapes import model_config
from disagg.config import ASSETS, EngineConfig
from disagg.engine.device import check
from disagg.engine.device.check import check_engine
from disagg.engine.device.choices import check_quantization
from disagg.errors import StartupError
from disagg.kernels.cpu.narrow_linear import NarrowLinear, int4_linear
from disagg.kernels.gpu.experts import TritonExperts
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.packed_linear import PackedProduct
from disagg.kernels.packed_sizes import OnlineKind
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import describe_model
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.quantized import QuantizedFormat
from disagg.models.share import WHOLE
from disagg.models.weights import DecoderWeights, load_weights
from tests.models.checkpoints import write_checkpoint
from tests.models.paging import Tokens, logits_of, new_slab, run_step

CPU = torch.device("cpu")
CPU_KINDS = ("int8", "int4")
INT8 = EngineConfig(quantization="int8", device="cpu", dtype="float32")


def _tensors(held: Any, seen: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """All that an object keeps, once each."""
    if isinstance(held, torch.Tensor):
        seen[held.data_ptr()] = held
    elif isinstance(held, list | tuple):
        for each in held:
            _tensors(each, seen)
    elif isinstance(held, NarrowLinear):
        _tensors(list(vars(held).values()), seen)
    elif isinstance(held, PackedProduct):
        _tensors([held.weight, held.bias], seen)
    elif isinstance(held, TritonExperts):
        _tensors(held._experts, seen)
    elif hasattr(held, "__dataclass_fields__"):
        _tensors([getattr(held, name) for name in held.__dataclass_fields__], seen)
    return seen


@pytest.mark.parametrize(
    ("device", "variant", "quantization"),
    [
        *product(["cpu"], ["llama-tied-biased-llama3", "qwen3-mixed-windows", "phi3"], CPU_KINDS),
        *product(["gpu"], ["llama", "qwen2-moe", "mixtral"], get_args(OnlineKind)),
    ],
)
def test_what_is_counted_is_what_is_kept(
    device: Literal["cpu", "gpu"], variant: str, quantization: OnlineKind, tmp_path: Path
) -> None:
    """On a GPU experts are quantised too; routers and tables are not."""
    write_checkpoint(tmp_path, variant)
    model = describe_model(tmp_path)
    config = model.config
    ops = TritonOps(config.num_heads, 1, quantization=quantization) if device == "gpu" else None
    decoder = load_model(model, torch.float32, CPU, quantization=quantization, ops=ops)
    kept: dict[int, torch.Tensor] = {}
    for each in (decoder._embedding, decoder._norm, decoder._lm_head, decoder._layers):
        _tensors(each, kept)
    nbytes = sum(each.nbytes for each in kept.values())
    if config.qk_norm and device == "cpu":  # norms of heads are kept for every head
        num_copies = config.num_heads + config.num_kv_heads - 2
        nbytes -= config.num_layers * num_copies * config.head_dim * 4
    assert nbytes == weights_nbytes(config, DeviceFormat(4, device, quantization=quantization))
    most = {"int8": 0.5, "int4": 0.35}[quantization] if device == "cpu" else 1.0
    assert nbytes < most * weights_nbytes(config, DeviceFormat(4))


@pytest.mark.parametrize("tied", [True, False])
def test_weights_of_4_bits_take_a_third_of_the_memory_of_bfloat16(tied: bool) -> None:
    config = replace(model_config("160m"), tie_word_embeddings=tied)
    plain, narrow = (
        weights_nbytes(config, DeviceFormat(2, "cpu", quantization=each)) for each in (None, "int4")
    )
    assert 0.31 < narrow / plain < 0.32


def test_the_start_counts_it_and_keeps_its_kv_apart() -> None:
    model = describe_model(ASSETS / "demo-small")
    plain = msgspec.structs.replace(INT8, quantization=None)
    narrow, wide = (check_engine(each, model) for each in (INT8, plain))
    assert narrow is not None and wide is not None
    assert narrow.weights_nbytes < 0.4 * wide.weights_nbytes
    assert narrow.shape.layout != wide.shape.layout
    assert narrow.shape.block_nbytes == wide.shape.block_nbytes


def test_gpus_quantise_in_their_own_way_and_keep_their_kv_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = describe_model(ASSETS / "demo-small")
    same = msgspec.structs.replace(INT8, block_size=16)
    plain = msgspec.structs.replace(same, quantization=None)
    layouts = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(check, "choose_device", lambda config, device=device: device)
        layouts[device] = [check.choose(each, model, WHOLE).shape.layout for each in (same, plain)]
    assert layouts["cpu"][0] != layouts["cuda"][0]
    assert layouts["cpu"][1] == layouts["cuda"][1]


def test_what_is_not_quantised_is_refused_in_words(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "mixtral")
    mixtral = describe_model(tmp_path)
    with pytest.raises(
        StartupError, match="MixtralForCausalLM has experts, which can be quan"
    ) as it:
        check_engine(INT8, mixtral)
    assert it.value.param == "quantization"
    check_quantization(INT8, mixtral.config, "cuda")
    assert mixtral.config.experts is not None
    narrow = replace(mixtral.config, experts=replace(mixtral.config.experts, is_mxfp4=True))
    with pytest.raises(StartupError, match=r"experts already have 4 bits \(MXFP4\), and a GPU"):
        check_quantization(INT8, narrow, "cuda")
    dense = describe_model(ASSETS / "demo-small").config
    check_quantization(INT8, dense, "cpu")
    check_quantization(INT8, dense, "cuda")
    check_quantization(EngineConfig(), dense, "cuda")
    fp8 = msgspec.structs.replace(INT8, quantization="fp8")
    check_quantization(fp8, dense, "cuda")
    with pytest.raises(StartupError, match="fp8 weights; set 'int8' or 'int4', or leave it out"):
        check_engine(fp8, describe_model(ASSETS / "demo-small"))
    packed = replace(dense, quantized=QuantizedFormat(name="AWQ", layout="awq", bits=4))
    check_quantization(INT8, packed, "cpu")
    with pytest.raises(
        StartupError, match=r"already quantised \(AWQ\), and a GPU keeps it so; set device"
    ):
        check_quantization(INT8, packed, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_nearly_those_of_the_weights_as_they_were(dtype: torch.dtype) -> None:
    """Of a trained model, whose weights are not alike; prompts and single tokens."""
    model = describe_model(ASSETS / "demo-small")
    found = []
    for quantization in (None, "int8"):
        decoder = load_model(model, dtype, CPU, quantization=quantization)
        slab = new_slab(model.config, 4, 16, dtype)
        tokens = Tokens(list(range(5, 55)), [0, 1, 2, 3])
        run_step(decoder, slab, [(tokens, 40)], 16)
        for _ in range(10):
            run_step(decoder, slab, [(tokens, 1)], 16)
        found.append(torch.stack(tokens.logits).softmax(-1))
    plain, quantised = found
    assert not torch.equal(plain, quantised)
    distances = (plain - quantised).abs().sum(-1) / 2
    assert distances.mean() < 0.05 and distances.max() < 0.2


@pytest.mark.parametrize("variant", ["llama-tied-biased-llama3", "qwen3-mixed-windows", "phi3"])
def test_logits_of_4_bits_are_those_of_the_widened_matrices(variant: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant)
    model = describe_model(tmp_path)
    weights = load_weights(model, torch.float32, CPU)

    def widened(matrix: Any) -> Any:
        if matrix is None or matrix.dim() != 2:
            return matrix
        return torch.cat(
            [int4_linear(matrix[row : row + 1], None).widened() for row in range(len(matrix))]
        )

    layers = [
        replace(each, **{field.name: widened(getattr(each, field.name)) for field in fields(each)})
        for each in weights.layers
    ]
    tables = widened(weights.embedding), widened(weights.lm_head)
    wide = DecoderWeights(tables[0], layers, weights.norm, tables[1], torch.float32)
    wanted = logits_of(Decoder(model.config, wide))
    assert wanted.abs().max() > 0.5
    found = logits_of(load_model(model, torch.float32, CPU, quantization="int4"))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
