"""Output of `disagg cascade calibrate`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from msgspec.structs import asdict, astuple, replace

from disagg.config import CascadeConfig
from disagg.tools import terminal
from disagg.tools.calibrate.calibration import (
    Compared,
    Curve,
    ModelSizes,
    Point,
    min_num_prompts,
    replay,
)
from disagg.yaml_text import to_yaml

SHARES = (0.5, 0.8, 0.95)  # shares of the recovered accuracy gap at which costs are reported
NUM_ROWS = 12

console = terminal.console()


def as_yaml(config: CascadeConfig) -> str:
    """The `cascade` section of a deployment."""
    section = asdict(config) | {"prompt_judges": [asdict(each) for each in config.prompt_judges]}
    given = {name: value for name, value in section.items() if value}
    return to_yaml({"cascade": given})


def report_curves(
    arguments: argparse.Namespace,
    curves: Sequence[Curve],
    best: Curve,
    chosen: Point,
    parameters: ModelSizes,
) -> None:
    small, large = arguments.models
    console.print(
        f"{small}: {best.small_accuracy:.1%} correct with {parameters.small:,} parameters;"
        f" {large}: {best.large_accuracy:.1%} with {parameters.large:,}"
    )
    names = ("threshold", "escalated", "accuracy", "gap recovered", "cost")
    rows = terminal.table(*names, title=f"{best.signal}, quality against cost")
    step = max(1, len(best.points) // NUM_ROWS)
    shown = sorted({*best.points[::step], best.points[-1], chosen}, key=lambda p: p.threshold)
    for point in shown:
        cells = (f"{point.threshold:.4g}", *map("{:.1%}".format, astuple(point)[1:]))
        rows.add_row(*cells, style="bold" if point == chosen else "")
    console.print(rows)
    shares = (f"{share:.0%}" for share in SHARES)
    cost = f"cost at quality {arguments.quality:g}"
    rows = terminal.table(
        "<signal",
        *shares,
        "APGR",
        cost,
        title="escalated (cost) by share of the accuracy gap recovered",
    )
    for each in curves:
        points = [each.at_recovered(share) for share in SHARES]
        cells = tuple(f"{point.escalated:.1%} ({point.cost:.1%})" for point in points)
        cheapest = each.cheapest(arguments.quality)
        rows.add_row(each.signal, *cells, f"{each.area:.3f}", f"{cheapest.cost:.1%}")
    console.print(rows)
    console.print(
        f"chosen: {best.signal} >= {chosen.threshold:.4g} over the first {best.num_judged_tokens}"
        f" tokens: {chosen.accuracy:.1%} correct ({chosen.accuracy / best.large_accuracy:.1%} of"
        f" {large}'s) at {chosen.cost:.1%} of its cost; {chosen.escalated:.1%} escalate"
    )


def report_wait(
    arguments: argparse.Namespace,
    answers: Sequence[Compared],
    config: CascadeConfig,
    parameters: ModelSizes,
) -> None:
    """Print what early releases and the prompt judge change."""
    if arguments.risk and not config.leads:
        least = min_num_prompts(arguments.risk)
        console.print(
            f"Answers are released only after {config.num_judged_tokens} tokens: {len(answers)}"
            f" prompts are too few to show that earlier releases lose at most {arguments.risk:.2%}"
            f" of the right answers. Use at least {least} prompts, or a higher --risk."
        )
    slow = replace(config, leads=(), prompt_judges=())
    names = ("<", "tokens judged", "start large", "escalated", "accuracy", "cost")
    rows = terminal.table(*names, title="until the first token")
    for name, each in (("all tokens judged", slow), ("chosen", config)):
        found = replay(answers, each, parameters)
        shares = (found.started, found.escalated, found.accuracy, found.cost)
        rows.add_row(name, f"{found.num_held:.1f}", *map("{:.1%}".format, shares))
    console.print(rows)
