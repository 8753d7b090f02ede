"""Autoscaling by requests and cache use, without a cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is an extra: pip install -e '.[ray]'")

from ray.serve.config import AutoscalingConfig

from windlass.engine.errors import EngineDeadError
from windlass.engine.interface.introspection import CacheGroupSnapshot, CacheQuery, CacheSnapshot
from windlass.server.startup.ray import replica
from windlass.server.startup.ray.replica import EngineReplica


@dataclass
class Context:
    """The part of Ray's context that is read."""

    current_num_replicas: int
    total_num_requests: float
    aggregated_metrics: dict[str, dict[str, float]] | None
    target_num_replicas: int = 2
    policy_state: dict[str, Any] = field(default_factory=dict)
    config: AutoscalingConfig = field(
        default_factory=lambda: AutoscalingConfig(min_replicas=1, max_replicas=8, target_ongoing_requests=4)
    )


@pytest.mark.parametrize(
    ("replicas", "requests", "held", "wanted"),
    [
        (2, 8.0, None, 2.0),  # without metrics
        (2, 12.0, {"a": 0.1, "b": 0.1}, 3.0),  # requests need more than caches
        (2, 4.0, {"a": 0.8, "b": 0.8}, 2.0),  # caches need more than requests
        (2, 4.0, {"a": 1.0, "b": 1.0}, 2.5),
        (3, 3.0, {"a": 0.8, "b": 0.8}, 3.0),  # the third has not reported
        (2, 0.0, {"a": 0.0, "b": 0.0}, 0.0),  # Ray applies the bounds
        (0, 0.0, {}, 2.0),
    ],
)
def test_the_larger_demand_decides(
    replicas: int, requests: float, held: dict[str, float] | None, wanted: float
) -> None:
    context: Any = Context(replicas, requests, None if held is None else {replica.CACHE_HELD: held})
    assert replica.scale_by_requests_and_cache(context)[0] == pytest.approx(wanted)


def group(held: int, shared: int, idle: int, blocks: int) -> CacheGroupSnapshot:
    return CacheGroupSnapshot(blocks, blocks, 1, None, (held, 0), (0, shared), (idle, 0), (0,))


def test_cached_blocks_without_requests_do_not_count() -> None:
    snapshot = CacheSnapshot(32, (group(2, 1, 9, 12), group(5, 0, 0, 10)), (), 0.0)
    assert replica.cache_held(snapshot) == 0.5


def test_the_cache_is_inspected_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    class Client:
        inspections = 0

        async def inspect(self, query: object) -> CacheSnapshot:
            assert isinstance(query, CacheQuery)
            self.inspections += 1
            if self.inspections == 2:
                raise EngineDeadError("it restarts")
            return CacheSnapshot(32, (group(3, 0, 0, 4 * self.inspections),), (), 0.0)

    one, client, now = EngineReplica.__new__(EngineReplica), Client(), [100.0]
    one._client, one._held, one._next_poll = client, 0.0, 0.0  # type: ignore[assignment]
    monkeypatch.setattr(replica.time, "monotonic", lambda: now[0])

    def reported() -> float:
        return asyncio.run(one.record_autoscaling_stats())[replica.CACHE_HELD]

    assert reported() == 0.75 and client.inspections == 1
    now[0] += replica.POLL_SECONDS / 2
    assert reported() == 0.75 and client.inspections == 1
    now[0] += replica.POLL_SECONDS / 2
    assert reported() == 0.75 and client.inspections == 2  # the engine was dead
    now[0] += replica.POLL_SECONDS
    assert reported() == 0.25 and client.inspections == 3
