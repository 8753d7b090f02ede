"""What happens to a sequence whose frequencies change as it grows: its cached keys are re-rotated, or computed anew.

Responsible for the two events, `rotate`'s and `recompute`'s, and for what follows for blocks, rotary rows and hash
chains. When they happen follows from the sequence's own tokens alone (see `rotary.policy`), so a sequence that lost its
blocks comes to the same keys again by computing from its first token, re-rotations included.
"""

from __future__ import annotations

from windlass.engine.api.request import EngineRequest
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.handle import CacheHandle
from windlass.engine.cache.prefix import HashChain, root_digest
from windlass.engine.cache.rerotation import blocks_to_rerotate, rerotate
from windlass.engine.rotary.policy import RotaryStage
from windlass.engine.rotary.slots import RotarySlots
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.plan_writer import PlannedStep
from windlass.engine.scheduling.sequence import Sequence, SequenceStatus


class StageChanges:
    """namespace: digest of everything but the request that keys depend on."""

    def __init__(
        self, blocks: BlockManager, rotary: RotarySlots, counters: SchedulerCounters, namespace: bytes
    ) -> None:
        self._blocks = blocks
        self._rotary = rotary
        self._counters = counters
        self._namespace = namespace

    def new_handle(self, request: EngineRequest, stage: RotaryStage) -> CacheHandle:
        """For a sample whose keys are computed under `stage` from the first token on."""
        return CacheHandle(self._new_chain(request, stage), stage.specs, private=stage.single_length)

    def _new_chain(self, request: EngineRequest, stage: RotaryStage) -> HashChain:
        fingerprints = [spec.fingerprint for spec in stage.specs]
        root = root_digest(self._namespace, fingerprints, 0, request.cache_salt)
        return HashChain(root, self._blocks.block_size)

    def capacity(self, seq: Sequence, wanted: int) -> int:
        """How many of the next `wanted` tokens of `seq` there is room for, beside what a re-rotation takes first."""
        stage = seq.due_rerotation()
        reserved = blocks_to_rerotate(self._blocks, seq.cache, stage.specs) if stage else None
        return self._blocks.capacity(seq.cache, wanted, reserved)

    def rerotate_if_due(self, seq: Sequence, step: PlannedStep) -> None:
        """Plan the re-rotation of the cached keys of `seq` to the frequencies of its next chunk, if those are others."""
        stage = seq.due_rerotation()
        if stage is None:
            return
        set_aside, rerotations = rerotate(self._blocks, seq.cache, stage.specs)
        step.set_aside += set_aside
        step.rerotations += rerotations
        seq.stage = stage
        self._swap_row(seq)
        self._counters.key_moves += seq.cache.num_computed_tokens

    def start_over_if_outgrown(self, seq: Sequence) -> None:
        """Under `recompute`, forget the keys of a sequence whose frequencies have changed; it computes all tokens anew."""
        stage = seq.outgrown()
        if stage is None:
            return
        self._start_over(seq, stage)
        seq.recompute_reason = "rope_update"
        if seq.status is SequenceStatus.RUNNING:
            self._swap_row(seq)
            hit, full = self._blocks.match(seq.cache, seq.token_ids, seq.num_shareable_tokens)
            self._blocks.attach(seq.cache, hit)
            self._counters.count_hit(seq, full, looked_up=False)

    def rewind(self, seq: Sequence) -> None:
        """A preempted sequence has lost its keys, re-rotated ones too: it begins again where its prompt did."""
        seq.recompute_reason = "preemption"
        if seq.cache.num_rerotations:
            self._start_over(seq, seq.rotation.stage(seq.num_prompt_tokens))

    def _start_over(self, seq: Sequence, stage: RotaryStage) -> None:
        seq.stage = stage
        chain = self._new_chain(seq.request, stage)
        self._blocks.start_over(seq.cache, chain, stage.specs, private=stage.single_length)

    def _swap_row(self, seq: Sequence) -> None:
        """Exchange the rotary row of a running sequence for that of its present stage."""
        self._rotary.release(seq.rotary_id)
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
