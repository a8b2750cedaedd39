"""Check this machine, or every node of a Ray cluster, before it serves.

Checks GPUs and drivers, limits, ports, versions, clocks, the lanes, latency and bandwidth of KV
transfers, and whether models fit. For each problem it prints how to fix it. The exit status is 1 if
something is wrong.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.markup import escape

from disagg.cli.engine_arguments import add_model_arguments, add_setting, engine_settings
from disagg.config import HttpConfig, TierConfig
from disagg.config_checks import parse_config
from disagg.tools.doctor.machine import check_machine, here, port, store
from disagg.tools.doctor.report import (
    DoctorReport,
    Finding,
    NodeReport,
    TransferReport,
    slowest,
)
from disagg.tools.doctor.transfers import measure_here
from disagg.tools.terminal import console, print_json, table

_MARKS = {"ok": "[green]ok[/green]", "warn": "[yellow]warn[/yellow]", "wrong": "[red]wrong[/red]"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="*", help="model directories, GGUF files or bundled models to check"
    )
    parser.add_argument(
        "--ray-address",
        help="check every node of this running Ray cluster (default: check this machine)",
    )
    add_setting(parser, HttpConfig, "host")
    add_setting(parser, HttpConfig, "port")
    add_model_arguments(
        parser.add_argument_group("settings of `disagg serve` with which models are checked")
    )
    parser.add_argument(
        "--transfers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure KV transfers, which takes some seconds per pair of nodes (default: enabled)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object instead of tables"
    )


def run(arguments: argparse.Namespace) -> int:
    report = _examine(arguments)
    if arguments.json:
        print_json(report)
    else:
        _show(console(), report)
    return int(bool(report.wrong))


def _examine(arguments: argparse.Namespace) -> DoctorReport:
    from disagg.tools.doctor.models import check_model

    models = [
        finding for model in arguments.model for finding in check_model(_tier(arguments, model))
    ]
    if arguments.ray_address is not None:
        from disagg.tools.doctor.cluster import examine

        nodes, transfers = examine(arguments.ray_address, with_transfers=arguments.transfers)
    else:
        nodes, transfers = _look_here(arguments)
    return DoctorReport(tuple(nodes), tuple(transfers), tuple(models), slowest(transfers))


def _look_here(arguments: argparse.Namespace) -> tuple[list[NodeReport], list[TransferReport]]:
    findings = [*check_machine(), port(arguments.host, arguments.port), store()]
    machine = here("this machine")
    transfers = measure_here(machine) if arguments.transfers else []
    return [NodeReport(machine.name, tuple(findings))], transfers


def _tier(arguments: argparse.Namespace, model: str) -> TierConfig:
    """The model with the flags' settings. Raises `StartupError` if one is invalid."""
    tiers = [{"model": model, "engine": engine_settings(arguments)}]
    return parse_config({"tiers": tiers, "cluster_key": "not used"}).tiers[0]


def _show(to: Console, report: DoctorReport) -> None:
    for node in report.nodes:
        _table(to, node.name, node.findings)
    if report.transfers:
        _table(to, "KV transfers", [transfer.finding for transfer in report.transfers])
        for transfer in report.transfers:
            if transfer.ucx:
                to.print(f"UCX of {escape(transfer.reader)}: {escape(transfer.ucx)}")
    if report.models:
        _table(to, "models", report.models)
    if wrong := report.wrong:
        number = "1 problem" if len(wrong) == 1 else f"{len(wrong)} problems"
        to.print(f"\n{number} found; the first one to fix: {escape(wrong[0].change)}")
    else:
        to.print("\nno problems found")


def _table(to: Console, title: str, findings: list[Finding] | tuple[Finding, ...]) -> None:
    rows = table("<", "<check", "<found", "<fix", title=escape(title))
    for each in findings:
        row = (escape(each.check), escape(each.found), escape(each.change))
        rows.add_row(_MARKS[each.status], *row)
    to.print()
    to.print(rows)
