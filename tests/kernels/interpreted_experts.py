"""Experts and sinks in Triton equal their references; run by `test_interpreted.py`."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from bench.random_models import random_weights
from disagg.kernels import reference
from disagg.kernels.gpu import experts as triton_experts
from disagg.kernels.gpu.experts import TritonExperts
from disagg.kernels.gpu.held_rows import sum_held
from disagg.kernels.gpu.ops import TritonOps
from disagg.kernels.gpu.paged_attention import paged_attention
from disagg.kernels.gpu.route import choose_experts
from disagg.kernels.grouping import Grouping
from disagg.kernels.kv_pages import FORMATS
from disagg.kernels.ops import Experts
from disagg.kernels.packed_matrix import PackedMatrix
from disagg.kernels.packed_sizes import Kind
from disagg.kernels.torch.experts import TorchExperts
from disagg.models.decoder import Decoder
from disagg.models.experts_config import ExpertsConfig
from tests.kernels.packed_cases import random_packed
from tests.kernels.paged_inputs import LAYER, paged_inputs
from tests.models.paging import SMALL, Tokens, new_slab, run_step

CPU = torch.device("cpu")
SINGLE = 2e-5


def _experts(
    num_experts: int, num_chosen: int, hidden: int, inner: int, kind: str, dtype: torch.dtype
) -> Experts:
    """Of a kind: "plain", or with biases and the clamped SwiGLU, or these as MXFP4 too."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape).div(shape[-1] ** 0.5).to(dtype)

    gate_up, down = draw(num_experts, 2 * inner, hidden), draw(num_experts, hidden, inner)
    experts = Experts(gate_up, down, dtype, num_experts, num_chosen, is_normalized=kind != "plain")
    if kind == "plain":
        return experts
    biases = draw(num_experts, 2 * inner), draw(num_experts, hidden)
    experts = replace(experts, gate_up_bias=biases[0], down_bias=biases[1], limit=0.5, alpha=1.702)
    if kind == "clamped":
        return experts

    return replace(
        experts,
        gate_up=random_packed("mxfp4", num_experts * 2 * inner, hidden, 32),
        down=random_packed("mxfp4", num_experts * hidden, inner, 32),
    )


@pytest.mark.parametrize(
    ("kind", "num_tokens", "num_experts", "num_chosen", "hidden", "inner"),
    [
        ("plain", 1, 7, 3, 96, 64),
        ("plain", 150, 2, 1, 64, 32),
        ("clamped", 37, 5, 2, 160, 96),
        ("mxfp4", 37, 3, 2, 160, 96),
        ("mxfp4", 3, 10, 4, 64, 160),
    ],
)
def test_experts(
    kind: str, num_tokens: int, num_experts: int, num_chosen: int, hidden: int, inner: int
) -> None:
    torch.manual_seed(num_tokens)
    experts = _experts(num_experts, num_chosen, hidden, inner, kind, torch.float32)
    x, logits = torch.randn(num_tokens, hidden), torch.randn(num_tokens, num_experts)
    ours = TritonExperts(experts)(x, logits)
    theirs = reference.mix_experts(x, logits, experts)
    torch.testing.assert_close(ours, theirs, atol=SINGLE, rtol=SINGLE)


def _part(experts: Experts, own: range) -> Experts:
    """What a rank has that holds some of the experts."""

    def some(field: str) -> Any:
        stored, rows = getattr(experts, field), slice(own.start, own.stop)
        if isinstance(stored, PackedMatrix):
            each = stored.num_out // experts.num_experts
            part = stored.rows(own.start * each, own.stop * each)
            zeros = None if part.zeros is None else part.zeros.contiguous()
            return replace(part, scales=part.scales.contiguous(), zeros=zeros)
        return None if stored is None else stored[rows].contiguous()

    ends = ("", "_bias")
    fields = [f"{matrix}{end}" for matrix in ("gate_up", "down") for end in ends]
    return replace(experts, own=own, **{field: some(field) for field in fields})


@pytest.mark.parametrize("kind", ["plain", "mxfp4", "int4"])
@pytest.mark.parametrize("num_tokens", [1, 19])
def test_the_experts_of_several_ranks_add_up(kind: str, num_tokens: int) -> None:
    """Each sums what its own make of a token, whatever lies in memory where others' rows would be;
    one of them has none that is chosen."""
    torch.manual_seed(num_tokens)
    experts = _experts(8, 3, 96, 64, "plain" if kind == "int4" else kind, torch.float32)
    if kind == "int4":
        gate_up = random_packed("int4", 8 * 2 * 64, 96, 32, has_zeros=True)
        down = random_packed("int4", 8 * 96, 64, 32, has_zeros=True)
        experts = replace(experts, gate_up=gate_up, down=down)
    x, logits = torch.randn(num_tokens, 96), torch.randn(num_tokens, 8)
    logits[:, 6:] = -9.0
    grouping = Grouping(4, 2, True, 2.5) if kind == "plain" else None
    experts = replace(experts, grouping=grouping)
    sums = []
    for own in (range(0, 5), range(5, 6), range(6, 8)):
        part = _part(experts, own)
        ours = TritonExperts(part)(x, logits)
        theirs = reference.mix_experts(x, logits, part)
        torch.testing.assert_close(ours, theirs, atol=SINGLE, rtol=SINGLE)
        if kind == "plain":
            torch.testing.assert_close(TorchExperts(part)(x, logits), theirs, atol=SINGLE, rtol=0)
        sums.append(ours)
    assert not sums[2].any()
    whole = reference.mix_experts(x, logits, experts)
    torch.testing.assert_close(sum(sums), whole, atol=SINGLE, rtol=SINGLE)


def test_rows_of_experts_of_other_ranks_are_neither_made_nor_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[torch.Tensor] = []

    def spied(rows: torch.Tensor, chosen: torch.Tensor, held: range) -> torch.Tensor:
        made.append(rows)
        return sum_held(rows, chosen, held)

    def unset(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        fill = torch.nan if dtype.is_floating_point else 99
        return torch.full(shape, fill, dtype=dtype, device=device)

    monkeypatch.setattr(triton_experts, "sum_held", spied)
    part = _part(_experts(6, 2, 64, 32, "plain", torch.float32), range(2, 5))
    x, logits = torch.randn(9, 64), torch.randn(9, 6)
    _, chosen = reference.choose(logits, part)
    monkeypatch.setattr(torch, "empty", unset)
    out = TritonExperts(part)(x, logits)
    monkeypatch.undo()
    is_held = ((chosen >= 2) & (chosen < 5)).flatten()
    assert 0 < is_held.sum() < 18
    assert torch.equal(made[0].isnan().any(1), ~is_held)
    assert made[0][~is_held].isnan().all()
    assert out.isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "mxfp4"])
def test_experts_of_odd_sizes_in_half_precision(kind: str) -> None:
    experts = _experts(6, 4, 32 if kind == "mxfp4" else 50, 32, kind, torch.float16)
    hidden = experts.down.shape[1]
    x, logits = torch.randn(20, hidden).half(), torch.randn(20, 6).half()
    ours = TritonExperts(experts)(x, logits)
    theirs = reference.mix_experts(x, logits, experts)
    torch.testing.assert_close(ours, theirs, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        (("fp8", 128, False), ("fp8", 32, False)),
        (("int4", 32, True), ("int4", 32, True)),
        (("int8", None, True), ("int8", None, False)),
        (("int4", 64, False), None),
        (("nvfp4", 16, False), ("nvfp4", 16, False)),
        (None, ("fp8", None, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float32), (23, torch.float16)])
def test_packed_experts(
    gate_up: tuple[Kind, int | None, bool] | None,
    down: tuple[Kind, int | None, bool] | None,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    """Rows, columns and inner sizes that fill no tile; one of the two matrices as floats, too."""
    num_experts, num_chosen, hidden, inner = 5, 2, 144, 80
    torch.manual_seed(num_tokens)
    experts = _experts(num_experts, num_chosen, hidden, inner, "plain", dtype)
    for field, packed, shape in (
        ("gate_up", gate_up, (num_experts * 2 * inner, hidden)),
        ("down", down, (num_experts * hidden, inner)),
    ):
        if packed is not None:
            kind, group, has_zeros = packed
            # With zeros: also in an order, which all experts share.
            matrix = random_packed(
                kind, *shape, group, has_zeros=has_zeros, is_ordered=has_zeros, dtype=dtype
            )
            experts = replace(experts, **{field: matrix})  # type: ignore[arg-type]
    assert experts.inner == inner
    x, logits = torch.randn(num_tokens, hidden).to(dtype), torch.randn(num_tokens, num_experts)
    ours = TritonExperts(experts)(x, logits)
    theirs = reference.mix_experts(x, logits, experts)
    assert theirs.std() > 0.1
    tolerance = SINGLE if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        (("fp8", 128, 0.0), ("fp8", None, 0.05)),
        (("int8", None, 0.0), ("int8", None, 0.0)),
        (("int4", 32, None), ("fp8", 128, 0.0)),
    ],
)
def test_experts_in_8_bits(
    gate_up: tuple[Kind, int | None, float | None],
    down: tuple[Kind, int | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One or both of the two matrices, on a rank that has some of the experts. What memory of rows
    of other ranks has held is never read as a number."""

    def new(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device).fill_(
            math.nan if dtype.is_floating_point else 1
        )

    monkeypatch.setattr(torch, "empty", new)
    monkeypatch.setattr(triton_experts, "EIGHT_BIT_ROWS", 8)
    num_experts, num_chosen, hidden, inner = 5, 2, 144, 80
    torch.manual_seed(3)
    experts = _experts(num_experts, num_chosen, hidden, inner, "plain", torch.float32)
    matrices = {
        "gate_up": random_packed(
            gate_up[0], 5 * 2 * inner, hidden, gate_up[1], input_scale=gate_up[2]
        ),
        "down": random_packed(down[0], 5 * hidden, inner, down[1], input_scale=down[2]),
    }
    experts = _part(replace(experts, **matrices), range(1, 5))  # type: ignore[arg-type]
    x, logits = torch.randn(23, hidden), torch.randn(23, num_experts)
    ours = TritonExperts(experts)(x, logits)
    theirs = reference.mix_experts(x, logits, experts, in_8_bits=True)
    # Another order of sums between the two products can move a number to its neighbour.
    differs = ((ours - theirs).abs() > SINGLE * (1 + theirs.abs())).any(1)
    assert differs.sum() <= 1 and theirs.std() > 0.1
    few = TritonExperts(experts)(x[:16], logits[:16])
    theirs = reference.mix_experts(x[:16], logits[:16], experts)
    torch.testing.assert_close(few, theirs, atol=SINGLE, rtol=SINGLE)


def test_the_programs_of_all_steps_are_compiled_when_experts_are_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once for layers that are alike."""
    heights: list[int] = []

    def down(*_: object, ROWS: int, **others: object) -> None:
        heights.append(ROWS)

    # By any grid.
    monkeypatch.setattr(triton_experts, "_gate_up_kernel", defaultdict(lambda: Mock()))
    monkeypatch.setattr(triton_experts, "_down_kernel", defaultdict(lambda: down))

    def choose(logits: torch.Tensor, *of: Any) -> tuple[torch.Tensor, torch.Tensor]:
        weights, chosen = reference.choose_experts(logits, *of[:2])
        return weights, chosen.int()

    monkeypatch.setattr(triton_experts, "choose_experts", choose)  # not interpreted: minutes
    ops = TritonOps(6, 1, dtype=torch.float32)
    experts = _experts(7, 3, 32, 16, "plain", torch.float32)
    mixed = ops.pack_experts(experts)
    compiled, heights[:] = list(heights), []
    ops.pack_experts(experts)
    assert not heights
    ops.pack_experts(replace(experts, num_chosen=2))
    assert heights == compiled
    for num_tokens in range(1, 400, 9):
        mixed(torch.zeros(num_tokens, 32), torch.zeros(num_tokens, 7))
    assert set(heights) == set(compiled) == {16, 32, 64, 128}


def test_all_tokens_to_one_expert() -> None:
    experts = _experts(9, 1, 32, 32, "plain", torch.float32)
    x, logits = torch.randn(70, 32), torch.zeros(70, 9)
    logits[:, 8] = 5.0
    torch.testing.assert_close(
        TritonExperts(experts)(x, logits),
        reference.mix_experts(x, logits, experts),
        atol=SINGLE,
        rtol=SINGLE,
    )


@pytest.mark.parametrize("is_normalized", [False, True])
def test_routes(is_normalized: bool) -> None:
    logits = torch.randn(6, 37)
    logits[2] = 0.0  # all are equal: the first ones are chosen
    logits[3, 5] = logits[3, 30] = 9.0
    weights, chosen = choose_experts(logits, 5, is_normalized)
    wanted_weights, wanted = reference.choose_experts(logits, 5, is_normalized)
    assert torch.equal(chosen.long(), wanted)
    torch.testing.assert_close(weights, wanted_weights, atol=SINGLE, rtol=SINGLE)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of the interpreter
def test_a_token_of_nan_chooses_experts_that_exist() -> None:
    _, chosen = choose_experts(torch.full((1, 6), torch.nan), 3, True)
    assert ((chosen >= 0) & (chosen < 6)).all()


@pytest.mark.parametrize(
    ("num_programs", "window", "format"), [(64, None, None), (2, 50, None), (64, 50, "int8")]
)
def test_attention_with_sinks(num_programs: int, window: int | None, format: str | None) -> None:
    """In one piece, in many that are reduced, and of prompts; a sink as large as all keys."""
    lens = [(1, 1), (1, 400), (3, 70), (35, 99)]
    inputs = paged_inputs(lens, group=3, format=FORMATS[format] if format else None)
    sinks = torch.tensor([-2.0, 0.0, 6.0, 1.0, -30.0, 2.0])
    expected = inputs.expected(window, sinks)
    inputs.write()
    work = inputs.work(3, window, num_programs)
    out = paged_attention(inputs.qkv, inputs.kv_cache, LAYER, inputs, work, sinks)
    torch.testing.assert_close(out, expected, atol=SINGLE, rtol=SINGLE)


def test_a_decoder_with_experts_on_the_kernels_equals_one_on_torch() -> None:
    """gpt-oss, which has all of it but a shared expert."""
    experts = ExpertsConfig(
        num_experts=5,
        num_experts_per_tok=2,
        intermediate_size=32,
        has_bias=True,
        swiglu_limit=7.0,
    )
    config = replace(SMALL, family="GptOssForCausalLM", hidden_size=64, experts=experts, sinks=True)
    weights, packed = random_weights(config, torch.float32, CPU, seed=2), []
    for layer in weights.layers:
        gate_up, down = (random_packed("mxfp4", 5 * 64, size, 32) for size in (64, 32))
        packed.append(replace(layer, gate_up=gate_up, down=down))
    wide = [
        replace(
            layer,
            gate_up=layer.gate_up.widened(torch.float32),
            down=layer.down.widened(torch.float32),
        )
        for layer in packed
    ]
    results = []
    for decoder in (
        Decoder(config, replace(weights, layers=packed), TritonOps(6, 1)),
        Decoder(config, replace(weights, layers=wide)),
    ):
        slab = new_slab(config, 16, 8, torch.float32, fill=torch.nan)
        tokens = Tokens(list(range(24)), [9, 2, 3])
        run_step(decoder, slab, [(tokens, 22)], 8)
        run_step(decoder, slab, [(tokens, 1)], 8)
        results.append(torch.stack(tokens.logits))
    torch.testing.assert_close(results[0], results[1], atol=SINGLE, rtol=SINGLE)


@pytest.mark.filterwarnings("ignore:invalid value")  # numpy's, of -inf - -inf
@pytest.mark.parametrize("kind", ["plain", "clamped", "mxfp4", "grouped", "grouped, sigmoid"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_nan_of_a_token_stays_and_is_its_own(kind: str, is_normalized: bool) -> None:
    """In what the experts get, or in the router's score of one expert or of all."""
    torch.manual_seed(3)
    stored = kind if kind in ("clamped", "mxfp4") else "plain"
    experts = _experts(6, 2, 96, 64, stored, torch.float32)
    grouping = Grouping(3, 2, "sigmoid" in kind, 1.0) if "grouped" in kind else None
    experts = replace(experts, is_normalized=is_normalized, grouping=grouping)
    x, logits = torch.randn(8, 96), torch.randn(8, 6)
    sound = TritonExperts(experts)(x, logits)
    x[1], logits[3], logits[5, 4] = math.nan, math.nan, math.nan
    found = TritonExperts(experts)(x, logits)
    assert found.isnan().all(1).tolist() == [False, True, False, True, False, True, False, False]
    others = [0, 2, 4, 6, 7]
    torch.testing.assert_close(found[others], sound[others], atol=SINGLE, rtol=SINGLE)
