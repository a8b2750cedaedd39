"""Stands in for what a machine lacks, in every Python process that has this directory in its path,
as all have that tests start.

Python imports this module at its start, and it changes others as these are imported.

There is no pandas, as where `make serve` has installed everything. Ray Serve imports it in each of
its processes where it finds it, which takes a quarter of their starts. Nor are torch's results for
tensors without data, which nobody here asks for: with what they import, a third of torch. And
garbage is looked for less often, as imports leave none.

`DISAGG_TEST_GPUS`: `torch.cuda` answers as on a machine with GPUs of 80 GB, and the variable says
how many GB each has free ("80,80,3"), hidden by CUDA_VISIBLE_DEVICES as by the driver. `nvidia-smi`
beside this file answers the same. A worker that opens a GPU claims its memory by the product's own
code, leaves a file in `DISAGG_TEST_OPENED` that says which one, and then computes on the CPU.

`DISAGG_TEST_NO_AGENTS`: `ray start` gives its raylet the stand-ins for agents that `disagg serve`
gives to its own.

`DISAGG_TEST_UNLUCKY_SEED`: a request with this seed and a bias breaks the step of its engine.

`DISAGG_TEST_HAND_OVER`: prompts of so many tokens or more get the best route on which KV moves. On
a busy machine, or with ranks that share its cores, the router often finds another one faster.

`DISAGG_TEST_HELD`: while this file is there, a rank that is not its worker's first computes
`NUM_STEPS` steps and then none. So streams are certainly under way when it is killed.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TOTAL_NBYTES = 80 * 10**9
FREE_NBYTES = [int(gb) * 10**9 for gb in os.environ.get("DISAGG_TEST_GPUS", "").split(",") if gb]
NUM_STEPS = 40  # enough for first words, and not for an answer of 80 tokens


def visible() -> list[int]:
    ids = os.environ.get("CUDA_VISIBLE_DEVICES")
    if ids is None:
        return list(range(len(FREE_NBYTES)))
    return [int(each) for each in ids.split(",") if each.strip().isdigit()]


def change_cuda(cuda: Any) -> None:
    import torch.version

    torch.version.cuda = "13.0"
    cuda.is_available = lambda: bool(visible())
    cuda.device_count = lambda: len(visible())
    cuda.get_device_name = lambda device=None: "NVIDIA H100 80GB HBM3"
    cuda.memory_reserved = lambda device=None: 0
    cuda.mem_get_info = lambda device=None: (FREE_NBYTES[visible()[0]], TOTAL_NBYTES)


def change_choices(choices: Any) -> None:
    """Where the function is defined, so that all who ask it get this one."""
    choose_device = choices.choose_device

    def open_device(config: Any) -> Any:
        device_type = choose_device(config)
        is_worker = any("default_worker" in word for word in sys.orig_argv)  # of Ray
        if device_type != "cuda" or not is_worker:
            return device_type
        import torch
        from ray import serve

        from disagg.engine.device.gpu import GpuMemory

        claim_nbytes = GpuMemory(config, torch.device("cuda")).claim_nbytes
        pool = serve.get_replica_context().deployment
        opened = {"pool": pool, "gpu": visible()[0], "claim_nbytes": claim_nbytes}
        directory = Path(os.environ["DISAGG_TEST_OPENED"])
        (directory / f"{os.getpid()}.json").write_text(json.dumps(opened))
        return "cpu"

    choices.choose_device = open_device


def change_routes(dispatch: Any) -> None:
    choose_route = dispatch.choose_route
    least_tokens = int(os.environ["DISAGG_TEST_HAND_OVER"])

    def hand_over(request: Any, *arguments: Any) -> Any:
        route = choose_route(request, *arguments)
        remote = [each for each in route.candidates if each.prefill is not None]
        if not remote or len(request.token_ids) < least_tokens:
            return route
        return route.instead(remote[0], "KV is to move")

    dispatch.Dispatcher.__init__.__kwdefaults__["choose"] = hand_over


def change_edits(logit_edits: Any) -> None:
    apply_ = logit_edits.LogitEdits.apply_
    unlucky = int(os.environ["DISAGG_TEST_UNLUCKY_SEED"])

    def breaks(self: Any, logits: Any, sequences: Sequence[Any]) -> None:
        if any(each.sampling.seed == unlucky for each in sequences):
            raise IndexError("planted")
        apply_(self, logits, sequences)

    logit_edits.LogitEdits.apply_ = breaks


def change_services(services: Any) -> None:
    name = "_build_python_executable_command_memory_profileable"
    of_ray = getattr(services, name)
    stand_in = Path(__file__).parents[3] / "disagg/app/raylet_agent.py"

    def command_of(component: str, *arguments: Any, **options: Any) -> list[str]:
        if component.endswith("_agent"):
            return [sys.executable, "-I", "-S", str(stand_in), component]
        found: list[str] = of_ray(component, *arguments, **options)
        return found

    setattr(services, name, command_of)


def change_tasks(rank_messages: Any) -> None:
    decode_task = rank_messages.decode_task
    held = Path(os.environ["DISAGG_TEST_HELD"])
    num_steps = 0

    def decode_held(frame: bytes) -> Any:
        nonlocal num_steps
        task = decode_task(frame)
        if isinstance(task, rank_messages.RankStep):
            num_steps = num_steps + 1 if held.exists() else 0
        while num_steps > NUM_STEPS and held.exists():
            time.sleep(0.01)
        return task

    rank_messages.decode_task = decode_held


CHANGES: dict[str, Callable[[Any], None]] = {}
if FREE_NBYTES:
    CHANGES["torch.cuda"] = change_cuda
    CHANGES["disagg.engine.device.choices"] = change_choices
if "DISAGG_TEST_NO_AGENTS" in os.environ:
    CHANGES["ray._private.services"] = change_services
if "DISAGG_TEST_UNLUCKY_SEED" in os.environ:
    CHANGES["disagg.engine.device.logit_edits"] = change_edits
if "DISAGG_TEST_HAND_OVER" in os.environ:
    CHANGES["disagg.ingress.dispatch"] = change_routes
if "DISAGG_TEST_HELD" in os.environ:
    CHANGES["disagg.rank_messages"] = change_tasks


class ChangeOnImport(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            CHANGES[name](module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


gc.set_threshold(10_000, 50)
sys.modules["pandas"] = None  # type: ignore[assignment]  # an ImportError
sys.modules["torch._meta_registrations"] = ModuleType("without any")
if CHANGES:
    sys.meta_path.insert(0, ChangeOnImport())
