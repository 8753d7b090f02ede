"""What the beginning of a request is called: the keys under which engines cache it, in pieces coarse enough to route by.

The same chain of digests as in the engine's prefix cache, over larger blocks: its root covers the rotation, the attention
rule, the adapter and the caller's salt. Knows no engines and no text.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

from windlass.engine.api.config import RotaryConfig
from windlass.engine.api.context_size import context_sizes_of
from windlass.engine.api.request import EngineRequest, ModelInfo
from windlass.engine.cache.prefix import root_digest
from windlass.engine.errors import EngineError
from windlass.engine.rotary.policy import RopeUpdate, RotaryPlanner
from windlass.engine.rotary.scaling import DISTANCE_KINDS, RopeScaling

MIN_KEY_BLOCK_TOKENS = 32  # of a block: a shorter prefix is not worth a detour
MAX_KEY_BLOCKS = 4096  # of a prompt that are looked at
_MAX_CACHED_ROTATIONS = 256


class PrefixKeys:
    """The keys of one model's requests. rotary: as the engines have it. block_tokens: of a key's block."""

    def __init__(self, info: ModelInfo, rotary: RotaryConfig) -> None:
        self.block_tokens = -(-MIN_KEY_BLOCK_TOKENS // info.block_size) * info.block_size
        self._namespace = info.fingerprint.encode()
        self._planner = RotaryPlanner(info.rotary_groups, rotary.update, info.rotary_ladder, info.rotary_auto)
        self._sizes = context_sizes_of(info)
        self._fingerprints = lru_cache(_MAX_CACHED_ROTATIONS)(self._resolve)

    def root(self, request: EngineRequest) -> bytes:
        """What requests have in common that can share anything. One that no engine will run has some root too."""
        prompt, rule = len(request.prompt_token_ids), request.context
        seen = None if rule.attention_window is None else (rule.attention_window, rule.attention_sinks)
        try:
            longest = min(prompt + request.sampling.max_tokens, self._sizes.size(rule).rotary_length)
            scaling = request.rope_scaling
            if not self._follows_length(scaling):
                prompt = longest = 1  # one entry for all lengths
            rotation = self._fingerprints(scaling, request.rope_update, request.rope_exact, prompt, longest)
        except (EngineError, ArithmeticError, TypeError):
            rotation = ()
        adapter = None if request.adapter is None else str(request.adapter).encode()
        return root_digest(self._namespace, rotation, 0, request.cache_salt, seen, adapter)

    def of(self, request: EngineRequest) -> list[bytes]:
        """A key for each leading block of the prompt; equal ones stand for equal beginnings. None for a short prompt."""
        return digest_chain(self.root(request), request.prompt_token_ids, self.block_tokens)

    def _follows_length(self, scaling: RopeScaling | None) -> bool:
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
    """Digests of 16 bytes, one for each full block, of all that stands before its end and of the root."""
    count = min(len(token_ids) // block_tokens, MAX_KEY_BLOCKS)
    if count == 0:
        return []
    try:
        data = memoryview(array("q", token_ids[: count * block_tokens])).cast("B")
    except (TypeError, OverflowError):
        return []  # no token ids: an engine will say so
    digest, size, found = hashlib.sha256(root), 8 * block_tokens, []
    for start in range(0, count * size, size):
        digest.update(data[start : start + size])
        found.append(digest.digest()[:16])
    return found
