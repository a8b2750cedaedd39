"""What runs others' systems, without any of them: nothing is downloaded here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench.peers.__main__ import LeftOut, Turns, measure_case
from bench.peers.checkpoint import write
from bench.peers.children import NotRunning, last_words
from bench.peers.contenders import OURS, Contender, Engine
from bench.peers.environments import NotInstalled, python_of
from bench.peers.limits import MODEL
from bench.peers.pair import was_moved
from bench.peers.servers import Server, in_turns, started
from bench.peers.streams import complete
from bench.report import ENOUGH_S
from disagg.config import ServeConfig
from disagg.config_checks import parse_config
from tests.behind_uvicorn import served_port


def test_an_environment_is_made_once_and_a_failure_says_why(tmp_path: Path) -> None:
    requirements = tmp_path / "requirements"
    requirements.mkdir()
    pins = requirements / "peer.txt"
    pins.write_text("./not-there.whl\n")
    with pytest.raises(NotInstalled, match=r"not-there\.whl"):
        python_of("peer", tmp_path / "environments", requirements)
    pins.write_text("# nothing\n")
    python = python_of("peer", tmp_path / "environments", requirements)
    assert python.exists()
    made_s = python.parent.lstat().st_mtime_ns
    assert python_of("peer", tmp_path / "environments", requirements) == python
    assert python.parent.lstat().st_mtime_ns == made_s


def test_a_contender_that_ends_leaves_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(NotRunning, match="nonsense"):
        Contender(Engine("nonsense"), tmp_path, 1, tmp_path / "log")


class Answers(Contender):
    """Answers as often as it may, and then ends."""

    def __init__(self, times: int, seconds: float = 0.5) -> None:
        self.is_closed = False
        self._times = times
        self._seconds = seconds

    def generate(self, prompts: list[list[int]], num_new: int) -> tuple[float, list[list[int]]]:
        if not self._times:
            raise NotRunning("out of memory")
        self._times -= 1
        return self._seconds, [prompt[:num_new] for prompt in prompts]

    def close(self) -> None:
        self.is_closed = True


def test_a_case_begins_anew_without_a_contender_that_failed() -> None:
    ours, failing = Answers(10), Answers(1)
    contenders: dict[str, Contender] = {OURS: ours, "failing": failing}
    absent: dict[str, str] = {}
    turns = Turns("tiny", (3, 8, 2))
    assert measure_case(turns, contenders, absent, 2) == {OURS: 0.5}
    assert absent == {"failing": "out of memory"}
    assert contenders == {OURS: ours}
    assert failing.is_closed and not ours.is_closed
    assert turns.same_first(OURS) == 1.0
    with pytest.raises(LeftOut, match=r"\[2\] tokens instead of 3"):  # ours must not fail
        measure_case(Turns("tiny", (1, 2, 3)), contenders, absent, 2)


def test_who_took_long_has_no_more_turns_and_the_same_prompts() -> None:
    ours, slow = Answers(4), Answers(2, seconds=ENOUGH_S)
    turns = Turns("tiny", (3, 8, 2))
    contenders: dict[str, Contender] = {OURS: ours, "slow": slow}
    assert measure_case(turns, contenders, {}, 3) == {OURS: 0.5, "slow": ENOUGH_S}
    assert {name: len(tokens) for name, tokens in turns.first_tokens.items()} == {
        OURS: 12,
        "slow": 6,
    }
    assert turns.same_first("slow") == turns.same_first(OURS) == 1.0


def test_last_words_are_the_first_error(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "WARNING ImportError: no matter\n"
        "(EngineCore pid=7) ERROR 11-22 02:57:52 [core.py:1510] ValueError: too small\n"
        "RuntimeError: engine core failed, see above\n"
        "a warning\n\n"
    )
    assert last_words(log) == "ValueError: too small"
    log.write_text("one\ntwo\n")
    assert last_words(log) == "two"


def test_a_server_that_ends_leaves_its_last_words(tmp_path: Path) -> None:
    server = Server("", "-m bench.peers.nonsense CHECKPOINT PORT", ("/", b""))
    with pytest.raises(NotRunning, match="nonsense"), started(server, tmp_path, tmp_path / "log"):
        pass


def test_who_does_not_run_is_left_out_of_the_turns() -> None:
    starts: list[str] = []

    @contextmanager
    def runs() -> Iterator[int]:
        starts.append("runs")
        yield 7

    @contextmanager
    def breaks() -> Iterator[int]:
        starts.append("breaks")
        raise NotRunning("no such processor")
        yield 0

    measured: list[tuple[str, int]] = []
    absent = in_turns(
        {"breaks": breaks, "runs": runs}, 2, lambda name, system: measured.append((name, system))
    )
    assert absent == {"breaks": "no such processor"}
    assert starts == ["breaks", "runs", "runs"]
    assert measured == [("runs", 7)] * 2


def config_of(checkpoint: Path) -> ServeConfig:
    """One worker of ours that does both."""
    return parse_config(
        {
            "tiers": [
                {
                    "served_model_name": MODEL,
                    "model": str(checkpoint),
                    "engine": {"num_threads": 1},
                    "prefill": {"num_replicas": 0},
                }
            ],
            "transport": "local",
            "cold_tier_nbytes": 0,
            "cluster_key": "bench",
            "link_host": "127.0.0.1",
        }
    )


async def test_streams_of_a_random_checkpoint_have_every_token(tmp_path: Path) -> None:
    async with served_port(config_of(write("tiny", tmp_path))) as port:
        prompt = list(range(200))
        stream = await complete(port, prompt, 8)
        # The end is an event of its own if it shows a character that no token completed.
        assert stream.num_output_tokens == 8 and 2 <= len(stream.event_s) <= 8 + 1
        assert 0 < stream.ttft_s <= stream.ttft_s + 7 * stream.tpot_s
        assert not await asyncio.to_thread(was_moved, port, stream.id)
        with pytest.raises(NotRunning, match="nobody"):
            await complete(port, prompt, 8, {"model": "nobody"})
