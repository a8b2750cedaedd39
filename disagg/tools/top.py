"""Show the fleet live: models, workers, KV transfers and refusals, as one ingress sees them.

In a pipe, and with --once, it prints one picture. With API keys it needs the operator's.
"""

from __future__ import annotations

import argparse
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from disagg.errors import Unavailable
from disagg.ingress.fleet_state import ShownFleet, ShownModel, ShownWorker
from disagg.tools.server import Server, add_server_arguments, server_of
from disagg.tools.terminal import console, print_json, table

_RECENT_S = 15.0  # in which an ingress has taken a sample
_BAR = 8  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="(default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one picture and exit")
    parser.add_argument("--json", action="store_true", help="print what the server answers, once")


def run(args: argparse.Namespace) -> int:
    server, to = server_of(args), console()
    if args.json:
        print_json(server.ask(_path()))
    elif args.once or not to.is_terminal:
        to.print(_look(server))
    else:
        _watch(server, to, args.interval)
    return 0


def _watch(server: Server, to: Console, interval_s: float) -> None:
    """Until Ctrl-C. A server that is gone is said, and asked again."""
    shown = _look(server)
    with Live(shown, console=to, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval_s)
                try:
                    shown = _look(server)
                    live.update(shown, refresh=True)
                except Unavailable as error:
                    live.update(Group(Text(error.message, "red"), shown), refresh=True)
        except KeyboardInterrupt:
            return


def _path() -> str:
    return f"/debug/fleet?since={time.time() - _RECENT_S:.0f}"


def _look(server: Server) -> RenderableType:
    return picture(server.ask_as(_path(), ShownFleet))


def picture(fleet: ShownFleet) -> RenderableType:
    parts: list[RenderableType] = [_models(fleet), Text(), _workers(fleet)]
    if fleet.transfers:
        parts += [Text(), _transfers(fleet)]
    ended = {f"refused: {k}": v for k, v in fleet.refused.items()}
    ended |= {f"failed: {k}": v for k, v in fleet.failed.items()}
    if any(ended.values()):
        words = ", ".join(f"{name} {num:g}" for name, num in ended.items() if num)
        parts += [Text(), Text(f"since ingress {fleet.ingress} started: {words}")]
    return Group(*parts)


def _models(fleet: ShownFleet) -> Table:
    rows = table(
        "model",
        "queued",
        "req/s",
        "tokens/s",
        "TTFT ms",
        "TPOT ms",
        "cached %",
        "in SLO %",
        "moved",
    )
    recent = fleet.history[-1].models if fleet.history else {}
    for each in fleet.models:
        now, totals = recent.get(each.name), each.totals
        rows.add_row(
            escape(each.name),
            f"{each.num_queued:g}",
            _shown(now.requests_per_s if now else None),
            _shown(now.tokens_per_s if now else None),
            _of_slo(now.ttft_s if now else None, each.ttft_slo_s),
            _of_slo(now.tpot_s if now else None, each.tpot_slo_s),
            _percent(totals.num_cached_tokens, totals.num_prompt_tokens),
            _in_slo(each),
            f"{totals.num_moves:g}",
        )
    return rows


def _workers(fleet: ShownFleet) -> Table:
    rows = table("<worker", "running", "prefill", "waiting", "tokens to do", "step ms", "<KV")
    for each in sorted(fleet.workers, key=lambda w: (w.model, w.role != "prefill", w.worker_id)):
        rows.add_row(
            escape(each.worker_id) + _unless_serving(each),
            f"{each.num_running}/{each.max_num_seqs}",
            f"{each.num_prefilling}",
            f"{each.num_waiting}",
            f"{each.num_uncomputed_tokens:,}",
            _shown(1e3 * each.step_s if each.step_s is not None else None),
            _kv(each),
        )
    return rows


def _transfers(fleet: ShownFleet) -> Table:
    rows = table("<KV from", "<to", "<lane", "GB/s", "latency ms")
    for each in fleet.transfers:
        rows.add_row(
            escape(each.source),
            escape(each.destination),
            each.lane or "-",
            _shown(each.bytes_per_s / 1e9),
            _shown(1e3 * each.latency_s),
        )
    return rows


def _kv(worker: ShownWorker) -> str:
    full = round(_BAR * worker.kv_usage)
    color = "red" if worker.kv_usage > 0.9 else "green"
    bar = f"[{color}]{'#' * full}[/{color}]{'.' * (_BAR - full)}"
    return f"{bar} {worker.kv_usage:4.0%}"


def _unless_serving(worker: ShownWorker) -> str:
    return "" if worker.state == "serving" else f" ({worker.state.replace('_', ' ')})"


def _of_slo(seconds: float | None, slo_s: float | None) -> str:
    if seconds is None:
        return "-"
    text = f"{1e3 * seconds:.1f}"
    return f"[red]{text}[/red]" if slo_s is not None and seconds > slo_s else text


def _in_slo(model: ShownModel) -> str:
    totals = model.totals
    return _percent(totals.slo_met, totals.slo_met + totals.slo_missed)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
