"""KV cache budget: how many blocks each KV group gets, and the longest context they hold.

Allocates nothing and imports no torch, so the numbers are available before a model is loaded. Callers measure free memory.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from windlass.engine.cache.kv_cache_spec import MAX_STATE_BLOCKS, KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.interface.config import EngineConfig

DEVICE_SHARE = 0.9  # of a GPU's memory, where the operator names none

_CPU_SHARE = 0.5

_FALLBACK_BYTES = 2 << 30


def default_kv_budget(free: int | None, engines: int = 1) -> int:
    """Bytes of KV cache to reserve in main memory when the operator names none: a share of what is free beside the weights.

    engines: that have equal parts of it.
    """
    if free is None:
        return _FALLBACK_BYTES // 2 // engines
    return int(free * _CPU_SHARE) // engines


def device_kv_budget(total: int, taken: int, free: int, share: float | None, step: int = 0) -> int:
    """Bytes of KV cache in a GPU's memory, less than 1 where there are none.

    total, free: of the GPU, whoever uses it. taken: by this engine already. share: of the GPU that is this engine's, None:
    `DEVICE_SHARE`. step: what the largest step needs beside weights and cache.
    """
    return min(int(total * (share or DEVICE_SHARE)) - taken, free) - step


def gib(num_bytes: float) -> str:
    """A size for people: "7.6 GiB", small ones in MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}

_INT8_QUAD = 4  # codes of a key are padded to a multiple

_INT8_SCALES = 8  # bytes per token and head, one float32 for the key and one for the value

_INT8_GROUP, _INT8_SCALE = 32, 4  # of a row that is key and value at once: numbers of a scale, and its bytes


@dataclass(frozen=True, slots=True)
class CachePlan:
    """num_blocks, per KV group; max_model_len in tokens; num_bytes of all pages and states; notices: one line each. num_states:
    blocks of what layers carry from token to token."""

    num_blocks: tuple[int, ...]
    max_model_len: int
    num_bytes: int
    notices: tuple[str, ...]
    num_states: int = 0


def bytes_per_token(group: KVGroupSpec, dtype: str) -> int:
    """What one token takes in a KV group's pages of this type, padding and scales included (see `kernels.page_tensor_shapes`)."""
    dim, value_dim = group.head_dim, group.cached_value_dim
    int8 = ceil(dim / _INT8_QUAD) * _INT8_QUAD + value_dim + _INT8_SCALES
    if not value_dim:
        int8 = dim + ceil(dim / _INT8_GROUP) * _INT8_SCALE
    per_head = int8 if dtype == "int8" else (dim + value_dim) * ITEM_BYTES[dtype]
    return len(group.layers) * group.num_kv_heads * per_head


def plan_cache(
    config: EngineConfig,
    groups: Sequence[KVGroupSpec],
    trained_len: int,
    dtype: str,
    budget: int,
    most: int | None = None,
    draft_token_bytes: int = 0,
    whole_prompts: bool = False,
    states: StateGroupSpec | None = None,
    draft_state_bytes: int = 0,
) -> CachePlan:
    """Blocks within `budget` bytes, not more than running sequences hold unless the operator named the bytes and beginnings are
    shared, and the longest sequence they carry.

    trained_len: the model's own context length, which is wanted where the operator asks for none. A notice tells where the
    budget shortened it. most: bytes that `cache.memory` could be raised to, None if unknown. beside: bytes per token of a
    draft model's pages, which are as many as the first group's. whole_prompts: a prompt is computed in one step, which bounds
    its length, and needs pages for that step only. states: of layers that carry them, which take a part of the budget.
    draft_state_bytes: bytes of a draft model's own behind a token, of which there are as many. Raises LoadError for an explicit
    `max_model_len` that does not fit.
    """
    wanted = config.max_model_len or trained_len
    num_states = state_pages_bytes = 0
    if states is not None:
        longest = -(-wanted // config.cache.block_size) * config.cache.block_size
        bytes_per_sequence = sum(bytes_per_token(group, dtype) for group in groups) * longest
        state_bytes = states.block_bytes + draft_state_bytes
        num_states = _num_state_blocks(
            state_bytes, config, budget, bytes_per_sequence if config.max_model_len is not None else 0
        )
        state_pages_bytes = num_states * state_bytes
    notices: tuple[str, ...] = ()
    if whole_prompts and wanted > (step := config.scheduling.max_num_batched_tokens):
        if config.max_model_len is not None:
            raise LoadError(
                f"`max_model_len` is {wanted}, and this model computes a text in one step of at most {step} tokens: raise "
                "`scheduling.max_num_batched_tokens`, or lower `max_model_len`"
            )
        notices = (
            f"context shortened from {wanted} to {step} tokens, as this model computes a text in one step: raise "
            "`scheduling.max_num_batched_tokens`",
        )
        wanted = step

    def size(count: int, dtype: str = dtype) -> int:
        """Of so many blocks, and of states."""
        blocks = _blocks_for(count, groups, config)
        cost = (bytes_per_token(group, dtype) * config.cache.block_size for group in groups)
        pages = sum(c * n for c, n in zip(cost, blocks, strict=True))
        return pages + draft_token_bytes * config.cache.block_size * blocks[0] + state_pages_bytes

    per_sequence = -(-wanted // config.cache.block_size)
    low, high = 0, config.scheduling.max_num_seqs * per_sequence
    if _caches_idle_blocks(config, groups) and not whole_prompts:
        high = max(high, (budget - state_pages_bytes) // max(1, size(1) - state_pages_bytes))
    if whole_prompts:  # each sequence of a step leaves a part of its last block unused
        steps = -(-config.scheduling.max_num_batched_tokens // config.cache.block_size)
        high = min(high, steps + config.scheduling.max_num_seqs)
    while low < high:  # the largest count that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if size(middle) <= budget else (low, middle - 1)
    num_blocks = _blocks_for(low, groups, config)
    max_len = _max_sequence_len(config, groups, num_blocks)
    if max_len >= wanted:
        return CachePlan(num_blocks, wanted, size(low), notices, num_states)
    if config.max_model_len is not None or max_len < config.cache.block_size:
        needed = size(per_sequence)
        limit = sys.maxsize if most is None else max(budget, most)
        windows = any(group.window is not None for group in groups)
        can_be_int8 = config.compute.device == "cpu" or all(group.cached_value_dim for group in groups)
        ways = [
            "raise `cache.memory`" if needed <= limit else "",
            "lower `max_model_len` or `scheduling.max_num_seqs`" if windows else "lower `max_model_len`",
            "use `cache.dtype=int8`" if can_be_int8 and dtype != "int8" and size(per_sequence, "int8") <= limit else "",
        ]
        raise LoadError(
            f"a context of {wanted} tokens does not fit: it needs {gib(needed)} of KV cache, there are {gib(budget)}, "
            f"which hold {max_len} tokens: {' or '.join(filter(None, ways))}"
        )
    notice = (
        f"context shortened from {wanted} to {max_len} tokens to fit the KV cache: raise `cache.memory` or lower "
        "`max_model_len`"
    )
    return CachePlan(num_blocks, max_len, size(low), (*notices, notice), num_states)


def _num_state_blocks(state_bytes: int, config: EngineConfig, budget: int, others: int) -> int:
    """As many as run, one to copy to, as many again that later prompts may begin with, and one for each token that these propose;
    in half of the budget at most, and in what `others` leave of it, bytes that are needed for pages in any case.

    Where that is less, fewer run at once. Raises LoadError where it is not enough for one.
    """
    running, kept = config.scheduling.max_num_seqs, config.cache.prefix_caching
    fewest = MAX_STATE_BLOCKS * state_bytes
    if budget // 2 < fewest:
        raise LoadError(
            f"what this model carries from token to token needs {gib(2 * fewest)} of KV cache beside keys, there are "
            f"{gib(budget)}: raise `cache.memory`"
        )
    max_len = max(fewest, min(budget // 2, budget - others))
    proposed = config.scheduling.speculation.max_proposed_tokens
    return min(running + 1 + (kept + proposed) * running, max_len // state_bytes)


def _blocks_for(count: int, groups: Sequence[KVGroupSpec], config: EngineConfig) -> tuple[int, ...]:
    """`count` blocks for each full-attention group. A window group never needs more than its windows plus one step's tokens
    for every running sequence, so whatever it does not need goes to the others."""
    result = []
    for group in groups:
        need = count
        if group.window is not None:
            per_sequence = -(-group.window // config.cache.block_size) + 2
            steps = -(-config.scheduling.max_num_batched_tokens // config.cache.block_size)
            need = min(count, config.scheduling.max_num_seqs * per_sequence + steps)
        result.append(need)
    return tuple(result)


def _caches_idle_blocks(config: EngineConfig, groups: Sequence[KVGroupSpec]) -> bool:
    """Whether blocks beyond those that running sequences can hold are of use: for beginnings that later ones share.

    Only as far as the operator says how much the cache may take: else a server would fill half a machine by and by. A match
    ends where a window group's blocks do, and of those there are only as many as run.
    """
    limits = config.cache
    return limits.memory is not None and limits.prefix_caching and all(group.window is None for group in groups)


def _max_sequence_len(config: EngineConfig, groups: Sequence[KVGroupSpec], num_blocks: tuple[int, ...]) -> int:
    """The longest sequence, in tokens."""
    max_len = sys.maxsize
    for group, blocks in zip(groups, num_blocks, strict=True):
        # A window group with room for one window and one step's tokens carries a sequence of any length.
        enough = group.window is not None and blocks >= _blocks_per_window(group.window, config)
        max_len = max_len if enough else min(max_len, blocks * config.cache.block_size)
    return max_len


def _blocks_per_window(window: int, config: EngineConfig) -> int:
    return -(-(window + config.scheduling.max_num_batched_tokens) // config.cache.block_size) + 2
