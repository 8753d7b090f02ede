"""Engine outputs: generated tokens, log-probabilities, pooled vectors and statistics.

Everything here is picklable and free of torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from windlass.engine.interface.context import ContextReport
from windlass.engine.rotary.rotary_policy import RotaryReport

FinishReason = Literal["stop", "length", "abort", "timeout"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position, from the model's own distribution (before penalties and temperature).

    token_id/logprob/rank: the token that stands there, rank 1 being the most likely.
    top: (token id, log-probability) of the most likely tokens, best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one sample of a request.

    token_ids: new tokens only (a step may add several). logprobs: parallel to token_ids when asked for.
    prompt_logprobs: on the first output of sample 0 when asked for; entry 0 is None (the first token has no context).
    finish_reason: set on the last output of this sample. stop_token_id: the eos or stop id that ended it, if one did
    (that id is the last of `token_ids`).
    cached_tokens: prompt tokens that came from the prefix cache.
    pooled: what came of a pooled prompt, on its only output.
    rotary, context: what the sample ran under and what became of its context, on its last output unless it failed.
    error: set when the request failed; then it is the last output of the request (all samples).
    scheduled_at: `time.monotonic()` seconds when its first step was planned, on its first output.
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


MAX_TIMING_SAMPLES = 1 << 16  # of each duration that wait for somebody to ask: some MB, and hours of a busy server

STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True, slots=True)
class PersistStats:
    """Of cached blocks in files and, where a device computes, in the host's memory. Blocks are those of one KV group each."""

    written_blocks: int = 0
    written_bytes: int = 0
    read_blocks: int = 0
    read_bytes: int = 0
    restored_tokens: int = 0  # of prompts, whose blocks came back into the cache
    damaged_blocks: int = 0  # files that were not what their checksum says
    foreign_blocks: int = 0  # files of another block than their name says
    lost_blocks: int = 0  # blocks that were evicted before they were written
    evicted_blocks: int = 0  # files removed to hold the cap
    failures: int = 0  # to read or to write: a full disk, say
    waiting_blocks: int = 0  # to be written, now
    known_blocks: int = 0  # in files, that this engine may use, as far as it knows
    disk_bytes: int = 0  # of all files in the folder, when it was last measured, and what was written since
    host_saved_blocks: int = 0  # copied to the host's memory when the device's cache evicted them
    host_saved_bytes: int = 0
    host_read_blocks: int = 0  # copied back
    host_read_bytes: int = 0
    host_lost_blocks: int = (
        0  # evicted by the device's cache when there was no place for them, or no copy could be made
    )
    host_evicted_blocks: int = 0  # given up for others
    host_blocks: int = 0  # in the host's memory now
    host_bytes: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of gauges and monotonically growing counters. All counters start at 0 with the engine process."""

    num_running: int = 0
    num_waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0  # held by a live request (cached blocks nobody holds count as free)
    kv_cache_usage: float = 0.0  # 0..1, of the fullest KV group
    rotary_specs_live: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0  # prompt positions passed through the model or taken from the cache
    generation_tokens: int = 0
    recomputed_tokens: dict[str, int] = field(
        default_factory=dict
    )  # by reason: preemption, full_prefix_hit, rope_update, cache_reuse
    context_shifts: int = 0  # times that a sequence dropped its oldest tokens
    dropped_tokens: int = 0  # those
    reused_passages: int = 0  # passages taken up at another place
    reused_tokens: int = 0  # those of them that were not computed again
    key_moves: int = 0  # cached tokens whose keys were re-rotated to other frequencies
    spec_decode_num_drafts: int = 0  # proposals of speculative decoding
    spec_decode_num_draft_tokens: int = 0  # tokens in them
    spec_decode_num_accepted_tokens: int = 0  # those of them that were accepted
    spec_decode_model_num_drafts: int = 0  # of these proposals, those of the draft model
    spec_decode_model_num_draft_tokens: int = 0
    spec_decode_model_num_accepted_tokens: int = 0
    queue_seconds: tuple[float, ...] = ()  # per request since the last snapshot: arrival to first schedule
    prefill_seconds: tuple[float, ...] = ()  # first schedule to first token
    decode_seconds: tuple[float, ...] = ()  # first token to the end
    inference_seconds: tuple[float, ...] = ()  # first schedule to the end
    step_tokens: tuple[
        int, ...
    ] = ()  # steps by the tokens they computed: up to each of STEP_TOKENS, and more; () for none
    step_tokens_sum: int = 0  # those tokens
    adapters_loaded: int = 0
    adapter_bytes: int = 0  # of memory
    persist: PersistStats = field(default_factory=PersistStats)
    engines: tuple[EngineStats | None, ...] = ()  # of each, where this is the sum of several; None: it has none now


@dataclass(frozen=True, slots=True)
class PooledRows:
    """values: float32, little-endian, row by row; `width` of them each."""

    values: bytes
    width: int

    @property
    def num_rows(self) -> int:
        return len(self.values) // (4 * self.width)
