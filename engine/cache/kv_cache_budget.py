"""KV cache budget: how many blocks each KV group gets, the longest context they hold, and checks of the disk and host tiers.

Allocates nothing and imports no torch, so the numbers are available before a model is loaded. Callers measure free
memory.
"""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from windlass.engine.cache.kv_cache_spec import MAX_STATE_BLOCKS, KVGroupSpec, StateGroupSpec
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import available_memory
from windlass.engine.interface.config import PERSIST_SIZE, EngineConfig

DEVICE_SHARE = 0.9  # default share of a GPU's memory
_CPU_SHARE = 0.5  # default share of free main memory
_FALLBACK_BYTES = 1 << 30  # if free main memory is unknown


def default_kv_budget(free: int | None, engines: int = 1) -> int:
    """Default bytes of KV cache in main memory: a share of `free`, the bytes that are free apart from the weights.

    engines: number of engines that share the result equally.
    """
    return (_FALLBACK_BYTES if free is None else int(free * _CPU_SHARE)) // engines


def device_kv_budget(total: int, taken: int, free: int, share: float | None, step: int = 0) -> int:
    """Bytes of KV cache in a GPU's memory; less than 1 if there is no memory for it.

    total, free: bytes of the GPU, over all its processes. taken: already used by this engine. share: of the GPU for this
    engine; None: `DEVICE_SHARE`. step: bytes that the largest step needs in addition to weights and cache.
    """
    return min(int(total * (share or DEVICE_SHARE)) - taken, free) - step


def gib(num_bytes: float) -> str:
    """Format a size as "7.6 GiB", small ones in MiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
_INT8_QUAD = 4  # codes of a key are padded to a multiple of this
_INT8_SCALES = 8  # bytes per token and head: one float32 for the key and one for the value
_INT8_GROUP, _INT8_SCALE = 32, 4  # of a row that is both key and value: elements per scale, and bytes of a scale


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Size of the KV cache.

    num_blocks: per KV group. max_model_len: in tokens. num_bytes: of all pages and states. notices: one line each.
    num_states: blocks of recurrent state.
    """

    num_blocks: tuple[int, ...]
    max_model_len: int
    num_bytes: int
    notices: tuple[str, ...]
    num_states: int = 0


def bytes_per_token(group: KVGroupSpec, dtype: str) -> int:
    """Bytes of one token in a KV group's pages of this dtype, with padding and scales (see `kernels.page_tensor_shapes`)."""
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
    """Plan the blocks within `budget` bytes, and the longest sequence that they can hold.

    There are no more blocks than running sequences can hold, unless `cache.memory` is set and prefixes are shared.
    trained_len: context length of the model, used if `max_model_len` is not set; a notice reports a shorter result.
    most: bytes that `cache.memory` could be raised to; None: unknown. draft_token_bytes: bytes per token of a draft
    model's pages, which have as many blocks as the first group. whole_prompts: a prompt is computed in one step, which
    limits its length, and needs pages for that step only. states: of layers with recurrent state, which use a part of
    the budget. draft_state_bytes: of a draft model's state block, of which there are as many. Raises LoadError if an
    explicit `max_model_len` does not fit.
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
        """Bytes of `count` blocks per group and of the states."""
        blocks = _blocks_for(count, groups, config)
        cost = (bytes_per_token(group, dtype) * config.cache.block_size for group in groups)
        pages = sum(c * n for c, n in zip(cost, blocks, strict=True))
        return pages + draft_token_bytes * config.cache.block_size * blocks[0] + state_pages_bytes

    per_sequence = -(-wanted // config.cache.block_size)
    high = config.scheduling.max_num_seqs * per_sequence
    if _caches_idle_blocks(config, groups) and not whole_prompts:
        high = max(high, (budget - state_pages_bytes) // max(1, size(1) - state_pages_bytes))
    if whole_prompts:  # each sequence of a step leaves a part of its last block unused
        steps = -(-config.scheduling.max_num_batched_tokens // config.cache.block_size)
        high = min(high, steps + config.scheduling.max_num_seqs)
    most_blocks = bisect_right(range(1, high + 1), budget, key=size)
    num_blocks = _blocks_for(most_blocks, groups, config)
    max_len = _max_sequence_len(config, groups, num_blocks)
    if max_len >= wanted:
        return CachePlan(num_blocks, wanted, size(most_blocks), notices, num_states)
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
            f"a context of {wanted} tokens does not fit: it needs {gib(needed)} of KV cache, but only {gib(budget)} are "
            f"available, which hold {max_len} tokens: {' or '.join(filter(None, ways))}"
        )
    notice = (
        f"context shortened from {wanted} to {max_len} tokens to fit the KV cache: raise `cache.memory` or lower "
        "`max_model_len`"
    )
    return CachePlan(num_blocks, max_len, size(most_blocks), (*notices, notice), num_states)


def _num_state_blocks(state_bytes: int, config: EngineConfig, budget: int, others: int) -> int:
    """Number of recurrent state blocks.

    Per running sequence: one, one for each proposed token, and with prefix caching one for later prompts. One more is
    for copies. They use at most half of the budget, and at most what `others`, bytes needed for pages in any case, leave
    of it; with fewer blocks, fewer sequences run at once. Raises LoadError if one sequence does not fit.
    """
    running, cached = config.scheduling.max_num_seqs, config.cache.prefix_caching
    fewest = MAX_STATE_BLOCKS * state_bytes
    if budget // 2 < fewest:
        raise LoadError(
            f"the recurrent state of this model needs {gib(2 * fewest)} of KV cache in addition to keys, but only "
            f"{gib(budget)} are available: raise `cache.memory`"
        )
    limit = max(fewest, min(budget // 2, budget - others))
    proposed = config.scheduling.speculation.max_proposed_tokens
    return min(running + 1 + (cached + proposed) * running, limit // state_bytes)


def _blocks_for(count: int, groups: Sequence[KVGroupSpec], config: EngineConfig) -> tuple[int, ...]:
    """`count` blocks for each full-attention group, and at most that for each window group.

    A window group never needs more than one window per running sequence plus one step's tokens; the rest of the budget
    goes to the other groups.
    """
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
    """Whether blocks beyond those of running sequences are useful, for prefixes that later sequences share.

    Only if `cache.memory` is set: otherwise a server would gradually fill half of the machine. With a window group they
    are useless: a match needs its blocks too, and it has only as many as running sequences need.
    """
    limits = config.cache
    return limits.memory is not None and limits.prefix_caching and all(group.window is None for group in groups)


def _max_sequence_len(config: EngineConfig, groups: Sequence[KVGroupSpec], num_blocks: tuple[int, ...]) -> int:
    """The longest sequence, in tokens."""
    max_len = sys.maxsize
    for group, blocks in zip(groups, num_blocks, strict=True):
        # A window group that holds one window and one step's tokens can serve a sequence of any length.
        size, step = config.cache.block_size, config.scheduling.max_num_batched_tokens
        if group.window is None or blocks < -(-(group.window + step) // size) + 2:
            max_len = min(max_len, blocks * size)
    return max_len


# -- disk and host tiers -------------------------------------------------------------------------------------------

_MIN_BLOCKS = 64  # blocks, of all KV groups together, that a tier must be able to hold
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def check_tier_options(config: EngineConfig) -> None:
    """Check the options that do not depend on the model, and create the folder if one is given. Raises LoadError."""
    for field, asked in (("persist", config.cache.persist), ("host_memory", config.cache.host_memory)):
        if asked is not None and not config.cache.prefix_caching:
            raise LoadError(
                f"`cache.{field}` stores shared beginnings of prompts, which requires `cache.prefix_caching`"
            )
    free, size = available_memory(), config.cache.host_memory
    if size is not None and free is not None and size > free:
        raise LoadError(f"`cache.host_memory` is {gib(size)}, but only {gib(free)} of main memory are free: lower it")
    if config.cache.persist is not None:
        prepare_folder(config.cache.persist)


def check_tier_support(config: EngineConfig, token_bytes: int, *, is_bidirectional: bool, on_device: bool) -> None:
    """Raise LoadError if blocks of this model cannot be stored as configured.

    token_bytes: of a token in the cache. on_device: whether the cache is in device memory.
    """
    cache = config.cache
    if cache.host_memory is not None and not on_device:
        raise LoadError(
            "`cache.host_memory` stores what the cache of a GPU evicts, and this cache is already in main memory: leave it "
            "out and raise `cache.memory`"
        )
    for field, size in (
        ("persist", None if cache.persist is None else cache.persist_size or PERSIST_SIZE),
        ("host_memory", cache.host_memory),
    ):
        if size is None:
            continue
        if is_bidirectional:
            raise LoadError(
                f"`cache.{field}` stores shared beginnings of texts, but tokens of this model also attend to later ones: "
                "leave it out"
            )
        fewest = _MIN_BLOCKS * cache.block_size * token_bytes
        if size < fewest:
            name = "persist_size" if field == "persist" else field
            raise LoadError(
                f"`cache.{name}` is {gib(size)}, and {_MIN_BLOCKS} blocks of this model take {gib(fewest)}: raise it"
            )


def prepare_folder(name: str) -> Path:
    """Create the folder if needed, accessible only to its owner, and check it. Raises LoadError with the reason."""
    path = Path(name)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = path.stat().st_mode
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileExistsError:
        raise LoadError(f"`cache.persist={name}` is a file: give a folder") from None
    except OSError as error:
        raise LoadError(
            f"`cache.persist={name}` cannot be written to ({error.strerror or error}): give a folder that this user can write to"
        ) from None
    if mode & _OTHERS_MAY_WRITE and os.name == "posix":
        raise LoadError(
            f"`cache.persist={name}` is writable for other users, who could store false keys and values there: "
            f"run chmod 700 {name}, or give a new folder inside it"
        )
    return path
