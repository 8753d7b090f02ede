"""Where tests of engines and of Triton's programs compute: a CPU, or what WINDLASS_TEST_DEVICE names. Imports no torch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

DEVICE = os.environ.get("WINDLASS_TEST_DEVICE", "cpu")
# Of numbers that are compared with a CPU's, which computes small models in float32.
DTYPE = "auto" if DEVICE == "cpu" else "float32"
# What tells a server or a command where to compute; nothing where a CPU is all there is, so that it finds that by itself.
PLACE = {} if DEVICE == "cpu" and not Path("/dev/nvidiactl").exists() else {"WINDLASS_DEVICE": DEVICE}
# The environment of real servers: several share a GPU.
SERVERS = PLACE if DEVICE == "cpu" else PLACE | {"WINDLASS_DTYPE": DTYPE, "WINDLASS_KV_CACHE_MEMORY": "1GiB"}
# The same of an engine without a server.
IN_PROCESS = {"device": DEVICE, "dtype": DTYPE} if PLACE else {}
ON_A_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="of what engines do on a CPU")
