"""The commands a fork server takes on its control socket, and the form of its answers.

FORK comes with the new process's socket and is answered by a process id, or by an error's number with a minus. REAP names
a dead process and is answered by how it ended: until then it stays a zombie, so that its id cannot become another's.
"""

from __future__ import annotations

import struct

COMMAND = struct.Struct("!ci")
ANSWER = struct.Struct("!i")
FORK, REAP = b"F", b"R"
