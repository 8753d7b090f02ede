"""Directory for crash reports of engines in tests, separate from those of the user."""

from __future__ import annotations

import tempfile

FOLDER = tempfile.mkdtemp(prefix="windlass-crashes-")  # removed at the end of the tests
CRASHES = {"WINDLASS_CRASH_DIR": FOLDER}
