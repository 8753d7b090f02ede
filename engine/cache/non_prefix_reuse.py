"""Non-prefix KV reuse: an index of cached blocks by content, and the search for passages of a prompt in it.

A passage is a run of equal tokens at any offset. A window of `block_size` tokens has a hash; that of every cached block is known, and those of all windows of a prompt are computed at once. Where two hashes and the tokens agree, the match is extended to the left into preceding blocks and to the right into following ones, the last perhaps in part. So a passage is found if it contains at least one whole block. `block_manager.hold_passages` attaches passages to a sequence.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MAX_CANDIDATES = 4  # blocks of one content, or behind one block, that a search looks at

_MAX_ALIKE = 64  # blocks of one content among which one with a certain parent is looked for

_MAX_STEPS = 16_384  # blocks that one search compares

_STEPS_PER_BLOCK = 8  # of them, for each block that the searched tokens would fill

_MIN_STEPS = 2_048

_MAX_SCOPES = 8  # in which one block may be found


@dataclass(frozen=True, slots=True)
class Passage:
    """Prompt tokens start .. end - 1 stand in cached blocks that follow one another.

    digests: of these blocks. offset: of token `start` in the first of them. position: at which the key of token `start` is
    stored; those of the others follow one by one.
    """

    start: int
    end: int
    digests: tuple[bytes, ...]
    offset: int
    position: int


@dataclass(frozen=True, slots=True)
class _Block:
    """digest: its key in the cache. parent: that of the block before it. position: at which its first key is stored."""

    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    position: int
    content: int  # hash of token_ids


class _Scope:
    """The blocks that may be found together. The newest of one content, or of one parent, stand last in their dict."""

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
        """The block that `block` follows, if it is here and its keys stand right before."""
        parent = self.blocks.get(block.parent)
        if parent is None or parent.position + len(parent.token_ids) != block.position:
            return None
        return parent

    def successors(self, block: _Block, content: int | None) -> Iterator[_Block]:
        """The newest blocks that follow `block` and whose keys stand right behind it.

        content: hash of the tokens that are looked for, so that one of few such is found among many that follow.
        """
        found = self.by_parent.get(block.digest, {})
        if len(found) > _MAX_CANDIDATES and content is not None:
            alike = self.by_content.get(content, {})
            if len(alike) <= _MAX_ALIKE:
                found = {digest: one for digest, one in alike.items() if one.parent == block.digest} or found
        position = block.position + len(block.token_ids)
        return (one for one in itertools.islice(reversed(found.values()), _MAX_CANDIDATES) if one.position == position)


class PassageIndex:
    """block_size: tokens of each block."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes = _WindowHashes(block_size)
        self._scopes: dict[bytes, _Scope] = {}
        self._scopes_of: dict[bytes, dict[bytes, None]] = {}  # digest -> in which it is found, the newest last

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._scopes_of)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._scopes_of

    def add(self, scope: bytes, digest: bytes, parent: bytes, token_ids: Sequence[int], position: int) -> None:
        """Let a full cached block be found in `scope`; to add it again changes nothing.

        digest: its key in the cache, which stands for its keys and so for all else that is said here. parent: that of the
        block before it, or the root of its chain. position: at which its first key is stored. A block is found in a few
        scopes only, those it was added to last.
        """
        if len(token_ids) != self._block_size:
            raise ValueError(f"a block of {self._block_size} tokens was said to hold {len(token_ids)}")
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
        """In which a block is found."""
        return tuple(self._scopes_of.get(digest, ()))

    def recorded(self, digest: bytes) -> tuple[bytes, int, tuple[int, ...]] | None:
        """Parent, position and tokens, as `add` was told them; None of a block that is not found anywhere."""
        for scope in self._scopes_of.get(digest, ()):
            block = self._scopes[scope].blocks[digest]
            return block.parent, block.position, block.token_ids
        return None

    def remove(self, digest: bytes) -> None:
        """Let a block be found no more; one that never could is none of ours."""
        for scope in list(self._scopes_of.get(digest, ())):
            self._remove_from_scope(scope, digest)
        self._scopes_of.pop(digest, None)

    def _remove_from_scope(self, scope: bytes, digest: bytes) -> None:
        entries = self._scopes[scope]
        entries.remove(digest)
        if not entries.blocks:
            del self._scopes[scope]
        del self._scopes_of[digest][scope]

    def search(
        self,
        scope: bytes,
        token_ids: Sequence[int],
        *,
        start: int,
        end: int,
        at_least: int,
        spans: Sequence[tuple[int, int]] = (),
    ) -> list[Passage]:
        """Passages of at least `at_least` tokens in tokens start .. end - 1 of a prompt; in order, none overlaps another.

        spans: [start, end) of the prompt, none overlapping another; a passage lies in one of them. None: it may lie
        anywhere. From left to right, the longest passage is taken of those that hold the first window found. The work has a
        bound: few blocks of one content are looked at, and where it is reached the passages found by then are returned.
        """
        entries = self._scopes.get(scope)
        if entries is None:
            return []
        steps = _StepBudget(min(_MAX_STEPS, _MIN_STEPS + max(0, end - start) // self._block_size * _STEPS_PER_BLOCK))
        found: list[Passage] = []
        for low, high in sorted(spans) or [(start, end)]:
            first, last = max(start, low), min(end, high, len(token_ids))
            if last - first >= max(at_least, self._block_size):
                tokens = tuple(token_ids[first:last])
                found += _Search(entries, tokens, self._hashes, first, at_least, steps).run()
        return found

    def check(self) -> None:
        """Raise AssertionError unless every block is in every book exactly as it should be."""
        seen: dict[bytes, set[bytes]] = {}
        for name, entries in self._scopes.items():
            assert entries.blocks, "an empty scope is kept"
            for digest, block in entries.blocks.items():
                assert block.digest == digest, "a block has another's digest"
                assert entries.by_content[block.content][digest] is block, "a block is not found by its content"
                assert entries.by_parent[block.parent][digest] is block, "a block is not found by its parent"
                seen.setdefault(digest, set()).add(name)
            for books in (entries.by_content, entries.by_parent):
                assert all(books.values()), "an empty list of blocks is kept"
                assert sum(map(len, books.values())) == len(entries.blocks), "a list holds a block that is gone"
        assert seen == {digest: set(scopes) for digest, scopes in self._scopes_of.items()}, "scopes and blocks differ"


@dataclass(slots=True)
class _StepBudget:
    """What a search may still do."""

    left: int


class _Search:
    """One search in `tokens`, which begin at token `first` of the prompt. Indices below are those into `tokens`."""

    def __init__(
        self,
        entries: _Scope,
        tokens: tuple[int, ...],
        hashes: _WindowHashes,
        first: int,
        at_least: int,
        steps: _StepBudget,
    ) -> None:
        self._entries, self._tokens, self._first, self._at_least, self._steps = entries, tokens, first, at_least, steps
        self._size = hashes.block_size
        self._contents = hashes.hash_windows(np.array(tokens, dtype=np.int64))

    def run(self) -> Iterator[Passage]:
        contents, by_content = self._contents, self._entries.by_content
        begin = at = 0  # where a passage may begin, and the window that is looked at
        tried: set[tuple[bytes, int]] = set()  # blocks that lie in passages which are too short, and where
        while at < len(contents):
            alike = by_content.get(contents[at])
            passage = None
            if alike is not None:
                if self._steps.left <= 0:
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
        """The longest passage, not before `begin`, with one of these blocks at `at`; None if all are too short."""
        best: tuple[int, int, list[_Block]] | None = None
        window = self._tokens[at : at + self._size]
        for block in itertools.islice(reversed(alike.values()), _MAX_CANDIDATES):
            self._steps.left -= 1
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
        """Where the passage with `block` at `at` begins, and its blocks before that one."""
        blocks: list[_Block] = []
        while at > begin and self._steps.left > 0:
            parent = self._entries.predecessor(block)
            if parent is None:
                break
            self._steps.left -= 1
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
        """Where the passage with `block` at `at` ends, and its blocks behind that one."""
        size, tokens, contents = self._size, self._tokens, self._contents
        parents: dict[bytes, _Block] = {}
        end, last = at + size, block
        to_do = [(block, at + size)]  # whole blocks that match, and where they end
        while to_do and self._steps.left > 0:
            one, stop = to_do.pop()
            tried.add((one.digest, stop - size))
            if stop > end:
                end, last = stop, one
            window = tokens[stop : stop + size]
            content = contents[stop] if stop < len(contents) else None
            for following in self._entries.successors(one, content) if window else ():
                self._steps.left -= 1
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
    """Hashes of windows of `block_size` tokens: a polynomial in a number nobody knows, modulo 2^64.

    Whoever could choose tokens that collide would make a search slower, never wrong: tokens are compared.
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
        """The hash of the window that begins at each token, as far as there are whole ones; uint64 arithmetic wraps."""
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
    """Equal tokens at the beginning of both."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(left), len(right)))


@dataclass(frozen=True, slots=True)
class PassageRecord:
    """What `PassageIndex.add` is told of a block. scopes: in which it may be found."""

    parent: bytes
    position: int
    token_ids: tuple[int, ...]
    scopes: tuple[bytes, ...]


def passage_of(passages: PassageIndex, digest: bytes) -> PassageRecord | None:
    """What an index knows of a block."""
    entry = passages.recorded(digest)
    return None if entry is None else PassageRecord(*entry, passages.scopes_of(digest))
