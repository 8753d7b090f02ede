"""Device of engine and Triton tests: CPU, or WINDLASS_TEST_DEVICE. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cpu")
# Tolerances for comparison with a CPU, which computes small models in float32.
DTYPE = "auto" if DEVICE == "cpu" else "float32"
# Options that select the device of a server or command; none on a CPU, so that detection is tested too.
PLACE = {} if DEVICE == "cpu" and not Path("/dev/nvidiactl").exists() else {"WINDLASS_DEVICE": DEVICE}
# Environment of real servers, which share a GPU.
SERVERS = PLACE if DEVICE == "cpu" else PLACE | {"WINDLASS_DTYPE": DTYPE, "WINDLASS_KV_CACHE_MEMORY": "1GiB"}
# Environment of an engine without a server.
IN_PROCESS = {"device": DEVICE, "dtype": DTYPE} if PLACE else {}
ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="of what engines do on a CPU")
