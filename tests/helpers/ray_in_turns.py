"""`windlass` with a Ray router that sends requests to the replicas in turn, independent of prefixes. Run as a program."""

from __future__ import annotations

import sys
from itertools import count
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from windlass.server.startup.ray import application
from windlass.server.startup.ray import replica as routing


class InTurns(routing.PrefixRequestRouter):
    def initialize_state(self, **kwargs: Any) -> None:
        super().initialize_state(**kwargs)
        self._turns = count()
        self._turn_of: dict[str, int] = {}  # by request: Ray may query it more than once

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        ordered = sorted(candidate_replicas, key=lambda replica: replica.replica_id.unique_id)
        if not ordered:
            return []
        name = "" if pending_request is None else pending_request.metadata.request_id
        if name not in self._turn_of:
            self._turn_of[name] = next(self._turns)
        return [[ordered[self._turn_of[name] % len(ordered)]]]  # and no other, even if it is slow


if __name__ == "__main__":
    from helpers.ray_in_turns import InTurns as Chosen  # under a name that other processes can import

    from windlass.server.cli.main import main

    application.PrefixRequestRouter = Chosen  # type: ignore[misc]
    sys.argv[0] = "windlass"
    sys.exit(main())
