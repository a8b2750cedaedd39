"""A plot of simulations: p95 TTFT against the load, a line for each policy. Plain SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from disagg.sim.report import Report

WIDTH, HEIGHT, MARGIN = 720, 440, 64
COLOURS = ("#0b6e4f", "#c1292e", "#235789", "#f1a208", "#7b2d8b", "#555555")


def ttft_by_load(reports: Sequence[Report]) -> str:
    """An SVG document. Seconds are on a logarithmic axis."""
    seconds = [max(each.ttft_p95_s, 1e-3) for each in reports]
    low, high = _decades(seconds)
    most = max(each.requests_per_s for each in reports)

    def x(each: Report) -> float:
        return MARGIN + each.requests_per_s / most * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        part = (math.log10(max(value, 1e-3)) - low) / (high - low)
        return HEIGHT - MARGIN - part * (HEIGHT - 2 * MARGIN)

    parts = [_text(MARGIN, 24, "p95 TTFT (s) by requests/s; engines and network are simulated")]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(_line([(MARGIN, at), (WIDTH - MARGIN, at)], "#dddddd"))
        parts.append(_text(8, at + 4, f"{10.0**power:g} s"))
    parts.append(_text(WIDTH - MARGIN, HEIGHT - MARGIN + 20, f"{most:.1f}/s"))
    parts.append(_text(MARGIN, HEIGHT - MARGIN + 20, "0"))
    policies = list(dict.fromkeys(each.policy for each in reports))
    for place, policy in enumerate(policies):
        own = sorted((each for each in reports if each.policy == policy), key=lambda r: r.speed)
        colour = COLOURS[place % len(COLOURS)]
        points = [(x(each), y(each.ttft_p95_s)) for each in own]
        parts.append(_line(points, colour))
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        parts.append(_text(MARGIN + 12, 48 + 16 * place, policy, colour))
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _decades(values: Sequence[float]) -> tuple[int, int]:
    low = math.floor(math.log10(min(values)))
    return low, max(low + 1, math.ceil(math.log10(max(values))))


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" fill="{colour}">{escape(text)}</text>'
