"""Where the engines of tests leave reports of their deaths: not among those of whoever runs the tests."""

from __future__ import annotations

import tempfile

FOLDER = tempfile.mkdtemp(prefix="windlass-crashes-")  # the end of the tests removes it
CRASHES = {"WINDLASS_CRASH_DIR": FOLDER}
