"""The parts of the serving bench that need no Ray: a worker that keeps time, and its clients."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from bench import trees
from bench.paced_worker import STEP_S, PacedRunner, paced_parts
from bench.serving_cluster import MODEL, config_for
from bench.serving_path import FIELDS, Clients, main
from bench.trees import checked_out
from disagg.engine.sched.sequence import Sequence
from disagg.engine.sched.step import StepPlan
from disagg.messages import GenerateRequest, SamplingParams
from disagg.time_model import StepFeatures
from tests.behind_uvicorn import served_port

REQUEST = GenerateRequest(
    request_id="r",
    model=MODEL,
    token_ids=(1, 2, 3),
    num_prompt_tokens=3,
    hash_root=b"",
    block_hashes=(),
    sampling=SamplingParams(max_tokens=4),
    deadline_unix_s=0.0,
)


def test_steps_come_on_a_beat_and_each_takes_its_time() -> None:
    now = 100.0
    slept: list[float] = []
    runner = PacedRunner(7, lambda: now, slept.append)
    plan = StepPlan([Sequence(REQUEST) for _ in range(2)], [2, 3], 0, StepFeatures())
    for elapsed in (0.0, STEP_S + 0.005, 10 * STEP_S, STEP_S):
        now += elapsed
        unfinished, sampled = runner.run(plan)
        assert unfinished is None
        assert sampled == 7
    assert slept == pytest.approx([STEP_S, STEP_S - 0.005, STEP_S, STEP_S])


async def test_clients_count_every_token_of_one_request_after_another() -> None:
    async with served_port(config_for(port=0), paced_parts) as port:
        clients = Clients(port, 5)
        clients.start(3, over_s=0.0)
        await clients.wait_first_tokens(10)
        async with asyncio.timeout(10):
            while clients.num_ended < 6:
                clients.check()
                await asyncio.sleep(0.01)
        await clients.stop()
        assert 5 * clients.num_ended <= clients.num_tokens <= 5 * (clients.num_ended + 3)
        assert all(0 < wait_s < 10 for wait_s in clients.first_token_s)


async def test_clients_tell_why_a_request_was_refused() -> None:
    async with served_port(config_for(port=0), paced_parts) as port:
        clients = Clients(port, 5, {**FIELDS, "model": "nobody"})
        clients.start(1, over_s=0.0)
        with pytest.raises(SystemExit, match="nobody"):
            await clients.wait_first_tokens(10)
        await clients.stop()


def test_an_older_commit_is_checked_out_with_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*words: str) -> None:
        name = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        subprocess.run(["git", "-C", str(tmp_path), *name, *words], check=True)

    git("init", "--quiet")
    git("commit", "--quiet", "--allow-empty", "--message", "without kernels")
    (tmp_path / "setup.py").write_text("import sys; open('built', 'w').write(str(sys.argv[1:]))")
    git("add", "setup.py")
    git("commit", "--quiet", "--message", "with kernels")
    monkeypatch.setattr(trees, "ROOT", tmp_path)
    with checked_out("HEAD") as files:
        assert "build_ext" in (files / "built").read_text()
    with checked_out("HEAD~") as files:
        assert not (files / "built").exists()
    assert not files.exists()


def test_a_rehearsal_measures_no_older_commit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--tiny", "--before", "HEAD"])
    assert "leave out --tiny or --before" in capsys.readouterr().err
