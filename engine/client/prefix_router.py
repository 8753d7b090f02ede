"""Prefix router: chooses the replica with the longest cached prefix, unless it is too busy.

Cached prefixes are not queried but tracked: the prompts sent to a replica, the oldest of which are dropped as its cache evicts
them. A replica is too busy for a prompt if it has more requests than the least busy one by more than one per TOKENS_PER_REQUEST
saved tokens, and by more than MAX_EXTRA_LOAD in any case. Ties go to the least busy replica, then to the least recently chosen.

Prefix keys are the same chain of digests as in the engine's prefix cache, over larger blocks; the root covers rotation,
attention rule, adapter and the caller's salt.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Generic, TypeVar

from windlass.engine.cache.prefix_cache import root_digest
from windlass.engine.errors import EngineError
from windlass.engine.interface.config import RotaryConfig
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rope_scaling import DISTANCE_KINDS, RopeScaling
from windlass.engine.rotary.rotary_policy import RopeUpdate, RotaryPlanner

K = TypeVar("K", bound=Hashable)

MAX_TRACKED_BLOCKS = 65_536  # of a replica, some 200 bytes each
MAX_EXTRA_LOAD = 8  # requests
TOKENS_PER_REQUEST = 64  # saved tokens that are worth waiting for one more request
MIN_KEY_BLOCK_TOKENS = 32  # a shorter prefix does not influence the choice
MAX_KEY_BLOCKS = 4096  # of a prompt that are compared
_MAX_CACHED_ROTATIONS = 256


@dataclass(slots=True)
class _TrackedPrefixes:
    """The blocks that one replica should have cached, least recently used first."""

    _most: int
    _blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    last_chosen: int = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks that are tracked. Bisection works because a block is dropped before its predecessors."""
        return bisect_left(digests, True, key=lambda digest: digest not in self._blocks)

    def add(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests[: self._most]):  # the first block last, so that it is dropped last
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)


class PrefixRouter(Generic[K]):
    """block_tokens: tokens per digest. most_blocks: capacity of a replica's cache; at most MAX_TRACKED_BLOCKS are tracked."""

    def __init__(self, block_tokens: int, most_blocks: int = MAX_TRACKED_BLOCKS) -> None:
        self._block_tokens = block_tokens
        self._most = max(1, min(most_blocks, MAX_TRACKED_BLOCKS))
        self._replicas: dict[K, _TrackedPrefixes] = {}
        self._choice_counter = count(1)

    @property
    def num_tracked_blocks(self) -> int:
        """Tracked blocks of all replicas."""
        return sum(map(len, self._replicas.values()))

    def choose(self, digests: Sequence[bytes], load: Mapping[K, int]) -> K:
        """Choose one of the replicas in `load`, which holds their numbers of requests. Raises ValueError if it is empty."""
        least = min(load.values())
        ranked = []
        for replica, requests in load.items():
            known = self._replicas.get(replica)
            matched = 0 if known is None else known.match(digests)
            ranked.append((-matched, requests, 0 if known is None else known.last_chosen, replica))
        ranked.sort(key=lambda one: one[:3])
        for matched, requests, _, replica in ranked:
            saved = -matched * self._block_tokens
            if requests - least <= min(MAX_EXTRA_LOAD, saved // TOKENS_PER_REQUEST):
                return replica
        raise AssertionError("the least busy replica is never too busy")

    def sent(self, replica: K, digests: Sequence[bytes]) -> None:
        """Record that a prompt was sent to this replica, which has it cached from now on."""
        known = self._replicas.setdefault(replica, _TrackedPrefixes(self._most))
        known.last_chosen = next(self._choice_counter)
        known.add(digests)

    def forget(self, replica: K) -> None:
        """Record that the cache of this replica is empty."""
        self._replicas.pop(replica, None)

    def retain_only(self, replicas: Sequence[K]) -> None:
        """Forget all other replicas."""
        for gone in self._replicas.keys() - set(replicas):
            del self._replicas[gone]


class PrefixKeys:
    """Prefix keys of one model's requests, one per `block_tokens` tokens. rotary: the engines' configuration."""

    def __init__(self, info: ModelInfo, rotary: RotaryConfig) -> None:
        self.block_tokens = -(-MIN_KEY_BLOCK_TOKENS // info.block_size) * info.block_size
        self._namespace = info.fingerprint.encode()
        self._planner = RotaryPlanner(info.rotary_groups, rotary.update, info.rotary_ladder, info.rotary_auto)
        self._info = info
        self._fingerprints = lru_cache(_MAX_CACHED_ROTATIONS)(self._resolve)

    def root(self, request: EngineRequest) -> bytes:
        """A digest that is equal for requests that can share prefixes. Invalid requests have a root too."""
        prompt, rule = len(request.prompt_token_ids), request.context
        window = None if rule.attention_window is None else (rule.attention_window, rule.attention_sinks)
        try:
            longest = min(prompt + request.sampling.max_tokens, self._info.size(rule).rotary_length)
            scaling = request.rope_scaling
            if not self._depends_on_length(scaling):
                prompt = longest = 1  # one cached entry for all lengths
            rotation = self._fingerprints(scaling, request.rope_update, request.rope_exact, prompt, longest)
        except (EngineError, ArithmeticError, TypeError):
            rotation = ()
        adapter = None if request.adapter is None else str(request.adapter).encode()
        return root_digest(self._namespace, rotation, 0, request.cache_salt, window, adapter)

    def of(self, request: EngineRequest) -> list[bytes]:
        """A key for each leading block of the prompt; equal keys mean equal prefixes. Empty for a short prompt."""
        return digest_chain(self.root(request), request.prompt_token_ids, self.block_tokens)

    def _depends_on_length(self, scaling: RopeScaling | None) -> bool:
        if self._planner.chooses(scaling):
            return True
        used = [group.scaling for group in self._planner.groups] + ([] if scaling is None else [scaling])
        return any(one.groups or one.depends_on_length or one.rope_type in DISTANCE_KINDS for one in used)

    def _resolve(
        self, scaling: RopeScaling | None, update: RopeUpdate | None, exact: bool, prompt: int, longest: int
    ) -> tuple[str, ...]:
        stage = self._planner.plan(longest, scaling, update, exact=exact).stage(prompt)
        return tuple(spec.fingerprint for spec in stage.specs)


def digest_chain(root: bytes, token_ids: Sequence[int], block_tokens: int) -> list[bytes]:
    """A digest of 16 bytes for each full block, which covers the root and all tokens up to the end of the block."""
    count = min(len(token_ids) // block_tokens, MAX_KEY_BLOCKS)
    if count == 0:
        return []
    try:
        data = memoryview(array("q", token_ids[: count * block_tokens])).cast("B")
    except (TypeError, OverflowError):
        return []  # invalid token ids: the engine will refuse them
    digest, size, chain = hashlib.sha256(root), 8 * block_tokens, []
    for start in range(0, count * size, size):
        digest.update(data[start : start + size])
        chain.append(digest.digest()[:16])
    return chain
