"""Speculative decoding by prompt lookup: which tokens a running stream proposes beside its own, and how many.

A step of k + 1 rows costs little more than one of a single row as long as reading the weights is what takes time. So a
stream may propose the k tokens that followed its last tokens where those stood before (`ngram`); the step computes
them all, and those that the model would have drawn itself are accepted. Nothing about the answer changes.

Responsible for what is proposed, within what a step may hold. How many of the proposed tokens are accepted is found where
tokens are drawn.
"""

from __future__ import annotations

from windlass.engine.api.config import SpeculationConfig
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.drafting import Drafting, Pace
from windlass.engine.scheduling.ngram import NgramIndex
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep
from windlass.engine.scheduling.sequence import Sequence

_INDEXED_PER_STEP = 2048  # of a long prompt, so that no step waits for an index; no proposals before it is complete


class Speculation:
    """Adds proposals to planned steps. max_num_batched_tokens: the scheduler's limit."""

    def __init__(
        self,
        config: SpeculationConfig,
        blocks: BlockManager,
        counters: SchedulerCounters,
        *,
        max_num_batched_tokens: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._counters = counters
        self._max_num_batched_tokens = max_num_batched_tokens

    def extend(self, step: PlannedStep) -> None:
        """Let streams of a planned step propose tokens, from what budget and blocks it has left over.

        So a proposal takes nothing from a prompt and preempts nobody.
        """
        if self._config.num_tokens == 0:
            return
        budget = self._max_num_batched_tokens - sum(chunk.num_tokens for chunk in step.chunks)
        for chunk in step.chunks:
            if budget <= 0:
                return
            seq = chunk.seq
            draft = self._propose(chunk, budget)
            if not draft:
                continue
            draft = draft[: self._blocks.capacity(seq.cache, 1 + len(draft)) - 1]
            if draft:
                step.copies += self._blocks.allocate(seq.cache, 1 + len(draft))
                chunk.num_tokens, chunk.draft = 1 + len(draft), draft
                budget -= len(draft)

    def observe(self, seq: Sequence, proposed: int, accepted: int) -> None:
        """Book what became of a proposal."""
        self._counters.spec_decode_num_drafts += 1
        self._counters.spec_decode_num_draft_tokens += proposed
        self._counters.spec_decode_num_accepted_tokens += accepted
        if seq.drafting is not None:
            seq.drafting.pace.observe(proposed, accepted)

    def _propose(self, chunk: PlannedChunk, budget: int) -> tuple[int, ...]:
        """What a sequence proposes beside the one token planned; nothing while it is not a running stream."""
        seq = chunk.seq
        if chunk.num_tokens != 1 or len(chunk.samples) != 1 or seq.num_output_tokens == 0:
            return ()
        room = min(budget, self._room(seq))
        if room < 1:
            return ()
        if seq.drafting is None:
            config = self._config
            seq.drafting = Drafting(NgramIndex(config.min_match, config.max_match), Pace(config.num_tokens))
        if not seq.drafting.index.extend(seq.token_ids, _INDEXED_PER_STEP):
            return ()
        return seq.drafting.index.propose(seq.token_ids, min(room, seq.drafting.pace.limit()))

    def _room(self, seq: Sequence) -> int:
        """Tokens that may follow the last known one in this step.

        One more is drawn behind them, and no token past the end of the sequence is ever computed. Where frequencies
        depend on the length, all must be computed under those of the moment, and no block is dropped for a proposal.
        """
        length, sampling = seq.num_tokens, seq.request.sampling
        room = min(sampling.max_tokens - seq.num_output_tokens, seq.held.longest - length, seq.held.room(seq.cache)) - 1
        last = seq.stage.last_length
        return room if last is None else min(room, last - length)
