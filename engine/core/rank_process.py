"""Rank process: `python -m windlass.engine.core.rank_process`, started by `RankGroup`.

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

from windlass.engine.core.messages import AllocateCache, LoadShard, ProfileMemory, ShardFailed, ShardLoaded
from windlass.engine.errors import LoadError
from windlass.engine.process_setup import log_as_json, wants_json

_logger = logging.getLogger("windlass.engine")

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> int:
    """Serve the first rank until it is gone; the exit code is 0 only then."""
    parser = argparse.ArgumentParser(
        prog="windlass.engine.core.rank_process", description="internal: started by the engine"
    )
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--store", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--log-level", default="warning")
    options = parser.parse_args(argv)
    _end_with(options.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = Connection(options.fd)
    try:
        order: LoadShard = pipe.recv()
        if wants_json():
            log_as_json(f"rank-{order.rank}", options.log_level)
        else:
            logging.basicConfig(
                level=options.log_level.upper(),
                stream=sys.stderr,
                format="%(asctime)s %(levelname)s %(name)s: %(message)s",
            )
        return _serve(pipe, order, options.memory, options.store)
    except (EOFError, ConnectionError):
        return 0
    except Exception:
        _logger.exception("a rank of the model failed")
        return 1


def _end_with(parent: int) -> None:
    """Be killed when the parent dies, whatever it dies of; where the system cannot do that, the closed pipe has to do."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(0)


def _serve(pipe: Connection, order: LoadShard, memory: int, store: int) -> int:
    # Late, because it brings torch.
    from windlass.engine.core.ranks import RankShard

    try:
        part = RankShard(order.config, order.rank, memory, store)
        pipe.send(ShardLoaded(part.weight_bytes))
        pages: AllocateCache | ProfileMemory = pipe.recv()
        if isinstance(pages, ProfileMemory):
            pipe.send(part.profile_memory())
            pages = pipe.recv()
        assert isinstance(pages, AllocateCache)
        part.allocate_cache(pages.plan, pages.rotary_rows)
        pipe.send(ShardLoaded(part.weight_bytes))
    except LoadError as error:
        pipe.send(ShardFailed(str(error)))
        return 1
    while True:
        part.do(pipe.recv())


if __name__ == "__main__":
    sys.exit(main())
