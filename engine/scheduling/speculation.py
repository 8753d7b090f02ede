"""Speculative decoding: which tokens a running stream proposes beside its own, or how many a draft model is to propose.

A step of k + 1 rows costs little more than one of a single row as long as reading the weights is what takes time. So a
stream may propose the k tokens that followed its last tokens where those stood before (`ngram`); where there is no such
place, a draft model or the model's own prediction layer may propose k, within the same step (`drafter` and `predictor` in
`windlass.engine.execution`). The step computes them all, and those that the model would have drawn itself are accepted. Nothing
about the answer changes.

Responsible for what is proposed, within what a step may hold. How many of the proposed tokens are accepted is found where
tokens are drawn.
"""

from __future__ import annotations

import sys

from windlass.engine.api.config import SpeculationConfig
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.drafting import DraftLengthController, DraftState
from windlass.engine.scheduling.ngram import NgramIndex
from windlass.engine.scheduling.payoff import DraftPayoff
from windlass.engine.scheduling.plan import ScheduledSequence, SchedulerOutput
from windlass.engine.scheduling.plan_writer import PlannedStep
from windlass.engine.scheduling.sequence import Sequence

_INDEXED_PER_STEP = 2048  # of a long prompt, so that no step waits for an index; no proposals before it is complete

# Tokens that the draft model may be behind a stream and still compute them: more would hold up the others.
_MAX_DRAFT_LAG = 64


class Speculation:
    """Adds proposals to planned steps. max_num_batched_tokens: the scheduler's limit. draft_tracks_all_tokens: whether the draft
    computes what streams draw that do not ask it, as a model does that carries states, and a prediction layer."""

    def __init__(
        self,
        config: SpeculationConfig,
        blocks: BlockManager,
        counters: SchedulerCounters,
        max_num_batched_tokens: int,
        *,
        draft_tracks_all_tokens: bool = False,
    ) -> None:
        self._config = config
        self._max_draft_lag = sys.maxsize if draft_tracks_all_tokens else _MAX_DRAFT_LAG
        self._blocks = blocks
        self._counters = counters
        self._max_num_batched_tokens = max_num_batched_tokens
        self._payoff = DraftPayoff()

    def extend(self, step: PlannedStep) -> None:
        """Let streams of a planned step propose tokens, from what budget and blocks it has left over.

        So a proposal takes nothing from a prompt and preempts nobody.
        """
        config = self._config
        if config.max_proposed_tokens == 0:
            return
        budget = self._max_num_batched_tokens - sum(chunk.num_tokens for chunk in step.chunks)
        drafts = None  # whether the draft model is asked in this step, once anybody would
        for chunk in step.chunks:
            if budget <= 0:
                return
            seq = chunk.seq
            if not chunk.is_next_token:
                if seq.draft_state is not None:
                    seq.draft_state.draft_lag = (
                        0  # prompts, and what is computed again, pass through the draft model too
                    )
                continue
            if seq.draft_state is None:
                index = NgramIndex(config.min_match, config.max_match)
                seq.draft_state = DraftState(
                    index, DraftLengthController(config.num_tokens), DraftLengthController(config.draft_tokens)
                )
            seq.draft_state.draft_lag += 1
            max_proposed = min(budget, seq.num_lookahead_tokens)
            if max_proposed < 1:
                continue
            draft = self._propose_ngram(seq, seq.draft_state, max_proposed) if config.num_tokens else ()
            count = len(draft)
            if not draft and config.drafts and seq.draft_state.draft_lag <= self._max_draft_lag:
                if drafts is None:
                    drafts = not config.adaptive or self._payoff.allows(len(step.chunks))
                count = min(max_proposed, self._max_draft_tokens(seq.draft_state)) if drafts else 0
            if count:
                count = self._blocks.capacity_for_proposals(seq.cache, count)
            if count > 0:
                step.copies += self._blocks.allocate_for_proposals(seq.cache, count)
                chunk.num_tokens, chunk.draft = 1 + count, draft[:count]
                if not draft:
                    chunk.num_drafted, seq.draft_state.draft_lag = count, 0
                budget -= count

    def observe(self, seq: Sequence, item: ScheduledSequence, accepted: int) -> None:
        """Book that of what was proposed for `seq` the first `accepted` tokens were accepted."""
        counters, proposed = self._counters, item.num_proposed
        counters.spec_decode_num_drafts += 1
        counters.spec_decode_num_draft_tokens += proposed
        counters.spec_decode_num_accepted_tokens += accepted
        if item.num_drafted:
            counters.spec_decode_model_num_drafts += 1
            counters.spec_decode_model_num_draft_tokens += proposed
            counters.spec_decode_model_num_accepted_tokens += accepted
            self._payoff.add_accepted(accepted)
        if seq.draft_state is not None:
            if not item.num_drafted:
                seq.draft_state.draft_lag += accepted
            (seq.draft_state.drafted if item.num_drafted else seq.draft_state.pace).observe(proposed, accepted)

    def observe_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Learn how long a finished step took, before its proposals are booked."""
        if not self._config.drafts or not self._config.adaptive:
            return
        items = output.sequences
        self._payoff.finish_step()
        if not output.rerotations and all(i.start + 1 == i.num_known_tokens and not i.draft for i in items):
            self._payoff.observe(len(items), seconds, drafted=any(item.num_drafted for item in items))

    def _propose_ngram(self, seq: Sequence, draft_state: DraftState, max_proposed: int) -> tuple[int, ...]:
        """What followed the last tokens of a stream where they stood before, at most `max_proposed` of it."""
        if not draft_state.index.extend(seq.token_ids, _INDEXED_PER_STEP):
            return ()
        return draft_state.index.propose(seq.token_ids, min(max_proposed, draft_state.pace.limit()))

    def _max_draft_tokens(self, draft_state: DraftState) -> int:
        return draft_state.drafted.limit() if self._config.adaptive else self._config.draft_tokens
