"""Non-prefix KV reuse: an index of cached blocks by content, and the search for passages of a prompt in it.

A passage is a run of equal tokens at any offset. The hash of every cached block is stored, and those of all windows of
`block_size` tokens of a prompt are computed at once. Where two hashes and the tokens agree, the match is extended to the
left into preceding blocks and to the right into following ones, the last of them perhaps in part. So a passage is found
if it contains at least one whole block. The block manager attaches passages to sequences.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_CANDIDATES = 4  # blocks with one content, or after one block, that a search compares
_MAX_ALIKE = 64  # blocks with one content that are searched for one with a certain parent
_MAX_STEPS = 16_384  # blocks that one search compares
_STEPS_PER_BLOCK = 8  # blocks compared for each block that the searched tokens would fill
_MIN_STEPS = 2_048
_MAX_SCOPES = 8  # per block


@dataclass(frozen=True, slots=True)
class Passage:
    """Prompt tokens start .. end - 1 in consecutive cached blocks.

    digests: of these blocks. offset: of token `start` in the first block. position: at which the key of token `start` was
    rotated; positions are consecutive. blocks: per KV group, once a sequence holds them, to attach them when all tokens
    before are computed. num_repeated: tokens right before `start` that are computed although they are cached.
    """

    start: int
    end: int
    digests: tuple[bytes, ...]
    offset: int
    position: int
    blocks: tuple[tuple[int, ...], ...] = ()
    num_repeated: int = 0

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class PassageSearch:
    """Search for passages of at least `at_least` tokens in tokens start .. end - 1 of a prompt.

    spans: [start, end) of the prompt, without overlaps; each passage is within one of them. Empty: no such restriction.
    recompute: tokens at the start of each passage that are computed again, or their share of it if below 1. longest:
    tokens of prompt and output together. window: slots that the sequence may hold; None: no bound.
    """

    start: int
    end: int
    at_least: int
    spans: tuple[tuple[int, int], ...] = ()
    recompute: float = 0.0
    longest: int = 0
    window: int | None = None


@dataclass(frozen=True, slots=True)
class PassageRecord:
    """A block as stored in a `PassageIndex`, without its digest. scopes: in which it can be found."""

    parent: bytes
    position: int
    token_ids: tuple[int, ...]
    scopes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _Block:
    """digest: key in the cache. parent: digest of the block before it. position: at which its first key is stored."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    position: int
    content: int  # hash of token_ids


class _Scope:
    """The blocks that can be found together. The newest of one content, or of one parent, is the last in its dict."""

    __slots__ = ("blocks", "by_content", "by_parent")

    def __init__(self) -> None:
        self.blocks: dict[bytes, _Block] = {}
        self.by_content: dict[int, dict[bytes, _Block]] = {}
        self.by_parent: dict[bytes, dict[bytes, _Block]] = {}

    def add(self, block: _Block) -> None:
        self.blocks[block.digest] = block
        self.by_content.setdefault(block.content, {})[block.digest] = block
        self.by_parent.setdefault(block.parent, {})[block.digest] = block

    def remove(self, digest: bytes) -> None:
        block = self.blocks.pop(digest)
        alike = self.by_content[block.content]
        del alike[digest]
        if not alike:
            del self.by_content[block.content]
        siblings = self.by_parent[block.parent]
        del siblings[digest]
        if not siblings:
            del self.by_parent[block.parent]

    def predecessor(self, block: _Block) -> _Block | None:
        """The block that `block` follows, if it is in this scope and its positions end where those of `block` begin."""
        parent = self.blocks.get(block.parent)
        if parent is None or parent.position + len(parent.token_ids) != block.position:
            return None
        return parent

    def successors(self, block: _Block, content: int | None) -> Iterator[_Block]:
        """The newest blocks that follow `block` and continue its positions.

        content: hash of the wanted tokens, which selects among many following blocks.
        """
        found = self.by_parent.get(block.digest, {})
        if len(found) > _MAX_CANDIDATES and content is not None:
            alike = self.by_content.get(content, {})
            if len(alike) <= _MAX_ALIKE:
                found = {digest: one for digest, one in alike.items() if one.parent == block.digest} or found
        position = block.position + len(block.token_ids)
        return (one for one in itertools.islice(reversed(found.values()), _MAX_CANDIDATES) if one.position == position)


class PassageIndex:
    """Index of cached blocks by content, in scopes that are searched separately. block_size: tokens of each block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = _WindowHashes(block_size)
        self._scopes: dict[bytes, _Scope] = {}
        self._scopes_of: dict[bytes, dict[bytes, None]] = {}  # digest -> its scopes, the newest last

    def __len__(self) -> int:
        return len(self._scopes_of)

    def add(self, scope: bytes, digest: bytes, parent: bytes, token_ids: Sequence[int], position: int) -> None:
        """Add a full cached block to `scope`; adding it again changes nothing.

        digest: its key in the cache, which determines all other arguments. parent: digest of the block before it, or the
        root of its chain. position: at which its first key is stored. A block is retained in the `_MAX_SCOPES` scopes to
        which it was added last. Raises ValueError unless there are `block_size` tokens.
        """
        if len(token_ids) != self._block_size:
            raise ValueError(f"a block holds {self._block_size} tokens; got {len(token_ids)}")
        scopes = self._scopes_of.setdefault(digest, {})
        if scope in scopes:
            return
        if len(scopes) >= _MAX_SCOPES:
            self._remove_from_scope(next(iter(scopes)), digest)
        known = self._scopes[next(iter(scopes))].blocks[digest] if scopes else None
        scopes[scope] = None
        if known is None:
            known = _Block(digest, parent, tuple(token_ids), position, self._hashes.hash_block(token_ids))
        self._scopes.setdefault(scope, _Scope()).add(known)

    def scopes_of(self, digest: bytes) -> tuple[bytes, ...]:
        """The scopes in which a block can be found."""
        return tuple(self._scopes_of.get(digest, ()))

    def record_of(self, digest: bytes) -> PassageRecord | None:
        """The record of a block; None for one that is in no scope."""
        scopes = self.scopes_of(digest)
        if not scopes:
            return None
        block = self._scopes[scopes[0]].blocks[digest]
        return PassageRecord(block.parent, block.position, block.token_ids, scopes)

    def remove(self, digest: bytes) -> None:
        """Remove a block from all scopes, if it is in any."""
        for scope in self.scopes_of(digest):
            self._remove_from_scope(scope, digest)
        self._scopes_of.pop(digest, None)

    def _remove_from_scope(self, scope: bytes, digest: bytes) -> None:
        entries = self._scopes[scope]
        entries.remove(digest)
        if not entries.blocks:
            del self._scopes[scope]
        del self._scopes_of[digest][scope]

    def search(self, scope: bytes, token_ids: Sequence[int], search: PassageSearch) -> list[Passage]:
        """The passages of a prompt that are cached in `scope`, in order and without overlaps.

        From left to right, the longest passage is chosen among those that contain the first window found. The work is
        bounded: few blocks of one content are compared. At the bound, the passages found so far are returned.
        """
        entries = self._scopes.get(scope)
        if entries is None:
            return []
        start, end = search.start, search.end
        max_steps = min(_MAX_STEPS, _MIN_STEPS + max(0, end - start) // self._block_size * _STEPS_PER_BLOCK)
        searcher, found = _Searcher(entries, self._hashes, search.at_least, max_steps), list[Passage]()
        for low, high in sorted(search.spans) or [(start, end)]:
            first, last = max(start, low), min(end, high, len(token_ids))
            if last - first >= max(search.at_least, self._block_size):
                found += searcher.search(tuple(token_ids[first:last]), first)
        return found


class _Searcher:
    """Searches parts of a prompt in one scope, with at most `max_steps` comparisons in total."""

    def __init__(self, entries: _Scope, hashes: _WindowHashes, at_least: int, max_steps: int) -> None:
        self._entries, self._hashes, self._at_least, self._steps_left = entries, hashes, at_least, max_steps
        self._size = hashes.block_size

    def search(self, tokens: tuple[int, ...], first: int) -> Iterator[Passage]:
        """The passages in `tokens`, which begin at token `first` of the prompt. Other methods use indices into `tokens`."""
        self._tokens, self._first = tokens, first
        self._contents = contents = self._hashes.hash_windows(np.array(tokens, dtype=np.int64))
        by_content = self._entries.by_content
        begin = at = 0  # the earliest begin of a passage, and the current window
        tried: set[tuple[bytes, int]] = set()  # (block, index) in passages that are too short
        while at < len(contents):
            alike = by_content.get(contents[at])
            passage = None
            if alike is not None:
                if self._steps_left <= 0:
                    return
                passage = self._longest(alike, begin, at, tried)
            if passage is None:
                at += 1
            else:
                yield passage
                begin = at = passage.end - self._first
                tried.clear()

    def _longest(
        self, alike: dict[bytes, _Block], begin: int, at: int, tried: set[tuple[bytes, int]]
    ) -> Passage | None:
        """The longest passage that starts at or after `begin` and has one of these blocks at `at`; None: all too short."""
        best: tuple[int, int, list[_Block]] | None = None
        window = self._tokens[at : at + self._size]
        for block in itertools.islice(reversed(alike.values()), _MAX_CANDIDATES):
            self._steps_left -= 1
            if (block.digest, at) in tried or block.token_ids != window:
                continue
            start, predecessor = self._follow_left(block, begin, at)
            end, successors = self._follow_right(block, at, tried)
            if best is None or end - start > best[1] - best[0]:
                best = start, end, [*predecessor, block, *successors]
        if best is None or best[1] - best[0] < self._at_least:
            return None
        start, end, blocks = best
        offset = (start - at) % self._size
        digests = tuple([block.digest for block in blocks])
        return Passage(start + self._first, end + self._first, digests, offset, blocks[0].position + offset)

    def _follow_left(self, block: _Block, begin: int, at: int) -> tuple[int, list[_Block]]:
        """The start of the passage with `block` at `at`, and its blocks before that one."""
        blocks: list[_Block] = []
        while at > begin and self._steps_left > 0:
            parent = self._entries.predecessor(block)
            if parent is None:
                break
            self._steps_left -= 1
            low = max(begin, at - self._size)
            tail = parent.token_ids[self._size - (at - low) :]
            common = _common_length(tail[::-1], self._tokens[low:at][::-1])
            at -= common
            if common:
                blocks.append(parent)
            if common < self._size:
                break
            block = parent
        return at, blocks[::-1]

    def _follow_right(self, block: _Block, at: int, tried: set[tuple[bytes, int]]) -> tuple[int, list[_Block]]:
        """The end of the passage with `block` at `at`, and its blocks after that one."""
        size, tokens, contents = self._size, self._tokens, self._contents
        parents: dict[bytes, _Block] = {}
        end, last = at + size, block
        to_do = [(block, at + size)]  # (whole block that matches, its end)
        while to_do and self._steps_left > 0:
            one, stop = to_do.pop()
            tried.add((one.digest, stop - size))
            if stop > end:
                end, last = stop, one
            window = tokens[stop : stop + size]
            content = contents[stop] if stop < len(contents) else None
            for following in self._entries.successors(one, content) if window else ():
                self._steps_left -= 1
                if following.token_ids == window:
                    parents[following.digest] = one
                    to_do.append((following, stop + size))
                    continue
                common = _common_length(following.token_ids, window)
                if stop + common > end:
                    parents[following.digest] = one
                    end, last = stop + common, following
        blocks = []
        while last is not block:
            blocks.append(last)
            last = parents[last.digest]
        return end, blocks[::-1]


class _WindowHashes:
    """Hashes of windows of `block_size` tokens: a polynomial in a secret random number, modulo 2^64.

    Colliding tokens would make a search slower, never wrong, because tokens are compared as well.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        base = int.from_bytes(os.urandom(8), "little") | 1  # odd, so that it has an inverse
        self._base, self._inverse = np.uint64(base), np.uint64(pow(base, -1, 1 << 64))
        self._first_powers = [pow(base, i, 1 << 64) for i in range(block_size)]

    def hash_block(self, tokens: Sequence[int]) -> int:
        """The hash of a block's tokens."""
        return sum(token * power for token, power in zip(tokens, self._first_powers, strict=True)) % (1 << 64)

    def hash_windows(self, tokens: NDArray[np.int64]) -> list[int]:
        """The hash of each whole window, by its first token; uint64 arithmetic wraps."""
        length, size = len(tokens), self.block_size
        if length < size:
            return []
        sums = np.zeros(length + 1, dtype=np.uint64)
        (tokens.astype(np.uint64) * self._powers(self._base, length)).cumsum(out=sums[1:])
        hashes: list[int] = ((sums[size:] - sums[:-size]) * self._powers(self._inverse, length - size + 1)).tolist()
        return hashes

    @staticmethod
    def _powers(base: np.uint64, count: int) -> NDArray[np.uint64]:
        """base^0 .. base^(count - 1)"""
        powers = np.full(count, base, dtype=np.uint64)
        powers[0] = 1
        return powers.cumprod()


def _common_length(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """Number of equal tokens at the beginning of both."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))
