"""Where tests of engines and of Triton's programs compute: a CPU, or what WINDLASS_TEST_DEVICE names. Imports no torch."""

from __future__ import annotations

import os

import pytest

DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cpu")
# Of numbers that are compared with a CPU's, which computes small models in float32.
DTYPE = "auto" if DEVICE == "cpu" else "float32"
# The environment of real servers: several share a GPU.
SERVERS = {"WINDLASS_DEVICE": DEVICE, "WINDLASS_DTYPE": DTYPE}
if DEVICE != "cpu":
    SERVERS["WINDLASS_KV_CACHE_MEMORY"] = "1GiB"
ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="of what engines do on a CPU")
