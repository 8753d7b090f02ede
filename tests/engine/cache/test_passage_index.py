"""Passage index against a search that compares token by token; consistency of the index."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from helpers.cache_invariants import check_passages
from hypothesis import given, settings
from hypothesis import strategies as st

from windlass.engine.cache import non_prefix_reuse
from windlass.engine.cache.non_prefix_reuse import Passage, PassageIndex, PassageSearch
from windlass.engine.cache.prefix_cache import block_digest

SCOPE, OTHER = b"one", b"other"


@dataclass(frozen=True)
class Block:
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    position: int


def chain(tokens: Sequence[int], size: int, *, root: bytes = b"root", first_position: int = 0) -> list[Block]:
    """The full blocks of a sequence."""
    parent = hashlib.sha256(root + first_position.to_bytes(8, "little")).digest()
    blocks = []
    for start in range(0, len(tokens) - size + 1, size):
        ids = tuple(tokens[start : start + size])
        digest = block_digest(parent, ids)
        blocks.append(Block(digest, parent, ids, first_position + start))
        parent = digest
    return blocks


def add(index: PassageIndex, blocks: Sequence[Block], scope: bytes = SCOPE) -> None:
    for block in blocks:
        index.add(scope, block.digest, block.parent, block.token_ids, block.position)


def find(index: PassageIndex, prompt: Sequence[int], at_least: int, scope: bytes = SCOPE) -> list[Passage]:
    return index.search(scope, prompt, PassageSearch(0, len(prompt), at_least))


def assert_correct(passage: Passage, prompt: Sequence[int], blocks: Sequence[Block], size: int) -> None:
    """Check a passage: its tokens are equal, its blocks are consecutive and all needed."""
    by_digest = {block.digest: block for block in blocks}
    found = [by_digest[digest] for digest in passage.digests]
    tokens = [token for block in found for token in block.token_ids]
    length = passage.end - passage.start
    assert tokens[passage.offset : passage.offset + length] == list(prompt[passage.start : passage.end])
    assert 0 <= passage.offset < size and (len(found) - 1) * size < passage.offset + length <= len(found) * size
    assert passage.position == found[0].position + passage.offset
    for before, behind in itertools.pairwise(found):
        assert behind.parent == before.digest and behind.position == before.position + size


def cover(
    prompt: Sequence[int], blocks: Sequence[Block], size: int, at_least: int, start: int, end: int
) -> list[tuple[int, int]]:
    """(start, end) of the passages, found token by token in the graph of all blocks; those added last are preferred."""
    by_digest = {block.digest: block for block in blocks}

    def follows(behind: Block, before: Block | None) -> bool:
        return before is not None and behind.position == before.position + size

    def right(block: Block, offset: int, at: int) -> int:
        """End of a match that continues with this token of this block."""
        if at == end or prompt[at] != block.token_ids[offset]:
            return at
        if offset + 1 < size:
            return right(block, offset + 1, at + 1)
        behind = [one for one in blocks if one.parent == block.digest and follows(one, block)]
        return max([at + 1, *(right(one, 0, at + 1) for one in behind)])

    def left(block: Block, offset: int, at: int, begin: int) -> int:
        """Start of a match that has this token of this block at `at`."""
        before: Block | None = block
        if offset == 0:
            before, offset = by_digest.get(block.parent), size
            if not follows(block, before):
                return at
        if at == begin or prompt[at - 1] != before.token_ids[offset - 1]:
            return at
        return left(before, offset - 1, at - 1, begin)

    begin = at = start
    found = []
    while at + size <= end:
        best = (0, 0)
        for block in reversed(blocks):
            if list(block.token_ids) == list(prompt[at : at + size]):
                match = left(block, 0, at, begin), right(block, 0, at)
                if match[1] - match[0] > best[1] - best[0]:
                    best = match
        if best[1] - best[0] >= max(at_least, 1):
            found.append(best)
            begin = at = best[1]
        else:
            at += 1
    return found


Cache = tuple[int, list[Block], list[int]]


def make_cache(rng: random.Random) -> Cache:
    """A block size, cached blocks of a few chains with gaps, and a prompt that shares much with them."""
    size, kinds = rng.randint(1, 4), rng.randint(1, 4)
    texts = [[rng.randrange(kinds) for _ in range(rng.randint(0, 20))] for _ in range(rng.randint(1, 4))]
    texts += [[*rng.choice(texts)[: rng.randint(0, 20)], *(rng.randrange(kinds) for _ in range(6))]]
    blocks: dict[bytes, Block] = {}
    for text in texts:
        made = chain(text, size, first_position=rng.choice([0, 0, 5]))
        if len(made) > 1 and rng.random() < 0.5:
            # Computed after a shift: the same tokens after the same block, with another digest.
            at = rng.randint(1, len(made) - 1)
            apart = chain(text[at * size :], size, root=b"apart", first_position=rng.choice([at * size, 50]))
            parents = [made[at - 1].digest, *(block.digest for block in apart)]
            made += [
                Block(b.digest, parent, b.token_ids, b.position) for b, parent in zip(apart, parents, strict=False)
            ]
        blocks.update((block.digest, block) for block in made if block.digest not in blocks)
    kept = [block for block in blocks.values() if rng.random() < 0.85]
    prompt: list[int] = []
    for _ in range(rng.randint(0, 5)):
        text = rng.choice(texts)
        at = rng.randint(0, len(text))
        prompt += text[at : at + rng.randint(0, 20)]
        prompt += [rng.randrange(kinds) for _ in range(rng.randint(0, 2))]
    return size, kept, prompt


# Generated from a seed: individual draws would make most prompts and caches too small to share anything.
caches = st.integers(0, 2**32).map(random.Random).map(make_cache)


def _hash_by_sums(self, block_size: int) -> None:
    self.block_size, self._base, self._inverse = block_size, np.uint64(1), np.uint64(1)
    self._first_powers = [1] * block_size


@pytest.mark.slow
@settings(max_examples=300)
@given(caches, st.integers(0, 9), st.booleans(), st.data())
def test_search_equals_a_comparison_token_by_token(
    cache: Cache, at_least: int, weak: bool, data: st.DataObject
) -> None:
    size, blocks, prompt = cache
    other = [block for block in blocks if data.draw(st.booleans())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(non_prefix_reuse, "_MAX_CANDIDATES", 10_000)
        if weak:  # windows of the same tokens in any order then have one hash
            patch.setattr(non_prefix_reuse._WindowHashes, "__init__", _hash_by_sums)
        index = PassageIndex(size)
        add(index, blocks)
        add(index, other, OTHER)
        check_passages(index)
        start = data.draw(st.integers(0, len(prompt)))
        end = data.draw(st.integers(start, len(prompt)))
        for scope, present in ((SCOPE, blocks), (OTHER, other), (b"unknown", [])):
            found = index.search(scope, prompt, PassageSearch(start, end, at_least))
            for passage in found:
                assert_correct(passage, prompt, present, size)
            assert [(p.start, p.end) for p in found] == cover(prompt, present, size, at_least, start, end)
        edges = sorted(data.draw(st.lists(st.integers(0, len(prompt)), max_size=6)))
        spans = list(zip(edges[::2], edges[1::2], strict=False))
        if spans:
            shuffled = data.draw(st.permutations(spans))
            found = index.search(SCOPE, prompt, PassageSearch(start, end, at_least, tuple(shuffled)))
            wanted = [
                ends
                for low, high in spans
                for ends in cover(prompt, blocks, size, at_least, max(start, low), min(end, high))
            ]
            assert [(p.start, p.end) for p in found] == wanted


@given(caches, st.data())
def test_a_bounded_search_finds_only_true_passages(cache: Cache, data: st.DataObject) -> None:
    size, blocks, prompt = cache
    index = PassageIndex(size)
    add(index, blocks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(non_prefix_reuse, "_MAX_CANDIDATES", 1)
        patch.setattr(non_prefix_reuse, "_MAX_ALIKE", data.draw(st.sampled_from([0, 100])))
        patch.setattr(non_prefix_reuse, "_MAX_STEPS", data.draw(st.integers(0, 12)))
        found = find(index, prompt, 1)
    for passage in found:
        assert_correct(passage, prompt, blocks, size)
    assert all(before.end <= behind.start for before, behind in itertools.pairwise(found))


@given(caches, st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 11)), max_size=60))
def test_the_index_is_consistent_after_random_changes(cache: Cache, moves: list[tuple[bool, int, int]]) -> None:
    size, blocks, prompt = cache
    index = PassageIndex(size)
    present: dict[bytes, list[bytes]] = {}  # digest -> its scopes, the latest last
    for added, which, scope_number in moves:
        if not blocks:
            break
        block, scope = blocks[which % len(blocks)], b"%d" % scope_number
        if added:
            add(index, [block], scope)
            scopes = present.setdefault(block.digest, [])
            if scope not in scopes:
                present[block.digest] = [*scopes, scope][-8:]
        else:
            index.remove(block.digest)
            present.pop(block.digest, None)
        check_passages(index)
        assert len(index) == len(present) and all(
            bool(index.scopes_of(one.digest)) == (one.digest in present) for one in blocks
        )
    for block in blocks:
        for number in range(12):
            found = find(index, block.token_ids, size, b"%d" % number)
            assert any(p.digests == (block.digest,) for p in found) <= (b"%d" % number in present.get(block.digest, ()))
    for block in blocks:
        index.remove(block.digest)
    check_passages(index)
    assert len(index) == 0 and not find(index, prompt, 1)


def test_a_passage_may_start_and_end_within_blocks() -> None:
    index, size = PassageIndex(4), 4
    blocks = chain(range(100, 140), size, first_position=1000)
    add(index, blocks)
    prompt = [1, 2, 3, *range(106, 127), 4, 5]
    (passage,) = find(index, prompt, 16)
    assert passage == Passage(3, 24, tuple(b.digest for b in blocks[1:7]), 2, 1006)
    assert find(index, prompt, 22) == []
    (short,) = index.search(SCOPE, prompt, PassageSearch(5, 20, 8))
    assert (short.start, short.end, short.offset, short.position) == (5, 20, 0, 1008)


def test_a_passage_crosses_no_span_edge_and_no_position_jump() -> None:
    index, size = PassageIndex(4), 4
    blocks = chain(range(40), size)
    add(index, blocks[:5])
    moved = [Block(b.digest, b.parent, b.token_ids, b.position + 8) for b in blocks[5:]]  # after dropped tokens
    add(index, moved)
    assert [(p.start, p.end, p.position) for p in find(index, range(40), 8)] == [(0, 20, 0), (20, 40, 28)]
    spans = ((22, 35), (2, 15))
    found = index.search(SCOPE, range(40), PassageSearch(0, 40, 8, spans))
    assert [(p.start, p.end, p.position) for p in found] == [(2, 15, 2), (22, 35, 30)]
    assert index.search(SCOPE, range(40), PassageSearch(0, 40, 14, spans)) == []


@pytest.mark.parametrize("longer_first", [True, False])
def test_the_longest_of_several_continuations_is_found(longer_first: bool) -> None:
    index, size = PassageIndex(2), 2
    plain = chain([1, 2, 3, 4, 5, 6, 7, 8], size)
    other = [
        Block(b"3", plain[0].digest, (3, 4), 2),  # as after a shift: equal tokens after the same block
        Block(b"4", b"3", (5, 9), 4),
    ]
    add(index, plain[:1])
    for blocks in (plain[1:], other) if longer_first else (other, plain[1:]):
        add(index, blocks)
    assert find(index, range(1, 9), 1) == [Passage(0, 8, tuple(b.digest for b in plain), 0, 0)]


def test_the_right_one_of_many_equal_blocks_is_found() -> None:
    """A system prompt continued by a thousand chats: the next full block is found by its content."""
    index, size = PassageIndex(4), 4
    head = list(range(8))
    chats = [[*head, *(1000 + chat, 2000, 2001, 2002), *range(50, 54)] for chat in range(1000)]
    for chat in chats:
        add(index, chain(chat, size))
    for chat in (chats[0], chats[500], chats[999]):
        (passage,) = find(index, chat, 8)
        assert (passage.start, passage.end) == (0, 16)
        assert_correct(passage, chat, chain(chat, size), size)
    # A partial last block is searched in the newest chats only.
    assert [(p.start, p.end) for p in find(index, [*head, 1999, 2000], 4)] == [(0, 10)]
    assert [(p.start, p.end) for p in find(index, [*head, 1000, 2000], 4)] == [(0, 8)]


def test_repetitive_text_needs_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    index, size = PassageIndex(16), 16
    blocks = chain([7] * 16_000, size)
    add(index, blocks)
    lookups = 0
    successors = non_prefix_reuse._Scope.successors

    def counting(self, block, content):
        nonlocal lookups
        lookups += 1
        return successors(self, block, content)

    monkeypatch.setattr(non_prefix_reuse._Scope, "successors", counting)
    prompt = [7] * 100_000
    found = find(index, prompt, 64)
    for passage in found:
        assert_correct(passage, prompt, blocks, size)
    assert found and lookups <= 20_000
    lookups = 0
    assert find(index, prompt, 100_000) == []
    assert lookups <= 20_000


def test_a_block_of_another_length_is_refused() -> None:
    index = PassageIndex(4)
    with pytest.raises(ValueError, match="a block holds 4 tokens; got 3"):
        index.add(SCOPE, b"d", b"p", [1, 2, 3], 0)
