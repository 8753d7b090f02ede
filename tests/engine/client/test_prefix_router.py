"""Routing to replicas: prefixes, load, limits of memory, and hit rates."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.engine.cache.prefix_cache import HashChain
from windlass.engine.client.prefix_router import MAX_EXTRA_LOAD, PrefixRouter, digest_chain

BLOCK = 32


def digests(*token_ids: int, root: bytes = b"root") -> list[bytes]:
    return digest_chain(root, list(token_ids), BLOCK)


def prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=length)


def test_longest_prefix_wins() -> None:
    router: PrefixRouter[str] = PrefixRouter(BLOCK)
    first, second = prompt(1, 320), prompt(2, 320)
    router.sent("a", digests(*first))
    router.sent("b", digests(*first[:160], *second[160:]))
    idle = {"a": 0, "b": 0}
    assert router.choose(digests(*first, 7, 7), idle) == "a"
    assert router.choose(digests(*first[:160], *second[160:]), idle) == "b"
    assert router.choose(digests(*first[:100]), {"a": 1, "b": 0}) == "b"  # the less busy of both that have it
    assert router.choose(digests(*first, root=b"another adapter"), {"a": 1, "b": 0}) == "b"


def test_overloaded_replica_is_not_chosen() -> None:
    router: PrefixRouter[str] = PrefixRouter(BLOCK)
    known = digests(*prompt(1, 256))
    router.sent("a", known)
    assert router.choose(known, {"a": 4, "b": 0}) == "a"  # 256 tokens outweigh four requests
    assert router.choose(known, {"a": 5, "b": 0}) == "b"
    router.sent("a", long := digests(*prompt(2, 64 * 100)))
    assert router.choose(long, {"a": MAX_EXTRA_LOAD, "b": 0}) == "a"
    assert router.choose(long, {"a": MAX_EXTRA_LOAD + 1, "b": 0}) == "b"
    assert router.choose(long, {"a": MAX_EXTRA_LOAD + 50, "b": 50}) == "a"  # the difference in load counts


def test_requests_without_a_prefix_are_distributed() -> None:
    router: PrefixRouter[int] = PrefixRouter(BLOCK)
    chosen = []
    for number in range(9):
        chosen.append(router.choose([], dict.fromkeys(range(3), 0)))
        router.sent(chosen[-1], digests(*prompt(number, 8)))
    assert sorted(chosen) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    with pytest.raises(ValueError):
        router.choose([], {})


def test_restarted_replica_has_no_prefixes() -> None:
    router: PrefixRouter[str] = PrefixRouter(BLOCK)
    known = digests(*prompt(1, 320))
    router.sent("a", known)
    router.forget("a")
    assert router.choose(known, {"a": 1, "b": 0}) == "b"
    router.sent("a", known)
    router.retain_only(["b"])
    assert router.choose(known, {"a": 1, "b": 0}) == "b" and router.num_tracked_blocks == 0


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 4)), max_size=60), st.integers(1, 20))
def test_stored_prefixes_are_limited_and_contiguous(prompts: list[tuple[int, int, int]], most: int) -> None:
    """A block is stored only with those before it, which bisection requires."""
    router: PrefixRouter[int] = PrefixRouter(1, most)
    for stem, shared, tail in prompts:
        router.sent(0, digest_chain(b"", [stem] * shared + [100 + stem] * tail, 1))
        assert router.num_tracked_blocks <= most
        blocks = router._replicas[0]._blocks
        for stem, shared, tail in prompts:
            found = [digest in blocks for digest in digest_chain(b"", [stem] * shared + [100 + stem] * tail, 1)]
            assert found == sorted(found, reverse=True)
            assert router._replicas[0].match(digest_chain(b"", [stem] * shared + [100 + stem] * tail, 1)) == sum(found)


class Cache:
    """A prefix cache of limited size with the engine's chain of digests, which evicts the oldest blocks first."""

    def __init__(self, blocks: int) -> None:
        self._held: OrderedDict[bytes, None] = OrderedDict()
        self._blocks = blocks
        self.hits = self.asked = 0

    def run(self, token_ids: list[int]) -> None:
        own = HashChain(b"root", 16)
        own.extend(token_ids, len(token_ids))
        self.asked += len(token_ids)
        self.hits += 16 * sum(1 for _ in itertools.takewhile(self._held.__contains__, own.digests))
        for digest in reversed(own.digests):
            self._held[digest] = None
            self._held.move_to_end(digest)
        while len(self._held) > self._blocks:
            self._held.popitem(last=False)


def workload() -> list[list[int]]:
    """Twelve documents with two requests each on average."""
    rng = random.Random(5)
    documents = [prompt(number, 480) for number in range(12)]
    return [rng.choice(documents) + prompt(1000 + number, 20) for number in range(26)]


def hit_rate(replicas: int, *, by_prefix: bool) -> float:
    caches = [Cache(4000) for _ in range(replicas)]
    router: PrefixRouter[int] = PrefixRouter(BLOCK, 4000 * 16 // BLOCK)
    rng, running = random.Random(6), [0] * replicas
    for number, token_ids in enumerate(workload()):
        found = digests(*token_ids)
        chosen = router.choose(found, dict(enumerate(running))) if by_prefix else number % replicas
        router.sent(chosen, found)
        caches[chosen].run(token_ids)
        running[chosen] += 1
        running = [max(0, requests - rng.randrange(2)) for requests in running]
    return sum(cache.hits for cache in caches) / sum(cache.asked for cache in caches)


def test_hit_rates_over_replicas() -> None:
    alone = hit_rate(1, by_prefix=True)
    assert alone > 0.4
    assert hit_rate(4, by_prefix=True) >= 0.9 * alone
    assert hit_rate(4, by_prefix=False) <= 0.55 * alone
