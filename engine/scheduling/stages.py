"""What happens to a sequence whose frequencies change as it grows: its keys are turned, or computed anew.

Responsible for the two events, `rotate`'s and `recompute`'s, and for what follows for blocks, rotary rows and hash
chains. When they happen follows from the sequence's own tokens alone (see `rotary.policy`), so a sequence that lost its
blocks comes to the same keys again by computing from its first token, turns included.
"""

from __future__ import annotations

from windlass.engine.api.request import EngineRequest
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.cache.prefix import HashChain, root_digest
from windlass.engine.cache.turns import turn, turn_needs
from windlass.engine.rotary.policy import RotaryStage
from windlass.engine.rotary.slots import RotarySlots
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.plan import SchedulerOutput
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

    def new_chain(self, request: EngineRequest, stage: RotaryStage) -> HashChain:
        """The hash chain of keys computed under `stage` from the first token on."""
        fingerprints = [spec.fingerprint for spec in stage.specs]
        root = root_digest(self._namespace, fingerprints, 0, request.cache_salt)
        return HashChain(root, self._blocks.block_size)

    def capacity(self, seq: Sequence, wanted: int) -> int:
        """How many of the next `wanted` tokens of `seq` there is room for, beside what a turn of its keys takes first."""
        stage = seq.due_turn()
        return self._blocks.capacity(seq, wanted, turn_needs(self._blocks, seq, stage) if stage else None)

    def turn_if_due(self, seq: Sequence, output: SchedulerOutput) -> None:
        """Plan the turn of the cached keys of `seq` to the frequencies of its next chunk, if those are others."""
        stage = seq.due_turn()
        if stage is None:
            return
        keeps, moves = turn(self._blocks, seq, stage)
        output.keeps += keeps
        output.moves += moves
        self._swap_row(seq)
        self._counters.key_moves += seq.num_computed_tokens

    def start_over_if_outgrown(self, seq: Sequence) -> None:
        """Under `recompute`, forget the keys of a sequence whose frequencies have changed; it computes all tokens anew."""
        stage = seq.outgrown()
        if stage is None:
            return
        self._blocks.free(seq)
        seq.stage = stage
        seq.chain = self.new_chain(seq.request, stage)
        seq.private = stage.single_length
        seq.recompute_reason = "rope_update"
        if seq.status is SequenceStatus.RUNNING:
            self._swap_row(seq)
            hit, full = self._blocks.match(seq)
            self._blocks.attach(seq, hit)
            self._counters.count_hit(seq, full, looked_up=False)

    def rewind(self, seq: Sequence) -> None:
        """A preempted sequence has lost its keys, turned ones too: it begins again where its prompt did."""
        seq.recompute_reason = "preemption"
        if seq.num_turns:
            stage = seq.rotation.stage(seq.num_prompt_tokens)
            seq.stage, seq.num_turns, seq.private = stage, 0, stage.single_length

    def _swap_row(self, seq: Sequence) -> None:
        """Exchange the rotary row of a running sequence for that of its present stage."""
        self._rotary.release(seq.rotary_id)
        seq.rotary_id = self._rotary.acquire(seq.stage.specs)
