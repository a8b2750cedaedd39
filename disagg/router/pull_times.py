"""How long a worker's pulls of KV take, from what it has measured.

A worker of a large fleet reports up to `time_model.MAX_FIGURES` sources, and a decision asks for
many pairs of workers. So a worker's figures are looked through once, when a decision first asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from disagg.messages import TransferFigure

# For a worker that has not pulled yet. Optimistic, because too high a price would never be
# corrected: nothing would be transferred.
UNMEASURED_LATENCY_S = 2e-3
UNMEASURED_S_PER_BYTE = 1e-10


class PullTimes:
    """`figures`: of one worker, by source."""

    __slots__ = ("_by_source", "_usual", "figures")

    def __init__(self, figures: Sequence[TransferFigure]) -> None:
        self.figures = figures
        self._by_source: dict[str, TransferFigure] | None = None
        self._usual = UNMEASURED_LATENCY_S, UNMEASURED_S_PER_BYTE

    def seconds(self, source_id: str, nbytes: int) -> float:
        """Seconds to pull from a source; if it was not measured, the mean of those that were."""
        by_source = self._by_source
        if by_source is None:
            by_source = self._index()
        figure = by_source.get(source_id)
        if figure is not None:
            return figure.latency_s + nbytes / figure.bytes_per_s
        latency_s, s_per_byte = self._usual
        return latency_s + nbytes * s_per_byte

    def _index(self) -> dict[str, TransferFigure]:
        figures = self.figures
        if figures:
            latency_s = sum([each.latency_s for each in figures]) / len(figures)
            s_per_byte = sum([1.0 / each.bytes_per_s for each in figures]) / len(figures)
            self._usual = latency_s, s_per_byte
        self._by_source = {each.source_id: each for each in figures}
        return self._by_source
