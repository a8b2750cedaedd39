"""Settings that contradict themselves are refused in words, before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from disagg.config import parse_config
from disagg.errors import StartupError


@pytest.mark.parametrize("fields", [{}, {"cluster_key": ""}])
def test_an_empty_cluster_key(fields: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="set cluster_key") as refused:
        parse_config({"tiers": [{"model": "demo-small"}], **fields})
    assert refused.value.param == "cluster_key"
