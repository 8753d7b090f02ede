"""Hash chain and search for the longest usable prefix, against brute force."""

from __future__ import annotations

import hashlib
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from windlass.engine.cache.prefix_cache import HashChain, block_digest, first_visible_block, longest_hit, root_digest


def test_root_digest_differs_in_every_part() -> None:
    roots = [
        root_digest(b"weights", ["a"], 0, None),
        root_digest(b"other", ["a"], 0, None),
        root_digest(b"weights", ["b"], 0, None),
        root_digest(b"weights", ["a", "a"], 0, None),
        root_digest(b"weightsa", [], 0, None),
        root_digest(b"weights", ["a"], 16, None),
        root_digest(b"weights", ["a"], 0, ""),
        root_digest(b"weights", ["a"], 0, "salt"),
        root_digest(b"weights", ["a-"], 0, None),
        root_digest(b"weights", ["a", "-"], 0, None),
        root_digest(b"weights", ["a"], 0, "\ud800"),  # a lone surrogate can arrive in JSON
    ]
    assert len(set(roots)) == len(roots)
    assert root_digest(b"weights", ["a"], 0, "salt") == root_digest(b"weights", iter(["a"]), 0, "salt")


def test_block_digest_is_sha256_of_parent_and_int64_tokens() -> None:
    ids = [1, 2**40, 0, 7]
    data = b"".join(i.to_bytes(8, "little", signed=True) for i in ids)
    assert block_digest(b"p" * 32, ids) == hashlib.sha256(b"p" * 32 + data).digest()


def test_chain_grows_only_by_full_blocks_and_hashes_each_once() -> None:
    class CountingList(list[int]):
        reads = 0

        def __getitem__(self, key):
            value = super().__getitem__(key)
            if isinstance(key, slice):
                CountingList.reads += len(value)
            return value

    tokens = CountingList()
    chain = HashChain(b"root", 4)
    for i in range(23):
        tokens.append(i)
        chain.extend(tokens, len(tokens))
        assert len(chain.digests) == len(tokens) // 4
    assert CountingList.reads == 20  # five blocks of four, none read twice
    at_once = HashChain(b"root", 4)
    at_once.extend(list(range(23)), 23)
    assert at_once.digests == chain.digests
    partly = HashChain(b"root", 4)
    partly.extend(list(range(23)), 11)
    assert partly.digests == chain.digests[:2]


def test_a_fork_shares_the_past_and_grows_separately() -> None:
    chain = HashChain(b"root", 2)
    chain.extend([1, 2, 3, 4], 4)
    child = chain.fork()
    child.extend([1, 2, 3, 4, 5, 6], 6)
    chain.extend([1, 2, 3, 4, 9, 9], 6)
    assert child.digests[:2] == chain.digests[:2]
    assert child.digests[2] != chain.digests[2]


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_common_blocks_is_the_length_of_the_shared_past(shared: int, left: int, right: int) -> None:
    one, two = HashChain(b"root", 2), HashChain(b"root", 2)
    a = [7] * (2 * shared) + [1] * (2 * left)
    b = [7] * (2 * shared) + [2] * (2 * right)
    one.extend(a, len(a))
    two.extend(b, len(b))
    assert one.common_blocks(two) == two.common_blocks(one) == shared


@given(st.integers(0, 60), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 8))
def test_first_visible_block_is_that_of_the_first_visible_key(p: int, window: int | None, block_size: int) -> None:
    visible = [j for j in range(p + 1) if window is None or p - j < window]
    assert first_visible_block(p, window, block_size) == visible[0] // block_size


@pytest.mark.slow
@settings(max_examples=300)
@example(3, [({0, 2}, 2), ({0, 1}, 2)], 1)  # the second group shortens what the first allowed
@given(
    st.integers(0, 9),
    st.lists(st.tuples(st.sets(st.integers(0, 8)), st.one_of(st.none(), st.integers(1, 14))), min_size=1, max_size=3),
    st.integers(1, 4),
)
def test_longest_hit_equals_brute_force(limit: int, groups: list[tuple[set[int], int | None]], block_size: int) -> None:
    digests = [bytes([i]) for i in range(9)]
    found = [({digests[i]: i for i in held}, window) for held, window in groups]

    def usable(n: int) -> bool:
        query = n * block_size
        return all(
            j // block_size in held
            for (held, window), j in itertools.product(groups, range(query))
            if window is None or query - j < window
        )

    expected = max(n for n in range(min(limit, 9) + 1) if usable(n))
    assert longest_hit(digests, limit, found, block_size) == expected
