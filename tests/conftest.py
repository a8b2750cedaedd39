"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No time limit for an example: machines are shared and tests must not measure them. In CI the
# examples are the same each time, so that a red run is always the change's; elsewhere they explore.
settings.register_profile("disagg", deadline=None, print_blob=True, derandomize="CI" in os.environ)
settings.load_profile("disagg")
