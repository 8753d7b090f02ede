"""Rank process: `python -m windlass.engine.core.rank_process`, started by `RankProcesses`.

Loads its shard of the model, allocates its KV cache, and then executes the first rank's plans. It ends when the first rank
does: its pipe closes, and the system kills it even if it is stuck.
"""

from __future__ import annotations

import argparse
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

from windlass.engine.core.messages import AllocateCache, LoadFailed, LoadShard, ProfileMemory, ShardLoaded
from windlass.engine.errors import LoadError
from windlass.engine.process_setup import configure_logging

_logger = logging.getLogger("windlass.engine")

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the first rank until it ends; the exit code is 0 only then."""
    parser = argparse.ArgumentParser(
        prog="windlass.engine.core.rank_process", description="internal: started by the engine"
    )
    for name in ("--fd", "--memory", "--store", "--parent"):
        parser.add_argument(name, type=int, required=True)
    options = parser.parse_args(argv)
    _die_with_parent(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(options.fd)
    try:
        first: LoadShard = pipe.recv()
        configure_logging(f"rank-{first.rank}", "warning")
        return _serve(pipe, first, options.memory, options.store)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        _logger.exception("a rank of the model failed")
        return 1


def _die_with_parent(parent: int) -> None:
    """Have the system kill this process when the parent dies; on a system that cannot, the closed pipe ends it."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(0)


def _serve(pipe: Connection, first: LoadShard, memory: int, store: int) -> int:
    from windlass.engine.core.ranks import RankShard  # imports torch

    try:
        shard = RankShard(first.config, first.rank, memory, store)
        pipe.send(ShardLoaded(shard.weight_bytes))
        message: AllocateCache | ProfileMemory = pipe.recv()
        if isinstance(message, ProfileMemory):
            pipe.send(shard.profile_memory())
            message = pipe.recv()
        assert isinstance(message, AllocateCache)
        shard.allocate_cache(message.plan, message.rotary_rows)
        pipe.send(ShardLoaded(shard.weight_bytes))
    except LoadError as error:
        pipe.send(LoadFailed(str(error)))
        return 1
    while True:
        shard.run(pipe.recv())


if __name__ == "__main__":
    sys.exit(main())
