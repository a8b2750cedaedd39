"""`disagg doctor` as it is called, on this machine."""

from __future__ import annotations

import argparse
import ast
import re
import socket
from pathlib import Path

import msgspec
import pytest

import disagg
from disagg.cli.main import main
from disagg.cli.serve_arguments import add_arguments
from disagg.cli.serve_config import layers_of
from disagg.errors import StartupError
from disagg.host import free_port
from disagg.tools.doctor.report import DoctorReport, slowest
from disagg.tools.doctor.transfers import judge
from tests.tools.doctor.test_transfers import figures, node


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, DoctorReport]:
    status = main(["doctor", "--json", "--port", str(free_port()), *arguments])
    return status, msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)


def test_a_sound_machine_with_a_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = doctor(capsys, "demo-small", "--max-model-len", "512")
    assert status == 0, [each for each in report.findings() if each.status == "wrong"]
    found = {each.check: each.found for each in report.nodes[0].findings}
    for check in ("HAProxy", "store"):
        assert re.match(r"\d+\.\d+\.\d+, /", found[check])
    described, room = report.models
    assert "Qwen3ForCausalLM" in described.found
    assert re.search(
        r"^\d+ tokens per worker of .* requests of 512 tokens; steps of up to 64 seq", room.found
    )
    assert report.transfer_prior is not None


def test_transfers_are_shown_with_the_transports_of_ucx(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["doctor", "--port", str(free_port())]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"UCX of this machine \([ab]\): \d+\.\d+\.\d+: .*cma", shown)) == 2


def test_what_is_wrong_makes_the_status_1_and_comes_with_what_to_change(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = str(server.getsockname()[1])
        status = main(["doctor", "--no-transfers", "--port", taken])
    shown = capsys.readouterr().out
    assert status == 1
    assert f"port {taken}" in shown and "1 problem found; the first one to fix: choose" in shown


@pytest.mark.parametrize(("flag", "value"), [("--dtype", "bf17"), ("--max-model-len", "0")])
def test_invalid_settings_are_refused_as_by_serve(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    assert main(["doctor", "--no-transfers", "demo-small", flag, value]) == 2
    assert f"({flag})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "found", "change"),
    [
        (["no-such-model"], "no model directory", "the path or the name of the model"),
        (["demo-small", "--max-model-len", "1m"], "positions at most", "--max-model-len"),
    ],
)
def test_models_that_cannot_be_served(
    capsys: pytest.CaptureFixture[str], arguments: list[str], found: str, change: str
) -> None:
    status, report = doctor(capsys, "--no-transfers", *arguments)
    assert status == 1
    (finding,) = report.models
    assert found in finding.found and finding.change == change


def test_every_error_that_sends_somebody_here_is_answered_here() -> None:
    """NIXL that does not start is what the transfers show; nothing else sends anybody."""
    package = Path(disagg.__file__).parent
    raising = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and "`disagg doctor" in ast.unparse(node)
    }
    # `test_a_probe_that_cannot_start_says_why` is the first, `test_a_report_without...` the second.
    assert raising == {"kvtransfer/nixl_transport.py", "cli/serve_config.py"}


def serve_config(*flags: str) -> float | None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    prior = layers_of(parser.parse_args(list(flags))).config().transfer_prior
    return None if prior is None else prior.bytes_per_s


def test_a_report_seeds_the_time_model(tmp_path: Path) -> None:
    measured = judge(node("a", "x"), node("b", "y"), figures("tcp", 2.0), True)
    path = tmp_path / "doctor.json"
    path.write_bytes(msgspec.json.encode(DoctorReport((), transfer_prior=slowest((measured,)))))
    assert serve_config("--doctor-report", str(path)) == 2e9
    assert serve_config() is None


@pytest.mark.parametrize("content", ["", "{}", '{"nodes": []}'])
def test_a_report_without_transfers_seeds_nothing(tmp_path: Path, content: str) -> None:
    path = tmp_path / "doctor.json"
    path.write_text(content)
    with pytest.raises(StartupError, match="disagg doctor --json"):
        serve_config("--doctor-report", str(path))
