"""How a process of our own imports what it runs on. Imports nothing itself that takes time."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Around imports of many modules: the garbage collector looks at nothing meanwhile, and never again at what is there then.

    Modules stay for good and leave next to no garbage, but each of the collector's many rounds during an import visits what there
    is by then, and one more at the process's end: a sixth of the CPU time of a start. Not for a program with an engine in it,
    whose own objects would be left alone too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
