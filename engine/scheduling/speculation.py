"""Speculative decoding: proposed tokens of running streams, within the budget and blocks of a step.

A step of k + 1 rows costs little more than one of a single row while reading weights dominates. A stream proposes the k tokens
that followed an earlier occurrence of its last tokens (`ngram_proposer`); where there is none, a draft model or MTP head proposes k
tokens within the same step (`windlass.engine.execution`). Acceptance (`windlass.engine.sampling.acceptance`) keeps outputs
identical. The draft model is paused while measured step times show that it does not pay off.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.interface.config import SpeculationConfig
from windlass.engine.scheduling.ngram_proposer import DraftLengthController, DraftState, NgramIndex
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import PlannedStep, ScheduledSequence, SchedulerOutput
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


_WEIGHT = 0.1  # of the newest step in the averages

_PLAIN_EVERY = 64  # steps, after which one goes without the draft model, to compare with

_ENOUGH = 6  # measured steps, before anything is concluded

_UNSETTLED = 8  # first steps, which are slower: shapes that come for the first time are not repeated yet

_TRIAL = 7  # steps, the first of which is not measured

_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 256  # steps


@dataclass(slots=True)
class _Average:
    """Tokens and seconds of a step, each averaged by itself, so that their quotient is tokens per second."""

    tokens: float = 0.0
    seconds: float = 0.0
    num_steps: int = 0

    def add(self, tokens: int, seconds: float) -> None:
        self.num_steps += 1
        weight = max(_WEIGHT, 1 / self.num_steps)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


@dataclass(slots=True)
class _BatchSizeStats:
    """What is known of steps of about as many streams.

    skip_plain, skip_drafted: steps that are still not measured. wait: steps left of a pause; trial: steps left of a trial.
    """

    plain: _Average
    drafted: _Average
    skip_plain: int = _UNSETTLED
    skip_drafted: int = _UNSETTLED
    since_plain: int = 0
    pause: int = 0
    wait: int = 0
    trial: int = 0

    @property
    def is_slower(self) -> bool:
        """Whether tokens come slower with the draft model, once enough is known to tell."""
        plain, drafted = self.plain, self.drafted
        if plain.num_steps < _ENOUGH or drafted.num_steps < _ENOUGH:
            return False
        return drafted.tokens * plain.seconds < plain.tokens * drafted.seconds


class DraftPayoff:
    """Where drafting loses it pauses, 8, 16, … up to 256 steps, between trials of a few. Numbers of streams are told apart by
    powers of two."""

    def __init__(self) -> None:
        self._known: dict[int, _BatchSizeStats] = {}
        self._last: tuple[_Average, int, float] | None = None  # a step whose accepted tokens are still coming

    def allows(self, num_streams: int) -> bool:
        """Whether the next step, of so many streams, may draft; call it once per step that could."""
        found = self._of(num_streams)
        if found.wait > 0:
            found.wait -= 1
            return False
        if found.trial > 0:
            found.trial -= 1
            return True
        self.finish_step()
        if found.plain.num_steps < _ENOUGH:
            return False  # something to compare with
        if found.is_slower:
            found.pause = found.wait = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * found.pause))
            # A trial is judged by itself; in its first step the draft model computes what it has missed meanwhile.
            found.trial, found.drafted, found.skip_drafted = _TRIAL, _Average(), 1
            return False
        if found.drafted.num_steps >= _ENOUGH:
            found.pause = 0
        found.since_plain += 1
        if found.since_plain > _PLAIN_EVERY:
            found.since_plain = 0
            return False
        return True

    def observe(self, num_streams: int, seconds: float, *, drafted: bool) -> None:
        """Learn from a step in which every stream had its next token computed, and nothing else was, how long it took."""
        found = self._of(num_streams)
        if drafted and found.skip_drafted > 0:
            found.skip_drafted -= 1
        elif not drafted and found.skip_plain > 0:
            found.skip_plain -= 1
        else:
            self._last = (found.drafted if drafted else found.plain), num_streams, seconds

    def add_accepted(self, num_tokens: int) -> None:
        """Add accepted tokens to the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = average, tokens + num_tokens, seconds

    def finish_step(self) -> None:
        """Nothing more was accepted of the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = None
            average.add(tokens, seconds)

    def _of(self, num_streams: int) -> _BatchSizeStats:
        return self._known.setdefault(num_streams.bit_length(), _BatchSizeStats(_Average(), _Average()))
