"""The report of load tests as one HTML file: its charts are SVG, and nothing is fetched."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from io import StringIO

from rich.console import Console

from disagg.tools.bench.result import METRICS, BenchResult, compare
from disagg.tools.bench.tables import print_differences, print_result

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 460, 250, 56, 36, 14
_MAX_POINTS = 400  # of one line
_NUM_TICKS = 5
_COLUMNS = 110  # characters of the page's width
_STYLE = """
:root{color-scheme:light dark;--run0:#2563eb;--run1:#d97706;--run2:#059669;--run3:#9333ea}
@media(prefers-color-scheme:dark){:root{--run0:#7aa7ff;--run1:#fbbf24;--run2:#34d399;--run3:#c084fc}}
body{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2em auto;padding:0 1em}
.charts{display:flex;flex-wrap:wrap;gap:1em}figure{margin:0;max-width:100%}
svg{max-width:100%;height:auto;font:11px system-ui,sans-serif;fill:currentColor}
.grid{stroke:currentColor;opacity:.15}pre{white-space:pre-wrap;font-size:12px}
"""


Points = Sequence[tuple[float, float]]  # of one run in a chart


def page(results: dict[str, BenchResult]) -> str:
    """The report of one run or of two, by name."""
    runs = list(results.values())
    legend = "".join(
        f'<li><b style="color:var(--run{i % 4})">{html.escape(name)}</b>: {html.escape(each.model)}'
        f" at {html.escape(each.url)}{html.escape(each.endpoint)}, {html.escape(each.date)}"
        f"<pre>{html.escape(', '.join(f'{k}={v}' for k, v in each.load.items()))}</pre></li>"
        for i, (name, each) in enumerate(results.items())
    )
    over_time = "s since the beginning"
    dots = [[(r.due_s, 1e3 * r.ttft_s) for r in each.answered] for each in runs]
    rates = [_tokens_per_s(each) for each in runs]
    charts = [
        _chart("TTFT over time", over_time, "ms", dots, is_dots=True),
        _chart("Tokens a second", over_time, "tokens/s", rates),
    ]
    for metric in (*METRICS, "itl"):
        what = "pauses" if metric == "itl" else "requests"
        title = f"{metric.upper()}: share of {what} that took at most so long"
        charts.append(_chart(title, "ms", "%", [_shares(each.values(metric)) for each in runs]))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width"><title>disagg bench</title>'
        f"<style>{_STYLE}</style><h1>Load test</h1><ul>{legend}</ul>{_figures(results)}"
        f'<div class="charts">{"".join(charts)}</div></html>\n'
    )


def _figures(results: dict[str, BenchResult]) -> str:
    """What the command prints."""
    to = Console(record=True, file=StringIO(), highlight=False, soft_wrap=True, width=_COLUMNS)
    runs = list(results.values())
    if len(runs) == 2:
        print_differences(to, list(results), compare(*runs))
    else:
        print_result(to, *runs)
    return f"<pre>{to.export_html(inline_styles=True, code_format='{code}')}</pre>"


def _shares(ordered: Sequence[float]) -> Points:
    step = max(1, len(ordered) // _MAX_POINTS)
    picked = [*range(0, len(ordered), step), len(ordered) - 1] if ordered else []
    return [(ordered[i], 100 * (i + 1) / len(ordered)) for i in picked]


def _tokens_per_s(result: BenchResult) -> Points:
    """In parts of equal length; an event has its share of the answer's tokens."""
    width_s = max(result.duration / 60, 0.1)
    sums: dict[int, float] = {}
    for each in result.answered:
        for when_s in each.event_s:
            part = int(when_s / width_s)
            sums[part] = sums.get(part, 0.0) + each.num_output_tokens / len(each.event_s)
    last = max(sums, default=-1)
    return [((i + 0.5) * width_s, sums.get(i, 0.0) / width_s) for i in range(last + 1)]


def _chart(
    title: str, x_name: str, y_name: str, runs: Sequence[Points], *, is_dots: bool = False
) -> str:
    points = [point for each in runs for point in each]
    x_step, y_step = (_tick(max((p[axis] for p in points), default=1.0)) for axis in (0, 1))
    x_most, y_most = x_step * _NUM_TICKS, y_step * _NUM_TICKS

    def x(value: float) -> float:
        return _LEFT + value / x_most * (_WIDTH - _LEFT - 12)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - value / y_most * (_HEIGHT - _BOTTOM - _TOP)

    drawn = []
    for i in range(_NUM_TICKS + 1):
        at_x, at_y = x(i * x_step), y(i * y_step)
        drawn += [
            f'<path class="grid" d="M{_LEFT} {at_y:.1f}H{_WIDTH - 12}"/>',
            f'<text x="{_LEFT - 6}" y="{at_y + 4:.1f}" text-anchor="end">{i * y_step:g}</text>',
            f'<text x="{at_x:.1f}" y="{_HEIGHT - 20}" text-anchor="middle">{i * x_step:g}</text>',
        ]
    for run, line in enumerate(runs):
        color = f"var(--run{run % 4})"
        places = [f"{x(a):.1f} {y(b):.1f}" for a, b in line]
        if is_dots:  # lines of no length with round ends
            dots = "".join(f"M{place}h0" for place in places)
            look = 'stroke-width="3" stroke-linecap="round" opacity=".6"'
            drawn.append(f'<path d="{dots}" stroke="{color}" {look}/>')
        elif places:
            drawn.append(
                f'<path d="M{"L".join(places)}" fill="none" stroke="{color}" stroke-width="1.5"/>'
            )
    return (
        f"<figure><figcaption>{title} ({y_name})</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" role="img" aria-label="{title}">'
        f'{"".join(drawn)}<text x="{_WIDTH - 12}" y="{_HEIGHT - 4}" text-anchor="end">{x_name}'
        "</text></svg></figure>"
    )


def _tick(most: float) -> float:
    """A round number of which `_NUM_TICKS` are not less than `most`."""
    step = max(most, 1e-9) / _NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(step))
    return next(unit * factor for factor in (1, 2, 2.5, 5, 10) if step <= unit * factor * 1.000001)
