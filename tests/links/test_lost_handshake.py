"""A handshake that stops half-way is given up in time and begun anew."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.messages import Challenge, ToIngress, Welcome
from tests.links.fakes import RecordingObserver, linked, until
from tests.links.test_distrust import RawWorker


class ForgetfulWorker(RawWorker):
    """Leaves one kind of message out, the first time that it should be sent."""

    def __init__(self, forgets: type[Any]) -> None:
        super().__init__()
        self._forgets: type[Any] | None = forgets
        self.num_connections = 0

    def write(self, message: ToIngress) -> None:
        self.num_connections += isinstance(message, Challenge)
        if self._forgets is not None and isinstance(message, self._forgets):
            self._forgets = None
        else:
            super().write(message)


@pytest.mark.parametrize("forgets", [Challenge, Welcome], ids=lambda kind: kind.__name__)
async def test_a_lost_message_costs_one_timeout(forgets: type[Any]) -> None:
    observer, worker = RecordingObserver(), ForgetfulWorker(forgets)
    async with worker, linked(worker.record, observer, handshake_timeout_s=0.2) as link:
        await until(lambda: observer.held)
        assert link.is_up
        assert worker.num_connections >= 2, "nothing was lost"
