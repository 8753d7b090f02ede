"""Frequency changes of a growing sequence: re-rotation of its cached keys, or recomputation.

Implements rope_update `rotate` and `recompute`, and their effects on blocks, rotary rows and hash chains. When they occur depends
on the sequence's own tokens only (see `rotary.rotary_policy`), so a preempted sequence recomputes the same keys.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, replace

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.cache.prefix_cache import HashChain, root_digest
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.cache.sequence_cache import SequenceCache
from windlass.engine.interface.context import ContextSizes
from windlass.engine.interface.request import EngineRequest
from windlass.engine.rotary.rotary_policy import RotaryRows, RotaryStage
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import SchedulerOutputBuilder
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class FrequencyChanges:
    """namespace: digest of all that keys depend on apart from the request. adapter_key: digest of an adapter, by its id."""

    _blocks: BlockManager
    _rotary: RotaryRows
    _counters: SchedulerCounters
    _namespace: bytes
    _limits: ContextSizes
    _adapter_key: abc.Callable[[int], bytes]

    def new_cache(self, request: EngineRequest, stage: RotaryStage) -> SequenceCache:
        """An empty cache for a sample whose keys are computed under `stage` from the first token."""
        chain, limits = self._new_chain(request, stage), self._limits.size(request.context)
        private, sinks_window = stage.single_length, limits.sinks_window
        return SequenceCache(chain, stage.specs, private=private, floor=limits.floor, sinks_window=sinks_window)

    def _new_chain(self, request: EngineRequest, stage: RotaryStage) -> HashChain:
        fingerprints = [spec.fingerprint for spec in stage.specs]
        rule = request.context
        window = None if rule.attention_window is None else (rule.attention_window, rule.attention_sinks)
        adapter = None if request.adapter is None else self._adapter_key(request.adapter)
        root = root_digest(self._namespace, fingerprints, 0, request.cache_salt, window, adapter)
        reuse, scope = request.reuse, None
        if reuse is not None and self._blocks.enable_prefix_caching and not stage.single_length:
            # Passages are shared between requests with the same rotation, window, adapter and scope.
            scope = b"passages" + root_digest(self._namespace, fingerprints, 0, reuse.scope, window, adapter)
        return HashChain(root, self._blocks.block_size, scope)

    def capacity(self, seq: Sequence, wanted: int) -> int:
        """Number of the next `wanted` tokens of `seq` that find free blocks, after those that a re-rotation needs first."""
        stage = seq.stage_to_rerotate()
        reserved = blocks_to_rerotate(self._blocks, seq.cache, stage.specs) if stage else None
        return self._blocks.capacity(seq.cache, wanted, reserved)

    def rerotate_if_due(self, seq: Sequence, step: SchedulerOutputBuilder) -> None:
        """Begin the re-rotation of the cached keys of `seq`, if the frequencies of its next chunk differ."""
        stage = seq.stage_to_rerotate()
        if stage is None:
            return
        original_copies, rerotations = rerotate(self._blocks, seq.cache, stage.specs)
        step.original_copies += [replace(piece, seq_id=seq.seq_id) for piece in original_copies]
        seq.rerotations = [replace(piece, seq_id=seq.seq_id) for piece in rerotations]
        seq.stage = stage
        self._replace_rotary_row(seq)
        self._counters.key_moves += seq.cache.num_slots

    def continue_rerotation(self, seq: Sequence, step: SchedulerOutputBuilder, limit: int) -> None:
        """Plan the re-rotation of about `limit` of the remaining keys of `seq`, in whole blocks."""
        size = self._blocks.block_size
        while seq.rerotations and limit > 0:
            piece = seq.rerotations.pop(0)
            end = max((piece.start + limit) // size, piece.start // size + 1) * size
            if end < piece.end:
                seq.rerotations.insert(0, piece.part(end, piece.end, size))
                piece = piece.part(piece.start, end, size)
            step.rerotations.append(piece)
            limit -= piece.end - piece.start

    def recompute_if_stage_changed(self, seq: Sequence) -> None:
        """Under `recompute`, discard the keys of a sequence whose frequencies have changed; all its tokens are recomputed."""
        stage = seq.stage_to_recompute()
        if stage is None:
            return
        self._reset_cache(seq, stage)
        seq.recompute_reason = "rope_update"
        if seq.status is SequenceStatus.RUNNING:
            self._replace_rotary_row(seq)
            hit, full = self._blocks.match(seq.cache, seq.token_ids, seq.num_shareable_tokens)
            self._blocks.attach(seq.cache, hit)
            self._counters.count_hit(seq, full, looked_up=False)

    def reset_after_preemption(self, seq: Sequence) -> None:
        """Reset a preempted sequence. If its keys were re-rotated or tokens were dropped, it starts from its first stage."""
        seq.recompute_reason = "preemption"
        seq.restore_checked = False
        if seq.cache.num_rerotations:
            self._reset_cache(seq, seq.rotation.stage(seq.num_prompt_tokens))
        elif not seq.cache.layout.is_plain:
            self._reset_cache(seq, seq.stage)

    def _reset_cache(self, seq: Sequence, stage: RotaryStage) -> None:
        seq.stage = stage
        chain = self._new_chain(seq.request, stage)
        self._blocks.reset(seq.cache, chain, stage.specs, private=stage.single_length)

    def _replace_rotary_row(self, seq: Sequence) -> None:
        """Replace the rotary row of a running sequence with that of its present stage."""
        self._rotary.release(seq.rotary_id)
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
