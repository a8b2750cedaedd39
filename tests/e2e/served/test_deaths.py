"""The death of a worker, or of a rank, costs time and nothing else: the text is one engine's.

Serve starts another worker each time, which is not waited for. In the end all that could clean up
is killed, and the next start does it.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from disagg.host import free_port
from tests.e2e.command import LEFT_TIMEOUT_S, Command, refusal_of, soon
from tests.e2e.served.operate import until_one_can_die
from tests.e2e.single_engine import SingleEngine
from tests.e2e.streams import num_moves, streamed, streams_of, while_held

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

NUM_KILLS = 5  # attempts to hit a stream


def second_rank(worker: psutil.Process) -> psutil.Process:
    (found,) = [each for each in worker.children() if "disagg.worker.rank" in each.cmdline()]
    return found


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_no_stream_notices_a_workers_death(
    server: Command, engines: Mapping[str, SingleEngine], role: str
) -> None:
    """Greedy and seeded streams go on elsewhere, from the token at which their worker died. The
    prefill worker dies with one of its ranks."""
    expected, before = streams_of(engines["tiny"]), num_moves(server.url, "tiny")
    for _ in range(NUM_KILLS):
        until_one_can_die(server, "tiny")
        worker = server.named(f"tiny-{role}")[0]
        victim = worker if role == "decode" else second_rank(worker)
        assert await streamed(server.url, "tiny", victim.kill) == expected
        worker.wait(LEFT_TIMEOUT_S)  # it does not outlive its rank
        # A prefill worker may have ended its last prompt just then, and a decode worker all of its
        # streams, if the client was slow to read them.
        if role == "prefill" or soon(lambda: num_moves(server.url, "tiny") > before):
            return
    pytest.fail(f"no stream was hit when a worker was killed, {NUM_KILLS} times")


async def test_no_stream_notices_that_a_decoding_rank_was_killed(
    server: Command, engines: Mapping[str, SingleEngine], home: Path
) -> None:
    """Its worker ends with it, and streams go on elsewhere."""
    expected, before = streams_of(engines["experts"]), num_moves(server.url, "experts")
    until_one_can_die(server, "experts")
    (worker,) = server.named("experts-decode")
    kill = while_held(home / "held", second_rank(worker).kill)
    assert await streamed(server.url, "experts", kill) == expected
    assert num_moves(server.url, "experts") > before
    worker.wait(LEFT_TIMEOUT_S)


@pytest.mark.last(1, of="directory")
def test_what_a_killed_run_leaves_ends_at_the_next_start(server: Command, tmp_path: Path) -> None:
    """The command and the process that serves are killed together: nobody is left to clean up."""
    serving = server.running("disagg.cli.server_process")
    server.process.send_signal(signal.SIGSTOP)
    serving.kill()
    server.process.kill()
    server.process.wait()
    port = free_port()
    said = refusal_of(Command(f"demo-small --ray-address 127.0.0.1:{port}", tmp_path))
    assert f"No Ray cluster answers at 127.0.0.1:{port}" in said
    server.assert_nothing_left()
