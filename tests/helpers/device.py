"""Where tests of engines and of Triton's programs compute: a CPU, or what WINDLASS_TEST_DEVICE names. Imports no torch."""

from __future__ import annotations

import os

DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cpu")
