"""The wheel holds all that serving needs: installed into an environment of its own, it serves.

The packages that it depends on come from this environment, so that nothing is downloaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import openai
import pytest

from tests.e2e.command import DONE, NUM_STREAMS, Command, Streams, ask
from tests.tool_calls import DIALOGUES

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

ROOT = Path(__file__).parent.parent.parent
MODEL = "demo-tools"
LONG = 1900  # tokens of a stream that is to be cut; the model takes 2048

# The sources have been compiled for the environment that runs the tests: its libraries are taken.
COMPILER = f"""#!/bin/sh
while [ "$1" != -o ]; do shift; done
case "$2" in
  *.so) exec cp {ROOT}/disagg/kernels/cpu/"$(basename "$2")" "$2" ;;
  *) exec touch "$2" ;;
esac
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory)]
    compiler = directory / "g++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o700)
    # From a copy of what git knows: a build must not need what only lies about here.
    tree = directory / "tree"
    files = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in filter(None, files.stdout.decode().split("\0")):
        if not name.startswith(("tests/", "bench/", "docs/")) and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(
        [*build, str(tree)],
        cwd=directory,
        env={**os.environ, "CC": str(compiler), "CXX": str(compiler)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = directory.glob("*.whl")
    return found


def test_only_the_package_is_in_it(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0].split("-")[0] for name in names}
    assert tops == {"disagg"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "disagg/py.typed" in names
    folders = (ROOT / "disagg" / name for name in ("assets", "ui"))
    assets = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    missing = {str(path.relative_to(ROOT)) for path in assets} - {*names}
    assert not missing, missing  # `disagg plan --write` reads rayservice.yaml there
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    can_compile = shutil.which("g++") is not None and platform.machine() == "x86_64"
    for step in ("avx2", "avx512", "avx512_bf16", "amx_bf16"):
        assert (f"disagg/kernels/cpu/_step_{step}.so" in names) == can_compile


def test_it_serves_from_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Calls functions, until it is told to stop, and streams without time end with an error."""
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", str(wheel)], check=True)
    (packages,) = (home / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    clean = {"PYTHONPATH": "", "PATH": f"{home}/bin:/usr/bin:/bin"}
    where = [str(python), "-c", "import disagg; print(disagg.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=clean, capture_output=True, text=True)
    assert found.stdout.startswith(str(home)), found

    flags = f"{MODEL} --prefill 0 --drain-s 0.2"
    command = Command(flags, tmp_path, clean, host="::1", python=python)
    try:
        command.wait_ready()
        assert ask(command.url, MODEL).json()["usage"]["completion_tokens"] > 0
        asyncio.run(_call_functions(command.url))
        streams = Streams(command.url, [LONG] * NUM_STREAMS, MODEL)
        command.process.send_signal(signal.SIGINT)
        # Of streams that began early, some may end within the 0.2 s. The last has only begun.
        cut = [end for end in streams.wait() if end != DONE]
        assert cut
        for end in cut:
            assert isinstance(end, str) and end.startswith("data: {"), end
            error = json.loads(end.removeprefix("data: "))["error"]
            assert "stopped before this answer was complete" in error["message"]
    finally:
        assert command.ended() == 0
    (line,) = command.events("drained")
    assert line["num_cut"] == len(cut)
    command.assert_only_own_lines()
    command.assert_nothing_left()


async def _call_functions(url: str) -> None:
    """By every API, over HTTP."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client:
        for dialogue in DIALOGUES:
            await dialogue(client, MODEL)
