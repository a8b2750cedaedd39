"""Weights of few bits: what is counted is kept, what is refused, whose KV it is, and what people
are told."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from disagg.capacity.gpus import CPU_CORE, GPUS
from disagg.capacity.roofline import Placement, placements
from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import step_times
from disagg.cli.main import main
from disagg.config import ASSETS, EngineConfig, TierConfig
from disagg.engine.device import check
from disagg.engine.device.check import check_engine, choose
from disagg.engine.device.choices import check_quantization
from disagg.errors import StartupError
from disagg.kernels.cpu.narrow_linear import NarrowLinear, int4_linear
from disagg.kernels.gpu.experts import TritonExperts
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.packed_linear import PackedProduct
from disagg.kernels.packed_sizes import OnlineKind
from disagg.models.checkpoint import read_header
from disagg.models.decoder import Decoder, load_model
from disagg.models.description import ModelDescription, describe_model
from disagg.models.packing import DeviceFormat, weights_nbytes
from disagg.models.share import WHOLE, Share
from disagg.models.weights import DecoderWeights, load_weights
from disagg.worker.check import check_tier, loading_sentence
from tests.grids import some
from tests.models.checkpoints import write_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.paging import Tokens, logits_of, new_slab, run_step
from tests.models.quantized_files import GPT_OSS, write_quantized
from tests.models.test_gguf import small_model
from tests.models.test_ranks import eight_heads

CPU = torch.device("cpu")
CPU_KINDS = ("int8", "int4")
INT8 = EngineConfig(quantization="int8", device="cpu", dtype="float32")
PACKED = EngineConfig(quantization="packed", device="cpu", dtype="bfloat16")
ENGINE = EngineConfig(device="cpu", dtype="float32", kv_cache_memory_bytes=1 << 20)
DEMO = ASSETS / "demo-small"
SMALL_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
Write = Callable[[Path], ModelDescription]


def _gguf(kind: Type, **changes: Any) -> Write:
    def write(place: Path) -> ModelDescription:
        return describe_model(write_gguf(place / "m.gguf", small_model(**changes), kind=kind))

    return write


def _floats(variant: str, **changes: Any) -> Write:
    return lambda place: describe_model(write_checkpoint(place, variant, **changes).directory)


def _stored(variant: str, kind: str, **changes: Any) -> Write:
    return lambda place: describe_model(write_quantized(place, variant, kind, **changes).directory)


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


ON_CPUS = [_floats(each) for each in ("llama-tied-biased-llama3", "qwen3-mixed-windows", "phi3")]
ON_GPUS = [_floats(each) for each in ("llama", "qwen2-moe", "mixtral")]


@pytest.mark.parametrize(
    ("device", "write", "quantization"),
    [
        *product(["cpu"], ON_CPUS, CPU_KINDS),
        *product(["gpu"], ON_GPUS, get_args(OnlineKind)),
    ],
)
def test_what_is_counted_is_what_is_kept(
    device: Literal["cpu", "gpu"], write: Write, quantization: OnlineKind, tmp_path: Path
) -> None:
    """On a GPU experts are quantised too; routers and tables are not."""
    model = write(tmp_path)
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


@pytest.mark.parametrize(
    ("write", "narrow", "most"),
    [(lambda _: describe_model(DEMO), INT8, 0.4), (_gguf(Type.Q4_1), PACKED, 0.33)],
    ids=["int8", "packed"],
)
def test_the_start_counts_what_is_kept_and_keeps_its_kv_apart(
    write: Write, narrow: EngineConfig, most: float, tmp_path: Path
) -> None:
    model, plain = write(tmp_path), msgspec.structs.replace(narrow, quantization=None)
    few, many = (check_engine(each, model) for each in (narrow, plain))
    assert few is not None and many is not None
    assert few.weights_nbytes < most * many.weights_nbytes
    assert few.shape.layout != many.shape.layout
    assert few.shape.block_nbytes == many.shape.block_nbytes
    if narrow is PACKED:
        assert few.weights_nbytes == pytest.approx(model.stored_nbytes, rel=0.02)
        assert loading_sentence(PACKED, model, few.weights_nbytes) == ""
        said = loading_sentence(PACKED, model, many.weights_nbytes)
        assert "stay packed, but their scales and unquantised weights become bfloat16; the" in said
        said = loading_sentence(plain, model, many.weights_nbytes)
        assert "are converted to bfloat16 when they are loaded; they take " in said


def test_gpus_quantise_in_their_own_way_and_keep_their_kv_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = describe_model(DEMO)
    same = msgspec.structs.replace(INT8, block_size=16)
    plain = msgspec.structs.replace(same, quantization=None)
    layouts = {}
    for device in ("cpu", "cuda"):
        monkeypatch.setattr(check, "choose_device", lambda config, device=device: device)
        layouts[device] = [check.choose(each, model, WHOLE).shape.layout for each in (same, plain)]
    assert layouts["cpu"][0] != layouts["cuda"][0]
    assert layouts["cpu"][1] == layouts["cuda"][1]


@pytest.mark.parametrize(
    ("write", "quantization", "device", "words"),
    [
        (_floats("mixtral"), "int8", "cpu", "MixtralForCausalLM has experts, which can be quan"),
        (_floats("mixtral"), "int8", "cuda", ""),
        (_stored("gpt-oss", "mxfp4", **GPT_OSS), "int8", "cuda",
         r"experts already have 4 bits \(MXFP4\), and a GPU"),
        (_floats("llama"), "int8", "cpu", ""),
        (_floats("llama"), "int8", "cuda", ""),
        (_floats("llama"), None, "cuda", ""),
        (_floats("llama"), "fp8", "cuda", ""),
        (_floats("llama"), "fp8", "cpu", "fp8 weights; set 'int8' or 'int4', or leave it out"),
        (_floats("llama"), "packed", "cpu", "is not quantised, so nothing is packed"),
        (_stored("llama", "awq"), "int8", "cpu", ""),
        (_stored("llama", "awq"), "int8", "cuda",
         r"already quantised \(AWQ\), and a GPU keeps it so; set device"),
        (_gguf(Type.Q8_0), "packed", "cuda", "a GPU always keeps quantised checkpoints packed"),
    ],
)  # fmt: skip
def test_what_cannot_be_quantised_is_refused_in_words(
    write: Write,
    quantization: Any,
    device: Any,
    words: str,
    tmp_path: Path,
) -> None:
    model, config = write(tmp_path), EngineConfig(quantization=quantization, device=device)
    with pytest.raises(StartupError, match=words) if words else nullcontext() as it:
        if device == "cpu":  # as a start does it
            check_engine(config, model)
        else:
            check_quantization(config, model.config, device)
    assert it is None or it.value.param == "quantization"


def test_int4_is_refused_where_ranks_would_cut_its_groups(tmp_path: Path) -> None:
    """Their scales would be others than those of one process, whose KV is shared."""
    engine = EngineConfig(device="cpu", quantization="int4", tensor_parallel_size=2)
    words = r"size = 2: 32 neighbouring .* would have 40 columns"
    with pytest.raises(StartupError, match=words) as it:
        check_engine(engine, _floats("llama", **eight_heads("llama"))(tmp_path))
    assert it.value.param == "quantization"


def test_the_memory_is_that_of_the_widened_weights(tmp_path: Path) -> None:
    directory = write_quantized(tmp_path, "llama", "awq").directory
    narrow, floats = describe_model(directory), describe_model(tmp_path / "floats")
    assert narrow.num_parameters == floats.num_parameters
    plan, plain = check_engine(ENGINE, narrow), check_engine(ENGINE, floats)
    assert plan is not None and plain is not None
    assert (
        plan.weights_nbytes
        == plain.weights_nbytes
        == weights_nbytes(floats.config, DeviceFormat(4))
    )
    assert plan.shape.layout != plain.shape.layout  # nor is its KV that of other weights


def test_the_start_and_the_plan_say_that_weights_are_widened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = write_quantized(tmp_path, "llama", "awq").directory
    said: list[str] = []
    for place in (tmp_path / "floats", directory):
        check_tier(TierConfig(model=str(place), engine=ENGINE), tell=said.append)
    (sentence,) = said
    header = read_header(directory / "model.safetensors")
    stored = sum(each.nbytes for each in header.tensors.values())
    wide = weights_nbytes(describe_model(directory).config, DeviceFormat(4))
    assert sentence == (
        "The weights of quantised are converted to float32 when they are loaded; they take"
        f" {wide / 1e6:.1f} MB instead of {stored / 1e6:.1f} MB."
    )
    plan = ["plan", str(directory), "--input-tokens", "64", "--output-tokens", "64"]
    assert main(plan) == 0
    found = capsys.readouterr().out
    assert "quantised (AWQ). GPUs keep them so" in found and "GB in AWQ;" in found
    assert main([*plan, "--weights", "fp8"]) == 0
    found = capsys.readouterr().out
    assert "quantised (AWQ). The plan uses their size in fp8" in found and "GB in fp8;" in found


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
    on_cpu, on_gpu = (placements(Placement(packed, gpu))[0] for gpu in (CPU_CORE, GPUS["h100"]))
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
    of_one, of_two = placements(Placement(shape_of(model), GPUS["h100"]))[:2]
    assert of_two.weights_nbytes == pytest.approx(sum(kept), rel=0.1)
    assert of_one.weights_nbytes < 0.8 * of_two.weights_nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_nearly_those_of_the_weights_as_they_were(dtype: torch.dtype) -> None:
    """Of a trained model, whose weights are not alike; prompts and single tokens."""
    model = describe_model(DEMO)
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


@pytest.mark.parametrize("variant", some(["phi3"], ["llama-tied-biased-llama3", "qwen3"]))
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
