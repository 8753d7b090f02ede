"""Engine outputs: generated tokens, log-probabilities, pooled vectors and statistics.

Everything here is picklable and free of torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.interface.context import ContextReport
from windlass.engine.rotary.rotary_policy import RotaryReport

FinishReason = Literal["stop", "length", "abort", "timeout"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the model's own distribution (before penalties and temperature).

    token_id/logprob/rank: the token at this position; rank 1 is the most likely token.
    top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Output of one step for one sample of a request.

    token_ids: new tokens only (a step may add several). logprobs: parallel to token_ids if requested.
    prompt_logprobs: on the first output of sample 0 if requested; entry 0 is None (the first token has no context).
    finish_reason: on the last output of this sample. stop_token_id: the eos or stop id that ended it, if any (it is the last
    entry of `token_ids`). cached_tokens: prompt tokens taken from the prefix cache.
    pooled: result of a pooled prompt, on its only output.
    rotary, context: reports on the sample, on its last output unless it failed.
    error: the request failed; this is its last output (of all samples).
    scheduled_at: `time.monotonic()` seconds when the first step of the request was planned, on its first output.
    prompt_computed: prompt tokens computed or cached so far, on the outputs before the first token that a request with
    `reports_progress` gets; these have nothing else but `cached_tokens`.
    """

    request_id: str
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    cached_tokens: int = 0
    rotary: RotaryReport | None = None
    context: ContextReport | None = None
    error: Exception | None = None
    pooled: PooledRows | None = None
    scheduled_at: float | None = None
    prompt_computed: int | None = None


MAX_TIMING_SAMPLES = 1 << 16  # of each duration, stored until they are read: some MB, hours of a busy server
TIMED_FIELDS = ("queue_seconds", "prefill_seconds", "decode_seconds", "inference_seconds")  # of EngineStats
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(slots=True)
class PersistStats:
    """Counters of the disk tier and, on a GPU, of the host tier. A block belongs to one KV group."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    restored_tokens: int = 0  # prompt tokens whose blocks were restored into the cache
    damaged_blocks: int = 0  # files with a wrong checksum
    foreign_blocks: int = 0  # files that hold another block than their name states
    lost_blocks: int = 0  # evicted before they were written
    evicted_blocks: int = 0  # files removed to stay below the size limit
    failures: int = 0  # failed reads and writes, for example on a full disk
    waiting_blocks: int = 0  # still to be written
    known_blocks: int = 0  # files known to be usable by this engine
    disk_bytes: int = 0  # all files of the folder when last measured, plus what was written since
    host_saved_blocks: int = 0  # copied to host memory when the device's cache evicted them
    host_saved_bytes: int = 0
    host_read_blocks: int = 0  # copied back
    host_read_bytes: int = 0
    host_lost_blocks: int = 0  # evicted by the device's cache, but no memory was free or the copy failed
    host_evicted_blocks: int = 0  # evicted from host memory
    host_blocks: int = 0  # now in host memory
    host_bytes: int = 0


@dataclass(slots=True)
class EngineStats:
    """A snapshot of gauges and counters. All counters start at 0 with the engine process and only increase."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by live requests (blocks that are only cached count as free)
    kv_cache_usage: float = 0.0  # 0..1, of the fullest KV group
    rotary_specs_live: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0  # prompt positions computed or taken from the cache
    generation_tokens: int = 0
    # By reason: preemption, full_prefix_hit, rope_update, cache_reuse.
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    context_shifts: int = 0
    dropped_tokens: int = 0  # by context shifts
    reused_passages: int = 0  # by non-prefix KV reuse
    reused_tokens: int = 0  # of these passages, without those computed again
    key_moves: int = 0  # cached tokens whose keys were re-rotated to other frequencies
    spec_decode_num_drafts: int = 0  # proposals
    spec_decode_num_draft_tokens: int = 0
    spec_decode_num_accepted_tokens: int = 0
    spec_decode_model_num_drafts: int = 0  # the part of these that the draft model proposed
    spec_decode_model_num_draft_tokens: int = 0
    spec_decode_model_num_accepted_tokens: int = 0
    queue_seconds: Sequence[float] = ()  # per request since the last snapshot: arrival to first schedule
    prefill_seconds: Sequence[float] = ()  # first schedule to first token
    decode_seconds: Sequence[float] = ()  # first token to the end
    inference_seconds: Sequence[float] = ()  # first schedule to the end
    step_tokens: Sequence[int] = ()  # histogram of steps by computed tokens, bounds STEP_TOKENS; () for none
    step_tokens_sum: int = 0
    adapters_loaded: int = 0
    adapter_bytes: int = 0  # of memory
    persist: PersistStats = field(default_factory=PersistStats)
    engines: tuple[EngineStats | None, ...] = ()  # of each engine, in a sum over several; None: unavailable


@dataclass(frozen=True, slots=True)
class PooledRows:
    """values: float32, little-endian, row by row; `width` of them each."""

    values: bytes
    width: int

    @property
    def num_rows(self) -> int:
        return len(self.values) // (4 * self.width)
