"""The GPUs of a machine, as the driver's program and torch tell of them."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from disagg import devices
from disagg.devices import Device, gpus_here, see_only

MIB = 1 << 20
TWO = """\
0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 80994, 535.104.05
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 1000, 535.104.05
"""


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Without a GPU, until a test puts one there."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name in (devices.VISIBLE, devices.ORDER):
        monkeypatch.setenv(name, "")  # or what a test sets would stay
        monkeypatch.delenv(name)
    monkeypatch.setattr(devices, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(devices, "AMD", tmp_path / "kfd")
    monkeypatch.setattr(devices, "DRIVER_FILE", "no-such-library.so")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return monkeypatch


def says(directory: Path, output: str) -> None:
    """The driver's program answers so."""
    program = directory / "nvidia-smi"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def torch_finds(machine: pytest.MonkeyPatch, num_devices: int) -> None:
    """With the driver's library, and no more of it."""
    machine.setattr(devices, "DRIVER_FILE", "libc.so.6")
    machine.setattr(torch.cuda, "is_available", lambda: num_devices > 0)
    machine.setattr(torch.cuda, "device_count", lambda: num_devices)


def test_a_machine_without_a_gpu(machine: pytest.MonkeyPatch) -> None:
    assert gpus_here() == devices.Gpus()
    assert devices.why_no_gpu() == "torch finds no GPU on this machine."


@pytest.mark.parametrize("trace", ["library", "module", "program", "AMD"])
def test_torch_is_asked_where_anything_of_a_driver_is(
    trace: str, machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if trace == "library":
        machine.setattr(devices, "DRIVER_FILE", "libc.so.6")
    elif trace == "program":
        says(tmp_path, "")
    else:
        (tmp_path / {"module": "version", "AMD": "kfd"}[trace]).write_text("")

    def is_asked() -> bool:
        raise InterruptedError

    machine.setattr(torch.cuda, "is_available", is_asked)
    with pytest.raises(InterruptedError):
        gpus_here()


def test_a_start_without_a_driver_does_not_load_torch() -> None:
    program = """
import sys
from pathlib import Path
from disagg import devices
devices.DRIVER = devices.AMD = Path("/nowhere")
devices.DRIVER_FILE = "no-such-library.so"
assert devices.gpus_here() == devices.Gpus()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, "PATH": ""})


def test_gpus_have_names_and_memory(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says(tmp_path, TWO)
    torch_finds(machine, 2)
    first, second = gpus_here().devices
    assert first == Device("0", "NVIDIA H100 80GB HBM3", 81559 * MIB, 80994 * MIB)
    assert (second.id, second.free_nbytes) == ("1", 1000 * MIB)


def test_gpus_are_counted_as_the_drivers_program_counts_them(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Else the free memory of one would be taken for that of another, on a machine of two kinds."""
    says(tmp_path, TWO)
    torch_finds(machine, 2)
    machine.setattr(torch.cuda, "is_available", lambda: os.environ[devices.ORDER] == "PCI_BUS_ID")
    assert len(gpus_here().devices) == 2
    machine.setenv(devices.ORDER, "FASTEST_FIRST")
    assert gpus_here().problem, "what the user has set stays"


def test_only_what_is_visible_counts(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    says(tmp_path, TWO)
    torch_finds(machine, 1)
    for visible, id in [("1", "1"), ("GPU-bbbb", "GPU-bbbb"), (" 1, -1, 0", "1")]:
        machine.setenv(devices.VISIBLE, visible)
        (found,) = gpus_here().devices
        assert (found.id, found.free_nbytes) == (id, 1000 * MIB)
    machine.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked although all is hidden"))
    for visible in ("", "-1", "NoDevFiles"):
        machine.setenv(devices.VISIBLE, visible)
        assert gpus_here() == devices.Gpus()


def test_parts_of_a_gpu_are_counted_although_a_process_sees_one(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    says(tmp_path, TWO)
    torch_finds(machine, 1)
    machine.setenv(devices.VISIBLE, "MIG-aaaa,MIG-bbbb")
    assert gpus_here().devices == (Device("MIG-aaaa"), Device("MIG-bbbb"))


def test_gpus_of_which_little_is_known(machine: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch_finds(machine, 2)
    assert gpus_here().devices == (Device("0"), Device("1"))
    says(tmp_path, "0, GPU-cccc, NVIDIA GB10, [N/A], [N/A], 580.95.05\n")
    assert gpus_here().devices == (Device("0", "NVIDIA GB10"), Device("1"))


def test_a_driver_that_is_too_old_is_said_with_versions(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def is_available() -> bool:
        warnings.warn(
            "CUDA initialization: The NVIDIA driver on your system is too old (found version"
            " 11040). Please update your GPU driver.",
            stacklevel=2,
        )
        return False

    says(tmp_path, TWO)
    machine.setattr(torch.cuda, "is_available", is_available)
    machine.setattr(torch.version, "cuda", "13.0")
    problem = gpus_here().problem
    for words in (torch.__version__, "CUDA 13.0", "driver 535.104.05", "found version 11040"):
        assert words in problem
    assert devices.why_no_gpu() == problem


def test_a_torch_without_cuda_beside_a_gpu_is_said(
    machine: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.setattr(torch.version, "cuda", None)
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  x"
    )
    problem = gpus_here().problem
    assert "470.82.01" in problem and "built without CUDA" in problem


def test_a_process_sees_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(devices.VISIBLE, "0,1,2")
    see_only([])
    assert os.environ[devices.VISIBLE] == "0,1,2"
    see_only([2])
    assert os.environ[devices.VISIBLE] == "2"


def test_what_triton_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gcc").touch(mode=0o755)
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    assert devices.what_triton_needs() == ""
    (tmp_path / "Python.h").unlink()
    monkeypatch.setenv("CC", "icc")
    both = r"a C compiler \(icc\) and Python's headers \(.* python3\.\d+-dev\)"
    assert re.fullmatch(both, devices.what_triton_needs())
