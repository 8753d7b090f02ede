"""Which replica of a deployment a request goes to: the same choice as among the engines of one machine.

A `RequestRouter` of Ray Serve, which runs wherever a handle of the deployment is used, in an event loop of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from windlass.engine.client.prefix_router import PrefixRouter
from windlass.server.startup.ray.call import ReplicaCall


class PrefixRequestRouter(RequestRouter):
    """The longest cached prefix wins, unless its replica is too busy; what is no `ReplicaCall` goes to the least busy."""

    def initialize_state(self, block_tokens: int = 32, **kwargs: Any) -> None:
        """block_tokens: of a call's digests. Raises TypeError for anything else."""
        if kwargs:
            raise TypeError(f"unknown: {', '.join(kwargs)}")
        self._block_tokens = block_tokens
        self._prefixes: PrefixRouter[ReplicaID] | None = None
        self._requests: dict[ReplicaID, int] = {}

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica that is chosen, and behind it the others, the least busy first."""
        call = _call_of(pending_request)
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all of them are full
        load = {replica_id: self._requests.get(replica_id, 0) for replica_id in by_id}
        ranked = sorted(by_id, key=lambda replica_id: load[replica_id])
        if call is None or not ranked:
            return [[by_id[replica_id]] for replica_id in ranked]
        open_to_it = {one: requests for one, requests in load.items() if one.unique_id not in call.avoid} or load
        router = self._router(call)
        chosen = router.choose(call.digests, open_to_it)
        router.sent(chosen, call.digests)  # now, so that whoever comes meanwhile finds it there
        others = [one for one in ranked if one != chosen and one in open_to_it]
        return [[by_id[replica_id]] for replica_id in (chosen, *others)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica has taken it, which may be another than was chosen first."""
        if (call := _call_of(pending_request)) is not None:
            self._router(call).sent(replica_id, call.digests)

    # How many requests each replica has: what Serve itself counts, which it forgets where it hears nothing new for a while.
    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._requests[replica_id] = self._requests.get(replica_id, 0) + 1

    def decrement_queue_len_cache(self, replica_id: ReplicaID) -> None:
        super().decrement_queue_len_cache(replica_id)
        self._requests[replica_id] = max(0, self._requests.get(replica_id, 0) - 1)

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._requests[replica_id] = num_ongoing_requests

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._keep_only([replica.replica_id for replica in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._keep_only(list(self.curr_replicas))

    def _keep_only(self, replica_ids: Sequence[ReplicaID]) -> None:
        kept = set(replica_ids)
        self._requests = {one: requests for one, requests in self._requests.items() if one in kept}
        if self._prefixes is not None:
            self._prefixes.retain_only(replica_ids)

    def _router(self, call: ReplicaCall) -> PrefixRouter[ReplicaID]:
        if self._prefixes is None:
            self._prefixes = PrefixRouter(self._block_tokens, call.most_blocks)
        return self._prefixes


def _call_of(pending_request: PendingRequest | None) -> ReplicaCall | None:
    found = pending_request.args[0] if pending_request is not None and pending_request.args else None
    return found if isinstance(found, ReplicaCall) else None
