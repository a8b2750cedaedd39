from __future__ import annotations

import json

import msgspec
import pytest

from disagg.cli.main import main
from disagg.tools.sim import grid
from disagg.tools.sim.baselines import FIXED_ROLES, NO_REFUSALS, OURS, PUBLISHED, TAICHI
from disagg.tools.sim.config import H100_8B, L40S_8B, SimConfig
from disagg.tools.sim.loads import make_load
from disagg.tools.sim.trace import TraceRequest

CONFIG = SimConfig(ttft_slo_s=0.5)
WINDOW = grid.Window(
    [TraceRequest(0.0, 400 + 300 * (n % 5), 40 + 20 * (n % 7)) for n in range(120)]
)
SPLITS = grid.splits(6)


def test_a_load_is_steady_and_keeps_the_requests_of_the_window() -> None:
    requests = WINDOW.at_rate(50.0, seed=1)
    assert requests == WINDOW.at_rate(50.0, seed=1) != WINDOW.at_rate(50.0, seed=2)
    assert [each.num_prompt_tokens for each in requests] == [
        each.num_prompt_tokens for each in WINDOW.requests
    ]
    assert requests[-1].arrival_s == pytest.approx(120 / 50.0, rel=0.3)


def test_saturation_is_what_workers_compute_one_after_another() -> None:
    window = [TraceRequest(0.0, 1024, 1) for _ in range(400)]
    rate = grid.saturation(CONFIG, window)
    per_step_s, per_token_s, per_attended_s, _, _, _ = CONFIG.times.coefficients
    work_s = per_step_s + 1024 * per_token_s + 1024 * 512.5 * per_attended_s
    assert rate == pytest.approx(1.0 / work_s)


def test_known_prefixes_are_no_work() -> None:
    alone = [TraceRequest(0.0, 1024, 2, (2 * n, 2 * n + 1)) for n in range(50)]
    alike = [TraceRequest(0.0, 1024, 2, (0, n + 1)) for n in range(50)]
    assert grid.saturation(CONFIG, alike) > 1.4 * grid.saturation(CONFIG, alone)


def test_a_tight_slo_is_held_by_every_split_where_fixed_roles_and_collocation_miss_it() -> None:
    """The goals of the grid, on a load that was made up for this test."""
    cells = list(grid.cells([0.01], [0.9], SPLITS))
    reports = [grid.play(cell, CONFIG, WINDOW) for cell in cells]
    (row,) = grid.make_rows(CONFIG, WINDOW, cells, reports)
    assert row.worst_share >= 0.96  # a request is 0.8 %
    assert row.collocated is not None and min(row.by_split) >= 1.15 * row.collocated
    assert min(row.others[FIXED_ROLES]) < 0.8 * row.best
    assert {cell.policy for cell in cells[len(SPLITS) :]} == {FIXED_ROLES}
    assert [cell.split for cell in cells if cell.policy == OURS] == [*SPLITS]


def unlike_row(config: SimConfig, window: grid.Window, tpot_slo_s: float) -> grid.Row:
    cells = list(grid.cells([tpot_slo_s], [0.5], grid.UNLIKE_SPLITS, is_unlike=True))
    reports = [grid.play(cell, config, window) for cell in cells]
    (row,) = grid.make_rows(config, window, cells, reports)
    return row


def test_unlike_gpus_serve_more_than_with_fixed_roles_whichever_pool_they_are() -> None:
    """L40S take 27 ms for a step, so no stream can meet the SLO on them."""
    row = unlike_row(CONFIG, WINDOW, tpot_slo_s=0.02)
    h100, l40s = (
        grid.saturation(msgspec.structs.replace(CONFIG, times=times), WINDOW.requests)
        for times in (H100_8B, L40S_8B)
    )
    assert row.requests_per_s == 0.5 * (2 * h100 + 4 * l40s) and row.collocated is None
    assert min(row.by_split) >= 0.97 * max(row.fixed, *row.by_split)


def test_unlike_gpus_lend_each_other_the_prefixes_of_conversations() -> None:
    """Streams are on the H100s, and with them the prefixes of prompts that L40S must compute."""
    window = grid.Window(make_load("conversations", 50.0, 200, seed=3))
    config = SimConfig(num_blocks=2000, ttft_slo_s=0.5)
    row = unlike_row(config, window, tpot_slo_s=0.015)
    assert min(row.by_split) >= 0.97 * max(row.fixed, *row.by_split)


def test_a_grid_prints_a_row_for_each_load_and_slo(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--num-requests", "12", "--processes", "1", "--requests-per-s", "50"]
    slos_and_loads = ["--grid-tpot-slo-ms", "12.5", "50", "--grid-load", "0.5"]
    assert main(["sim", "--grid", *arguments, *slos_and_loads]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    said = json.loads(last)
    rows = [msgspec.convert(each, grid.Row) for each in said["rows"]]
    assert [(each.tpot_slo_s, each.load) for each in rows] == [(0.0125, 0.5), (0.05, 0.5)]
    assert {len(each.by_split) for each in rows} == {len(SPLITS)}
    unlike = [msgspec.convert(each, grid.Row) for each in said["unlike"]]
    assert [(each.tpot_slo_s, each.load) for each in unlike] == [(0.0125, 0.5), (0.05, 0.5)]
    assert said["simulated"] is True and said["ttft_slo_s"] > 0


@pytest.mark.parametrize("load", ["0", "-1", "nan", "much"])
def test_a_load_that_cannot_be_is_refused(load: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["sim", "--grid", "--grid-load", load])
    assert "greater than 0" in capsys.readouterr().err


def test_a_made_up_load_is_played_by_other_policies_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--num-requests", "12", "--processes", "1", "--grid-workers", "2"]
    load = ["--load", "batch", "--grid-tpot-slo-ms", "30", "--grid-load", "0.5"]
    assert main(["sim", "--grid", *arguments, *load, "--compare"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    (row,) = [msgspec.convert(each, grid.Row) for each in json.loads(last)["rows"]]
    assert [*row.others] == [FIXED_ROLES, NO_REFUSALS, *PUBLISHED]
    assert len(row.others[TAICHI]) == len(grid.DECODE_CHUNKS) + 1  # of one split of the two
    assert any("preble" in line for line in lines)
    assert json.loads(last)["splits"] == [[1, 1], [2, 0]] and json.loads(last)["unlike"] == []
