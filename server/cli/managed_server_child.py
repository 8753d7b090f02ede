"""`windlass serve` as a managed server: it ends when its standard input is closed, however its parent ended.

python -m windlass.server.cli.managed_server_child serve …
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from windlass.server.cli.main import run

_TERMINATE_SECONDS = 5.0


def _stop_with_parent() -> None:
    """Wait for the end of standard input, then end this process."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TERMINATE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    sys.exit(run(sys.argv[1:]))
