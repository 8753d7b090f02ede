"""The server behind a chat: `windlass serve`, which also ends when its standard input does, so that no chat leaves one behind.

python -m windlass.server.cli.chat_child serve …
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
    """Wait for the end of standard input: the chat holds its other end, and that closes however the chat ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TERMINATE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=_stop_with_parent, daemon=True).start()
    sys.exit(run(sys.argv[1:]))
