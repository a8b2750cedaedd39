"""Draws line charts, one below the other, as an SVG document."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

import msgspec

from disagg.errors import StartupError

WIDTH, HEIGHT, MARGIN = 720, 440, 64
COLOURS = ("#0b6e4f", "#c1292e", "#235789", "#f1a208", "#7b2d8b", "#555555")
LEAST = 1e-3  # smallest value on a logarithmic axis

Line = Sequence[tuple[float, float]]


class Chart(msgspec.Struct, frozen=True):
    """Lines by name. The x axis starts at 0.

    Args:
        unit, x_unit: units written after the numbers of the y and x axes.
        is_logarithmic: whether the y axis is logarithmic; a linear one starts at 0.
    """

    title: str
    lines: Mapping[str, Line]
    unit: str = ""
    x_unit: str = ""
    is_logarithmic: bool = False


def check_path(path: Path) -> None:
    """Raises `StartupError` if a plot cannot be written to the path."""
    if path.suffix.lower() != ".svg":
        raise StartupError(
            f"Plots are SVG files, so the name {path} must end with .svg.", param="plot"
        )
    if not path.resolve().parent.is_dir():
        raise StartupError(f"The directory of {path} does not exist.", param="plot")


def write_svg(path: Path, charts: Sequence[Chart]) -> None:
    """Write the charts to a file. Raises `StartupError` if it cannot be written."""
    size = f'width="{WIDTH}" height="{HEIGHT * len(charts)}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">']
    parts.append('<rect width="100%" height="100%" fill="white"/>')
    for place, chart in enumerate(charts):
        parts += [f'<g transform="translate(0,{HEIGHT * place})">', *_draw(chart), "</g>"]
    try:
        path.write_text("\n".join([*parts, "</svg>\n"]), encoding="utf-8")
    except OSError as error:
        raise StartupError(f"Cannot write {path}: {error}.", param="plot") from error


def _draw(chart: Chart) -> list[str]:
    points = [point for line in chart.lines.values() for point in line]
    most = max(x for x, _ in points)
    marks, height = (_logarithmic if chart.is_logarithmic else _linear)([y for _, y in points])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return (
            MARGIN + point[0] / most * (WIDTH - 2 * MARGIN),
            HEIGHT - MARGIN - height(point[1]) * (HEIGHT - 2 * MARGIN),
        )

    parts = [_text(MARGIN, 24, chart.title)]
    for mark in marks:
        _, at = place((0.0, mark))
        parts.append(_polyline([(MARGIN, at), (WIDTH - MARGIN, at)], "#dddddd"))
        parts.append(_text(8, at + 4, f"{mark:g}{chart.unit}"))
    parts.append(_text(WIDTH - MARGIN, HEIGHT - MARGIN + 20, f"{most:g}{chart.x_unit}"))
    parts.append(_text(MARGIN, HEIGHT - MARGIN + 20, "0"))
    for number, (name, line) in enumerate(chart.lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        at_points = [place(point) for point in line]
        parts.append(_polyline(at_points, colour))
        parts += [
            f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in at_points
        ]
        parts.append(_text(MARGIN + 12, 48 + 16 * number, name, colour))
    return parts


Axis = tuple[list[float], Callable[[float], float]]  # marks, and a value's share of the height


def _linear(values: Sequence[float]) -> Axis:
    top = max(*values, LEAST)
    step = 10.0 ** math.floor(math.log10(top))
    step = next(part * step for part in (0.1, 0.2, 0.5, 1.0) if top / (part * step) <= 10.0)
    num_steps = math.ceil(top / step)
    return [step * i for i in range(num_steps + 1)], lambda value: value / (step * num_steps)


def _logarithmic(values: Sequence[float]) -> Axis:
    low = math.floor(math.log10(max(LEAST, min(values))))
    high = max(low + 1, math.ceil(math.log10(max(LEAST, *values))))

    def height(value: float) -> float:
        return (math.log10(max(LEAST, value)) - low) / (high - low)

    return [10.0**power for power in range(low, high + 1)], height


def _polyline(points: Line, colour: str) -> str:
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _text(x: float, y: float, text: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="13" fill="{colour}">{escape(text)}</text>'
