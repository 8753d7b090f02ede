"""Prefix cache lookup: a hash chain over blocks of token ids, and the longest cached prefix.

Equal digests mean equal keys and values. `BlockKey` names a block of one KV group by its digest.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple


def root_digest(
    namespace: bytes,
    fingerprints: Iterable[str],
    first_position: int,
    cache_salt: str | None,
    seen: tuple[int, int] | None = None,
    adapter: bytes | None = None,
) -> bytes:
    """Digest from which a chain starts: everything that a key or value depends on, except the tokens.

    namespace: digest of weights, dtypes and layout version. fingerprints: of the rotary specs, one per rotary group.
    seen: attention window and sinks of a request that sets its own. adapter: identity of the request's adapter.
    Every part is preceded by its length, so different inputs never give the same bytes.
    """
    digest = hashlib.sha256(b"windlass prefix chain 1")
    salt = b"-" if cache_salt is None else b"+" + cache_salt.encode("utf-8", "surrogatepass")
    encoded_fingerprints = [fingerprint.encode() for fingerprint in fingerprints]
    rule = () if seen is None else (struct.pack("<qq", *seen), *([b"sinks in every window"] if seen[1] else []))
    if adapter is not None:
        rule = (*rule, b"adapter", adapter)
    for part in (
        namespace,
        struct.pack("<qq", first_position, len(encoded_fingerprints)),
        *encoded_fingerprints,
        salt,
        *rule,
    ):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def second_keys_root(root: bytes) -> bytes:
    """The root of the second key copy of the same tokens."""
    return hashlib.sha256(b"windlass far keys 1" + root).digest()


def block_digest(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Digest of a full block: sha256 over the parent's digest and the token ids as little-endian int64."""
    return hashlib.sha256(parent + struct.pack(f"<{len(token_ids)}q", *token_ids)).digest()


def shifted_digest(
    parent: bytes, numbers: Sequence[int], token_ids: Sequence[int], digests: Iterable[bytes] = ()
) -> bytes:
    """Digest of tokens computed after a shift or a reuse, which no plain chain contains.

    numbers: positions of the shifted or reused keys. digests: of the reused blocks.
    """
    moved = hashlib.sha256(b"windlass moved keys 1" + parent)
    for part in (numbers, token_ids):
        moved.update(struct.pack(f"<{1 + len(part)}q", len(part), *part))
    for digest in digests:
        moved.update(digest)
    return moved.digest()


class HashChain:
    """The digests of one sequence's full blocks, extended as tokens arrive so that no block is hashed twice.

    Equal digests at one index mean equal digests at every earlier index, because each covers its parent.
    scope: in which the blocks can be found as passages; None: in none.
    """

    __slots__ = ("block_size", "digests", "root", "scope")

    def __init__(self, root: bytes, block_size: int, scope: bytes | None = None) -> None:
        self.root = root
        self.block_size = block_size
        self.scope = scope
        self.digests: list[bytes] = []

    def extend(self, token_ids: Sequence[int], num_tokens: int) -> None:
        """Hash the blocks of `token_ids[:num_tokens]` that are full and not hashed yet."""
        size = self.block_size
        for start in range(len(self.digests) * size, num_tokens - size + 1, size):
            parent = self.digests[-1] if self.digests else self.root
            self.digests.append(block_digest(parent, token_ids[start : start + size]))

    def fork(self) -> HashChain:
        """A copy that grows independently."""
        child = HashChain(self.root, self.block_size, self.scope)
        child.digests = list(self.digests)
        return child

    def common_blocks(self, other: HashChain) -> int:
        """Number of leading blocks both chains have in common, by bisection."""
        blocks = range(min(len(self.digests), len(other.digests)))
        return bisect_left(blocks, True, key=lambda index: self.digests[index] != other.digests[index])


def first_visible_block(num_computed_tokens: int, window: int | None, block_size: int) -> int:
    """First logical block that the query after `num_computed_tokens` tokens can see.

    That query is at index p = num_computed_tokens and sees keys p - window + 1 .. p. Later queries see no earlier key.
    """
    if window is None:
        return 0
    return max(0, num_computed_tokens - window + 1) // block_size


def longest_hit(
    digests: Sequence[bytes],
    limit: int,
    groups: Sequence[tuple[Container[bytes], int | None]],
    block_size: int,
) -> int:
    """The largest n <= limit such that the first n blocks can be taken from the cache.

    groups: per KV group the digests of its cached blocks and its window. A group without a window must hold all of
    blocks 0 .. n-1; a group with a window only those that the next query, at token n * block_size, can see.
    """
    n = min(limit, len(digests))
    for cached, window in groups:
        if window is None:
            n = next((i for i in range(n) if digests[i] not in cached), n)
    windowed = [(cached, window) for cached, window in groups if window is not None]
    settled = False
    while not settled:
        settled = True
        for cached, window in windowed:
            while n > 0:
                # A block missing at j rules out every n in j+1 .. n, since each of those sees block j as well.
                low = first_visible_block(n * block_size, window, block_size)
                missing = next((j for j in range(n - 1, low - 1, -1) if digests[j] not in cached), None)
                if missing is None:
                    break
                n = missing
                settled = False
    return n


class BlockKey(NamedTuple):
    """A block of one KV group. digest: as in `HashChain`."""

    group: int
    digest: bytes
