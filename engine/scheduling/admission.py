"""Which requests can run at all, and which waiting sequence may run next.

Responsible for refusing what would never fit and for the choice at the head of the queue. It takes no places and
plans no tokens; the scheduler does.
"""

from __future__ import annotations

from collections import abc

from windlass.engine.api.config import SchedulerConfig
from windlass.engine.api.request import EngineRequest
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.errors import RequestError
from windlass.engine.rotary.policy import RotaryPlan
from windlass.engine.scheduling.restoring import KVRestorer
from windlass.engine.scheduling.reuse import NonPrefixReuse
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus
from windlass.engine.scheduling.shifting import ContextLimits

_RETRY_STEPS = 8  # steps after which a sequence that found no room is matched against the prefix cache again


class Admission:
    """The choice of whom to admit, with what it remembers of the last refusal.

    restoring: who brings back from files what prompts lack, if anybody does.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        limits: ContextLimits,
        blocks: BlockManager,
        reuse: NonPrefixReuse,
        restoring: KVRestorer | None = None,
    ) -> None:
        self._reuse = reuse
        self._config = config
        self._limits = limits
        self._blocks = blocks
        self._kv_restorer = restoring
        self._blocked: tuple[int, int, list[int]] | None = None  # who found no room, at which step, with what available

    def validate(self, request: EngineRequest, rotation: RotaryPlan) -> None:
        """Raise RequestError unless the request, alone in the engine, can run to its end."""
        prompt, sampling, context_limits = (
            len(request.prompt_token_ids),
            request.sampling,
            self._limits.context_limits(request.context),
        )
        limit = context_limits.longest_prompt
        if prompt == 0:
            raise RequestError("the prompt is empty: send at least one token", "prompt", "empty_prompt")
        if sampling.n < 1:
            raise RequestError("n must be at least 1", "n", "invalid_value")
        if sampling.max_tokens < 0:
            raise RequestError("max_tokens must be at least 0", "max_tokens", "invalid_value")
        if prompt + min(sampling.max_tokens, 1) > limit:
            message = (
                f"the prompt has {prompt} tokens and the context holds {limit}, at least one of them for the output"
            )
            raise RequestError(f"{message}: shorten the prompt", "prompt", "context_length_exceeded")
        if request.reuse is not None and request.reuse.is_enabled and self._limits.reuse_refusal is not None:
            raise RequestError(f"cache_reuse: {self._limits.reuse_refusal}", "cache_reuse", "unsupported_value")
        # The last output token is never computed, so it needs no slot.
        longest = min(
            max(prompt, min(prompt + sampling.max_tokens, context_limits.longest) - 1), context_limits.max_slots(1)
        )
        stage = rotation.stage(prompt)
        last, final = stage.last_length, rotation.stage(longest)
        far = any(spec.distances.has_second_keys for spec in (*stage.specs, *final.specs))
        # Keys that are re-rotated stand in the cache twice, as computed and as re-rotated; and so do those that seem nearer
        # from far away.
        turns = rotation.policy == "rotate" and last is not None and longest > last
        copies = 2 if turns or far else 1
        for need, pool in zip(
            self._blocks.min_blocks(
                longest, shifts=context_limits.window is not None, sinks_window=context_limits.sinks_window
            ),
            self._blocks.pools,
            strict=True,
        ):
            need *= 1 if pool.holds_states else copies  # only keys stand twice
            if need > pool.num_blocks:
                static = (
                    "choose another rope_scaling, "
                    if far
                    else "set rope_update to frozen or recompute, "
                    if turns
                    else ""
                )
                why = (
                    " (keys under this rope_scaling stand there twice)"
                    if far
                    else " (keys that turn stand there twice)"
                )
                raise RequestError(
                    f"{longest} tokens of prompt and output need {need} KV blocks"
                    f"{why if copies > 1 else ''} and the cache has {pool.num_blocks}: "
                    f"lower max_tokens, shorten the prompt, {static}or give the server more memory for KV pages",
                    "max_tokens",
                    "kv_cache_exceeded",
                )

    def choose(
        self, waiting: abc.Sequence[Sequence], running: abc.Sequence[Sequence], step: int
    ) -> tuple[Sequence, bool] | None:
        """The sequence to admit now, its cached prefix attached, and whether the cache held all of its tokens.

        waiting, running: by rank. Nobody overtakes a sequence for which there is no room, so a large request is not
        starved by small ones; only one that waits for a prefix somebody else is computing, or for files, steps aside. If nothing
        runs, the first is admitted whatever the room, which is what makes a lone request always run.
        """
        for seq in waiting:
            if self._is_prefix_coming(seq):
                continue
            if running and self._was_just_blocked(seq, step):
                return None
            if seq.cache.is_swapped_out:
                if not running or self._has_free_blocks(seq, running):
                    return seq, False
                self._blocked = (seq.seq_id, step, self._blocks.available())
                return None
            if self._kv_restorer is not None and self._kv_restorer.should_wait(seq):
                continue
            hit, full = 0, False
            if not seq.needs_full_prefill:
                hit, full = self._blocks.match(seq.cache, seq.token_ids, seq.num_shareable_tokens)
            if self._find_prefix_source(seq, hit, running):
                continue
            before = self._blocks.available()
            self._blocks.attach(seq.cache, hit)
            if not full:
                self._reuse.find_passages(seq)
            if running and not self._has_free_blocks(seq, running):
                self._blocks.free(seq.cache)
                self._blocked = (seq.seq_id, step, before)
                return None
            if self._kv_restorer is not None and self._kv_restorer.should_wait_again(seq, hit + full):
                self._blocks.free(seq.cache)
                continue
            return seq, full
        return None

    def _was_just_blocked(self, seq: Sequence, step: int) -> bool:
        """Whether `seq` found no room a few steps ago and no more is free now; spares a search of the prefix cache."""
        if self._blocked is None or self._blocked[0] != seq.seq_id:
            return False
        _, blocked_at, before = self._blocked
        grown = any(now > then for now, then in zip(self._blocks.available(), before, strict=True))
        return not grown and step - blocked_at < _RETRY_STEPS

    def _has_free_blocks(self, seq: Sequence, running: abc.Sequence[Sequence]) -> bool:
        """Whether all known tokens of `seq` fit beside what running sequences still need for theirs, with 1 % spare."""
        chunk = self._config.max_num_batched_tokens
        # Of states one is left to copy to, whoever comes to the end of a block.
        spare = [p.num_available - (int(p.holds_states) or p.num_blocks // 100) for p in self._blocks.pools]
        for other in (seq, *running):
            slots = min(other.num_tokens + other.cache.final_slot_offset, other.context_limits.max_slots(chunk))
            need = self._blocks.blocks_still_needed(other.cache, slots, chunk, rerotates=other.will_rerotate)
            spare = [s - n for s, n in zip(spare, need, strict=True)]
        return min(spare) >= 0

    def _is_prefix_coming(self, seq: Sequence) -> bool:
        """Whether the sequence that `seq` waits for still runs and has not got there yet."""
        if seq.awaited_prefix is None:
            return False
        other, num_tokens = seq.awaited_prefix
        if other.status is SequenceStatus.RUNNING and other.cache.num_computed_tokens < num_tokens:
            return True
        seq.awaited_prefix = None
        return False

    def _find_prefix_source(self, seq: Sequence, hit: int, running: abc.Sequence[Sequence]) -> bool:
        """Let `seq` wait if a better-ranked prefill is about to compute blocks that it could share.

        Waiting costs nothing then, as the other one is served first anyway, and requests that arrive together with the
        same long prompt compute it once.
        """
        if not self._blocks.enable_prefix_caching or seq.needs_full_prefill or seq.cache.private:
            return False
        size = self._blocks.block_size
        usable = min(seq.num_tokens - 1, seq.num_shareable_tokens) // size
        for other in running:
            if other.rank > seq.rank:
                return False
            if other.num_uncomputed_tokens > 1 and not other.cache.private:
                common = min(usable, seq.cache.chain.common_blocks(other.cache.chain))
                if common > hit and other.cache.num_computed_tokens < common * size:
                    seq.awaited_prefix = (other, common * size)
                    return True
        return False
