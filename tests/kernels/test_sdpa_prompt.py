"""The environment chooses how prompts are attended to, and nothing that does not exist."""

from __future__ import annotations

import pytest
import torch

from disagg.kernels.dispatch import PROMPT_ATTENTION, ops_for
from disagg.kernels.gpu.sdpa_prompt import whole_prompts


def test_an_unknown_way_of_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROMPT_ATTENTION, "flash")
    with pytest.raises(ValueError, match="ATTENTION=flash is unknown; set it to triton"):
        ops_for(torch.device("cpu"), 8)


def test_only_whole_prompts_of_some_length_are_done_by_torch() -> None:
    lens = ((1, 1), (2048, 2048), (1023, 1023), (2000, 3000), (1024, 1024))
    queries, contexts = zip(*lens, strict=True)
    whole = {1: slice(1, 2049), 4: slice(5072, 6096)}
    assert whole_prompts(queries, contexts, None) == whole
    assert whole_prompts(queries, contexts, 2048) == whole
    assert whole_prompts(queries, contexts, 2047) == {4: whole[4]}
