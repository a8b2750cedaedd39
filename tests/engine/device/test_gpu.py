"""What an engine claims of a GPU that others may use, and when it refuses to begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from disagg import devices
from disagg.capacity.shapes import shape_of
from disagg.capacity.worker_steps import step_sizes
from disagg.config import EngineConfig, TierConfig
from disagg.engine.device import check, choices, memory_plan
from disagg.engine.device import gpu as module
from disagg.engine.device.build import build_engine
from disagg.engine.device.check import check_engine
from disagg.engine.device.choices import choose_device
from disagg.engine.device.gpu import GpuMemory, check_gpu
from disagg.engine.device.memory_plan import MemoryPlan
from disagg.errors import NotEnoughMemory, StartupError
from disagg.kernels.gpu.compiler import start_compiler
from disagg.models.description import describe_model
from disagg.worker.check import check_tier
from tests.engine.device.test_workspace import LLAMA_3_8B
from tests.models.paging import SMALL_SPARSE
from tests.tiny_model import write_tiny_model

GB = 10**9
CUDA = torch.device("cuda")


class Gpu:
    """A card of 80 GB, of which this process has `own` and others `others`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = self.others = self.kept = 0  # kept: of its own, freed and kept by torch
        self.properties = SimpleNamespace(
            name="NVIDIA H100", major=9, minor=0, shared_memory_per_block_optin=227 * 1024
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: self.properties)
        monkeypatch.setattr(choices, "has_driver", lambda: True)
        monkeypatch.setattr("disagg.kernels.gpu.compiler.start_compiler", lambda: None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr("disagg.engine.device.gpu.new_stream", lambda device: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: self.own)
        monkeypatch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        monkeypatch.setattr(
            torch.cuda, "mem_get_info", lambda device: (80 * GB - self.own - self.others, 80 * GB)
        )

    def claimed(self, **settings: object) -> GpuMemory:
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        return GpuMemory(config, CUDA, sleep=self.sleep)

    def empty_cache(self) -> None:
        self.own, self.kept = self.own - self.kept, 0

    def sleep(self, seconds: float) -> None:
        self.others = max(0, self.others - int(seconds * GB))  # they give back a GB a second


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_neighbours_do_not_take_from_a_claim(gpu: Gpu) -> None:
    first = gpu.claimed(gpu_memory_utilization=0.45)
    gpu.own = 16 * GB  # its weights
    gpu.others = 36 * GB  # a worker beside it has all of its share
    assert first.left_nbytes() == 20 * GB
    gpu.others = 50 * GB  # more than they may: no more is taken than there is
    assert first.left_nbytes() == 14 * GB


def test_what_weights_took_while_they_were_packed_is_for_kv(gpu: Gpu) -> None:
    memory = gpu.claimed(gpu_memory_utilization=0.5)
    gpu.own, gpu.kept = 11 * GB, 3 * GB
    assert memory.left_nbytes() == 32 * GB


def test_a_second_engine_of_a_process_has_a_claim_of_its_own(gpu: Gpu) -> None:
    gpu.own = 36 * GB
    second = gpu.claimed(gpu_memory_utilization=0.45)
    assert second.left_nbytes() == 36 * GB
    gpu.own += 16 * GB
    assert second.left_nbytes() == 20 * GB


def test_memory_of_a_process_that_ends_is_waited_for(gpu: Gpu) -> None:
    gpu.others = 30 * GB
    assert gpu.claimed().claim_nbytes == 72 * GB
    assert gpu.others <= 8 * GB


def test_a_gpu_that_others_fill_is_refused_with_the_numbers(gpu: Gpu) -> None:
    gpu.others = 77 * GB
    with pytest.raises(NotEnoughMemory) as refused:
        gpu.claimed()
    said = refused.value.message
    # Half a minute is waited, in which 30 of the 77 came back here.
    for words in ("NVIDIA H100 has 33.0 of 80.0 GB free", "claims 72.0", "another process"):
        assert words in said


def test_who_sets_the_size_of_the_cache_claims_what_is_free(gpu: Gpu) -> None:
    gpu.others = 60 * GB
    assert gpu.claimed(kv_cache_memory_bytes=GB).claim_nbytes == 20 * GB
    assert gpu.claimed(num_gpu_blocks_override=9).claim_nbytes == 20 * GB


def test_no_weight_is_read_before_it_is_known_to_fit(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = write_tiny_model(tmp_path)
    loaded: list[object] = []

    def load(*arguments: object) -> None:
        loaded.append(arguments)

    def refused(**settings: object) -> str:
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        with pytest.raises(NotEnoughMemory) as caught:
            build_engine(config, describe_model(directory), load=load)  # type: ignore[arg-type]
        return caught.value.message

    assert "gpu_memory_utilization = 0.001" in refused(gpu_memory_utilization=0.001)
    monkeypatch.setattr(module, "FREE_WAIT_S", 0.0)
    gpu.others = 70 * GB
    assert "10.0 of 80.0 GB free" in refused()
    assert not loaded


@pytest.mark.parametrize(
    ("name", "capability", "shared_kb", "head_dim", "dtype", "words"),
    [
        ("Tesla T4", (7, 5), 64, 128, torch.float16, "sm_75, and the kernels need sm_80"),
        ("NVIDIA A100", (8, 0), 163, 128, torch.bfloat16, ""),
        ("NVIDIA A100", (8, 0), 163, 256, torch.bfloat16, ""),
        ("NVIDIA A100", (8, 0), 163, 128, torch.float32, ""),
        ("NVIDIA A100", (8, 0), 163, 256, torch.float32, "Set dtype = 'bfloat16'"),
        ("NVIDIA L40S", (8, 9), 99, 128, torch.bfloat16, ""),
        ("NVIDIA L40S", (8, 9), 99, 256, torch.bfloat16, "99 KB that NVIDIA L40S has"),
        ("NVIDIA L40S", (8, 9), 99, 64, torch.float32, "Set dtype = 'bfloat16'"),
        ("NVIDIA RTX PRO 6000", (12, 0), 99, 96, torch.float16, ""),
        ("NVIDIA RTX PRO 6000", (12, 0), 99, 576, torch.bfloat16, ""),  # latents
        ("NVIDIA RTX PRO 6000", (12, 0), 99, 704, torch.bfloat16, ""),  # with keys of an index
        ("NVIDIA H200", (9, 0), 227, 576, torch.float32, "Set dtype = 'bfloat16'"),
    ],
)
def test_a_gpu_that_cannot_run_the_kernels_is_refused_first(
    name: str,
    capability: tuple[int, int],
    shared_kb: int,
    head_dim: int,
    dtype: torch.dtype,
    words: str,
    gpu: Gpu,
) -> None:
    major, minor = capability
    gpu.properties = SimpleNamespace(
        name=name, major=major, minor=minor, shared_memory_per_block_optin=shared_kb * 1024
    )
    latent = None
    if head_dim in (576, 704):
        sparse = SMALL_SPARSE.latent
        assert sparse is not None and sparse.index is not None
        index = None if head_dim == 576 else replace(sparse.index, head_dim=128)
        latent = replace(sparse, rank=512, rope_dim=64, index=index)
    model = replace(LLAMA_3_8B, head_dim=head_dim, latent=latent)
    if not words:
        check_gpu(CUDA, model, dtype)
        return
    with pytest.raises(StartupError) as refused:
        check_gpu(CUDA, model, dtype)
    assert name in refused.value.message and words in refused.value.message


def test_an_amd_gpu_is_not_measured_by_what_nvidia_s_have(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    gpu.properties = SimpleNamespace(name="AMD Instinct MI300X", major=9, minor=4)
    check_gpu(CUDA, LLAMA_3_8B, torch.bfloat16)


def test_an_engine_is_not_begun_on_a_gpu_that_cannot_run_the_kernels(
    gpu: Gpu, tmp_path: Path
) -> None:
    gpu.properties.major = 7

    def load(*arguments: object) -> Any:
        raise AssertionError("weights are read")

    with pytest.raises(StartupError, match="sm_70"):
        build_engine(EngineConfig(), describe_model(write_tiny_model(tmp_path)), load=load)


def test_triton_without_a_compiler_is_refused_before_a_weight_is_read(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> int:
        raise RuntimeError("Failed to find C compiler")

    def load(*arguments: object) -> Any:
        raise AssertionError("weights are read")

    active = SimpleNamespace(get_current_device=begin)
    monkeypatch.setattr("disagg.kernels.gpu.compiler.start_compiler", start_compiler)
    monkeypatch.setattr("triton.runtime.driver", SimpleNamespace(active=active))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(StartupError) as refused:
        build_engine(EngineConfig(), describe_model(write_tiny_model(tmp_path)), load=load)
    said = refused.value.message
    assert "Failed to find C compiler. It needs a C compiler (gcc or clang)" in said


def test_the_size_of_steps_follows_the_speed_of_the_gpu(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = describe_model(write_tiny_model(tmp_path))
    found = check_engine(EngineConfig(), model, gpu_nbytes=80 * GB, largest_step=(288, 4096))
    assert found is not None
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (288, 4096)

    planned: list[object] = []
    checked = memory_plan.plan_memory

    def plan_memory(*arguments: Any) -> MemoryPlan:
        planned.append(arguments[4])  # largest_step
        return checked(*arguments)

    monkeypatch.setattr(check, "plan_memory", plan_memory)
    tier = TierConfig(model=str(tmp_path))
    names = "NVIDIA L4", "NVIDIA of next year"
    for name in names:
        check_tier(tier, 80 * GB, gpu_name=name)
    sizes = [step_sizes(shape_of(model), name) for name in names]
    assert [*dict.fromkeys(planned)] == sizes and sizes[0] != sizes[1]


def test_a_gpu_that_cannot_be_used_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "has_driver", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(EngineConfig()) == "cpu"
    with pytest.raises(StartupError, match="finds no GPU"):
        choose_device(EngineConfig(device="cuda"))
    broken = devices.Gpus(problem="The driver 470.1 is too old.")
    monkeypatch.setattr(devices, "gpus_here", lambda: broken)
    monkeypatch.setattr(choices, "gpus_here", lambda: broken)
    for device in ("auto", "cuda"):
        with pytest.raises(StartupError, match=r"driver 470\.1"):
            choose_device(EngineConfig(device=device))
    assert choose_device(EngineConfig(device="cpu")) == "cpu"
