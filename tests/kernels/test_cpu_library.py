"""Which kernels a CPU gets, and what is said where it gets torch's."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.random_models import random_weights
from disagg.kernels import dispatch
from disagg.kernels.cpu import library as cpu_library
from disagg.kernels.cpu import step as cpu_step
from disagg.kernels.cpu.library import (
    AMX_STEP,
    AVX2_STEP,
    CPU_KERNELS,
    PLAIN_STEP,
    SAMPLING,
    STEP,
    Found,
    Library,
    find_library,
    find_step,
    load,
)
from disagg.kernels.dispatch import Quantization
from disagg.kernels.torch.sampling import TorchSampling
from disagg.models.decoder import CpuDecoder, build_decoder
from tests.models.paging import SMALL, Tokens, make_batch, new_slab

ALL = frozenset(STEP.needed)


def test_a_cpu_without_the_instructions_gets_torch(tmp_path: Path) -> None:
    found = load(STEP, tmp_path / "any.so", ALL - {"avx512_bf16"})
    assert found.loaded is None and not found.may_be_built
    assert found.sentence == "torch, because this CPU has no avx512_bf16"


@pytest.mark.parametrize("library", [STEP, SAMPLING], ids=["step", "sampling"])
def test_an_installation_without_compiler_gets_torch(library: Library, tmp_path: Path) -> None:
    found = load(library, tmp_path / "missing.so", ALL)
    assert found.loaded is None and found.may_be_built
    assert "no C++ compiler" in found.sentence


def test_no_instruction_is_compiled_for_that_is_not_asked_for() -> None:
    """A CPU without one would end the process."""
    source = Path(__file__).parents[2] / "setup.py"
    names = {"avx512bf16": "avx512_bf16", "amx-tile": "amx_tile", "amx-bf16": "amx_bf16"}
    flags = {names.get(flag, flag) for flag in re.findall(r'"-m([\w-]+)"', source.read_text())}
    of_amx = {"amx_tile", "amx_bf16"}
    assert of_amx | {"avx512_bf16"} <= flags
    assert flags - of_amx <= ALL
    assert flags <= set(AMX_STEP.needed)
    of_avx2 = re.search(r"^AVX2 = (.*)", source.read_text(), re.MULTILINE)
    assert of_avx2 is not None
    assert set(re.findall(r'"-m([\w-]+)"', of_avx2[1])) == set(AVX2_STEP.needed)


def test_the_best_instructions_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    best_first = [AMX_STEP, STEP, PLAIN_STEP, AVX2_STEP]
    can_be_used = set(best_first)
    monkeypatch.setattr(
        cpu_library,
        "find_library",
        lambda library: Found(
            ctypes.CDLL(None) if library in can_be_used else None, library.sentence
        ),
    )
    for library in best_first:
        assert find_step().sentence == library.sentence
        can_be_used.remove(library)
    assert find_step().loaded is None


def test_what_is_said_of_the_step_is_about_the_library_for_this_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`DISAGG_BUILD=this-cpu` builds no other; here another version of disagg built it."""
    no_amx, missing = Found(None, "no AMX"), Found(None, "missing", may_be_built=True)
    other = Found(None, "another version", may_be_built=True)
    founds = {AMX_STEP: no_amx, STEP: other, PLAIN_STEP: missing, AVX2_STEP: missing}
    monkeypatch.setattr(cpu_library, "find_library", founds.__getitem__)
    assert find_step() is other


def test_a_damaged_file_gets_torch(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.so"
    damaged.write_bytes(b"\x7fELF")
    found = load(STEP, damaged, ALL)
    assert found.loaded is None
    assert "cannot be loaded" in found.sentence


@pytest.mark.parametrize("library", [STEP, SAMPLING], ids=["step", "sampling"])
def test_the_environment_may_ask_for_torch(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_KERNELS, "torch")
    find_library.cache_clear()
    try:
        assert find_library(library).sentence == f"torch, because {CPU_KERNELS}=torch is set"
        monkeypatch.setenv(CPU_KERNELS, "fast")
        find_library.cache_clear()
        with pytest.raises(ValueError, match="set it to auto or torch"):
            find_library(library)
    finally:
        find_library.cache_clear()


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_without_compiled_kernels_a_step_is_torchs(
    quantization: Quantization | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU without their instructions, a model that they would compute."""
    found = load(STEP, STEP.file, ALL - {"avx512f"})
    monkeypatch.setattr(cpu_step, "find_step", lambda: found)
    cpu = torch.device("cpu")
    weights = random_weights(SMALL, torch.bfloat16, cpu, seed=2)
    decoder = build_decoder(SMALL, weights, quantization=quantization)
    assert not isinstance(decoder, CpuDecoder)
    assert decoder.step_sentence == "torch, because this CPU has no avx512f"
    slab = new_slab(SMALL, 1, 16, torch.bfloat16)
    assert decoder.forward(make_batch([(Tokens([1], [0]), 1)], 16), slab).isfinite().all()


def test_without_compiled_loops_tokens_are_chosen_by_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load(SAMPLING, tmp_path / "missing.so", frozenset())
    monkeypatch.setattr(dispatch, "find_library", lambda library: found)
    assert isinstance(dispatch.sampling_ops_for(torch.device("cpu")), TorchSampling)


@pytest.mark.parametrize(
    "module", ["disagg.kernels.cpu.library", "disagg.cli.serve", "disagg.cli.server_process"]
)
def test_a_start_needs_no_torch(module: str) -> None:
    """What cannot be served is refused before the seconds that torch takes to load."""
    program = f"import sys, {module}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
