"""The compiled names of the prefix index are tested where they can be built."""

from __future__ import annotations

from tests.kernels.compiled import can_compile

collect_ignore = [] if can_compile() else ["test_block_names.py"]
