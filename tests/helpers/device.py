"""Where tests of engines and of Triton's programs compute: a CPU, or what WINDLASS_TEST_DEVICE names. Imports no torch."""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cpu")
# Of real servers: some share a GPU, and numbers are compared with those of float32.
SERVERS = {} if DEVICE == "cpu" else {"WINDLASS_KV_CACHE_MEMORY": "1GiB", "WINDLASS_DTYPE": "float32"}
ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="of what engines do on a CPU")
