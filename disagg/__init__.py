"""disagg: large language models served with prefill and decode on separate workers, on Ray.

In Python, without a server: `disagg.LLM` (docs/offline.md). Types are in `__init__.pyi`.
"""

from __future__ import annotations

import importlib
from typing import Any

# Imported when they are used: `import disagg` takes no time.
_PLACES = {
    "LLM": "disagg.llm.llm",
    "AsyncLLM": "disagg.llm.async_llm",
    "SamplingParams": "disagg.llm.params",
    "StructuredOutputsParams": "disagg.llm.params",
    "RequestOutput": "disagg.llm.outputs",
    "CompletionOutput": "disagg.llm.outputs",
    "Logprob": "disagg.llm.outputs",
}
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'disagg' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
