"""How many replicas a deployment should have: what its replicas report of their caches, and what Ray makes of it."""

from __future__ import annotations

from typing import Any

from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext

from windlass.engine.interface.introspection import CacheSnapshot

CACHE_HELD = "cache_held"  # the name of the measure: the share of a replica's cache that running requests hold, 0 to 1
MOST_HELD = 0.8  # of all caches together; beyond that another replica helps before requests wait, or are computed twice


def cache_held(picture: CacheSnapshot) -> float:
    """The share of the fullest KV group that running requests hold. Pages that are only kept for later ones do not count."""
    return max((sum(group.held) + sum(group.shared)) / group.num_blocks for group in picture.groups)


def by_requests_and_cache(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """As many replicas as requests need, by Ray's own rule, or as hold what runs in MOST_HELD of their caches, if that is more.

    Called by Ray's controller, which then keeps to the bounds and the delays of the deployment.
    """
    wanted, state = replica_queue_length_autoscaling_policy(context)
    held = (context.aggregated_metrics or {}).get(CACHE_HELD, {})
    if held:
        # Of replicas that have not reported yet nothing is known: as full as the others, on average.
        wanted = max(wanted, context.current_num_replicas * sum(held.values()) / len(held) / MOST_HELD)
    return wanted, state
