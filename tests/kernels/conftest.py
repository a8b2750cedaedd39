"""Compiled kernels are tested where they can be built and run.

What a machine without them does instead is tested everywhere: `test_cpu_library.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.random_models import random_weights
from disagg.kernels.cpu import linear as linear_module
from disagg.kernels.cpu import narrow_linear as narrow_linear_module
from disagg.kernels.cpu import step as cpu_step_module
from disagg.kernels.cpu.library import Found
from disagg.kernels.dispatch import Quantization
from disagg.models.decoder import CpuDecoder, build_decoder
from disagg.models.model_config import ModelConfig
from disagg.models.weights import DecoderWeights
from tests.kernels.compiled import can_compile, can_run_step, compiled, steps_here
from tests.kernels.compiling import Assembler, assembled
from tests.kernels.step_cases import CPU, NewDecoder

collect_ignore = [
    name
    for name, can_run in (
        ("test_cpu_step.py", can_run_step()),
        ("test_cpu_step_packed.py", can_run_step()),
        ("test_large_step.py", can_run_step()),
        ("test_cpu_attention.py", can_run_step()),
        ("test_cpu_sampling.py", can_compile()),
    )
    if not can_run
]


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", params=steps_here(), ids=lambda library: library.file.stem)
def step(request: pytest.FixtureRequest) -> Found:
    """Each compiled step that is tested on this CPU."""
    return compiled(request.param)


@pytest.fixture
def new_decoder(step: Found, monkeypatch: pytest.MonkeyPatch) -> NewDecoder:
    """Makes decoders in bfloat16, which have the compiled step."""
    for module in (cpu_step_module, linear_module, narrow_linear_module):
        monkeypatch.setattr(module, "find_step", lambda: step)

    def new(
        config: ModelConfig,
        weights: DecoderWeights | None = None,
        quantization: Quantization | None = None,
    ) -> CpuDecoder:
        weights = weights or random_weights(config, torch.bfloat16, CPU, seed=2)
        decoder = build_decoder(config, weights, quantization=quantization)
        assert isinstance(decoder, CpuDecoder), decoder.step_sentence
        return decoder

    return new


@pytest.fixture
def assembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Assembler:
    """Kernels are compiled anew, and what the assembler says of them is printed."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_DUMP_PTXAS_LOG", "1")
    return lambda: assembled(capsys.readouterr().out)
