"""Which GPU a rank opens, of those that its process sees."""

from __future__ import annotations

import pytest
import torch

from disagg.engine.device.gpu import gpu_of
from disagg.errors import StartupError
from disagg.models.share import Share


def test_ranks_of_the_first_node_see_its_gpus_and_others_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first node's ranks are processes of the replica, and each other one is an actor."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    found = [gpu_of(Share(rank, 16), 8).index for rank in range(8)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found += [gpu_of(Share(rank, 16), 8).index for rank in range(8, 16)]
    assert found == [*range(8), *[0] * 8]


def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(StartupError, match="needs 8 GPUs, and this rank sees 4 of 8"):
        gpu_of(Share(3, 8), 8)
    with pytest.raises(StartupError, match="needs 8 GPUs on each node, and this rank sees 4 of 8"):
        gpu_of(Share(3, 16), 8)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StartupError, match="sees 0 of 1"):
        gpu_of(Share(9, 16), 8)
