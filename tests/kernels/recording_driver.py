"""A driver for Triton that launches nothing and records what a GPU's would have been told.

It stands where Triton's own CUDA driver stands: kernels are compiled to machine code for sm_90,
"loaded", and launched through the objects that Triton makes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_DEVICES = count(1000)  # nobody else's, so that nothing remembered of one serves another


class RecordingDriver:
    """Records each launch: the code's handle, the grid, and the arguments, tensors as addresses."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, tuple[int, ...], tuple[object, ...]]] = []
        self.device = next(_DEVICES)
        self.stream = 7
        self.is_silent = False  # for who times launches
        self.utils = self
        self._handles = count()

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024}

    def load_binary(self, name: str, *rest: object) -> tuple[object, int, int, int, int]:
        return object(), next(self._handles), 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        kinds = list(source.signature.values())

        def launch(x: int, y: int, z: int, stream: int, handle: int, *rest: object) -> None:
            if self.is_silent:
                return
            arguments = rest[4:]  # after metadata of the kernel and the launch, and two hooks
            assert stream == self.stream
            assert len(arguments) == len(kinds)
            passed = tuple(
                argument.data_ptr() if isinstance(argument, Tensor) else argument
                for argument, kind in zip(arguments, kinds, strict=True)
                if kind != "constexpr"  # which the code has in it
            )
            self.launches.append((handle, (x, y, z), passed))

        return launch


@contextmanager
def recording() -> Iterator[RecordingDriver]:
    before, recorder = driver._active, RecordingDriver()
    driver.set_active(recorder)
    try:
        yield recorder
    finally:
        driver._active = before
