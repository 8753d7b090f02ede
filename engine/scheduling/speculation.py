"""Speculative decoding: proposed tokens of running streams, within the budget and blocks of a step.

A step of k + 1 rows costs little more than one of a single row while reading weights dominates. A stream proposes the k tokens
that followed an earlier occurrence of its last tokens (n-gram proposer, prompt lookup: arXiv 2304.04487,
github.com/apoorvumang/prompt-lookup-decoding); if there is none, a draft model or MTP layer proposes k tokens within the same
step (`windlass.engine.execution`). Acceptance (`windlass.engine.sampling.acceptance`) keeps outputs identical. The number of
proposed tokens adapts to past acceptance, and the draft model is paused while measured step times show that it does not pay off.
"""

from __future__ import annotations

import sys
from array import array
from collections import abc
from dataclasses import dataclass, field

from windlass.engine.cache.block_manager import BlockManager
from windlass.engine.interface.config import SpeculationConfig
from windlass.engine.scheduling.scheduler_counters import SchedulerCounters
from windlass.engine.scheduling.scheduler_output import ScheduledSequence, SchedulerOutput, SchedulerOutputBuilder
from windlass.engine.scheduling.sequence import Sequence

# Tokens of a prompt indexed per step, so that no step waits for the index of a long one. Proposals begin when it is complete.
_INDEXED_PER_STEP = 2048

# The draft model computes a longer lag only if it tracks all tokens; otherwise that would delay the other streams.
_MAX_DRAFT_LAG = 64


@dataclass(slots=True)
class Speculation:
    """Adds proposals to planned steps. max_num_batched_tokens: the scheduler's limit.

    draft_tracks_all_tokens: whether the draft model also computes tokens of streams that do not use its proposals in a step,
    as an MTP layer and a model with recurrent states do.
    """

    _config: SpeculationConfig
    _blocks: BlockManager
    _counters: SchedulerCounters
    _max_num_batched_tokens: int
    _draft_tracks_all_tokens: bool
    _payoff: DraftPayoff = field(default_factory=lambda: DraftPayoff())
    _states: dict[int, _DraftState] = field(default_factory=dict)  # by sequence

    def extend(self, step: SchedulerOutputBuilder) -> None:
        """Add proposed tokens to streams of a planned step, from the budget and blocks it leaves unused.

        A proposal therefore takes nothing from a prompt and causes no preemption.
        """
        config = self._config
        if config.max_proposed_tokens == 0:
            return
        budget = self._max_num_batched_tokens - sum(chunk.num_tokens for chunk in step.chunks)
        max_draft_lag = sys.maxsize if self._draft_tracks_all_tokens else _MAX_DRAFT_LAG
        uses_draft_model = None  # decided once per step, when the first stream needs it
        for chunk in step.chunks:
            if budget <= 0:
                return
            seq = chunk.seq
            state = self._states.get(seq.seq_id)
            if not chunk.is_next_token:
                if state is not None:
                    state.draft_lag = 0  # the draft model computes prompts and recomputed tokens too
                continue
            if state is None:
                state = self._states[seq.seq_id] = _DraftState(
                    NgramIndex(config.min_match, config.max_match),
                    DraftLengthController(config.num_tokens),
                    DraftLengthController(config.draft_tokens),
                )
            state.draft_lag += 1
            max_proposed = min(budget, seq.num_lookahead_tokens)
            if max_proposed < 1:
                continue
            draft = _propose_ngram(seq, state, max_proposed) if config.num_tokens else ()
            count = len(draft)
            if not draft and config.drafts and state.draft_lag <= max_draft_lag:
                if uses_draft_model is None:
                    uses_draft_model = not config.adaptive or self._payoff.allows(len(step.chunks))
                if uses_draft_model:
                    limit = state.model_length.limit() if config.adaptive else config.draft_tokens
                    count = min(max_proposed, limit)
            if count:
                count = self._blocks.capacity_for_proposals(seq.cache, count)
            if count > 0:
                step.copies += self._blocks.allocate_for_proposals(seq.cache, count)
                chunk.num_tokens, chunk.draft = 1 + count, draft[:count]
                if not draft:
                    chunk.num_drafted, state.draft_lag = count, 0
                budget -= count

    def observe(self, seq: Sequence, item: ScheduledSequence, accepted: int) -> None:
        """Record that the first `accepted` of the tokens proposed for `seq` were accepted."""
        counters, proposed = self._counters, item.num_proposed
        counters.spec_decode_num_drafts += 1
        counters.spec_decode_num_draft_tokens += proposed
        counters.spec_decode_num_accepted_tokens += accepted
        if item.num_drafted:
            counters.spec_decode_model_num_drafts += 1
            counters.spec_decode_model_num_draft_tokens += proposed
            counters.spec_decode_model_num_accepted_tokens += accepted
            self._payoff.add_accepted(accepted)
        state = self._states.get(seq.seq_id)
        if state is not None:
            if not item.num_drafted:
                state.draft_lag += accepted
            (state.model_length if item.num_drafted else state.ngram_length).observe(proposed, accepted)

    def observe_step(self, output: SchedulerOutput, seconds: float) -> None:
        """Record the duration of a finished step, before `observe` records what was accepted."""
        if not self._config.drafts or not self._config.adaptive:
            return
        items = output.sequences
        self._payoff.finish_step()
        if not output.rerotations and all(i.start + 1 == i.num_known_tokens and not i.draft for i in items):
            self._payoff.observe(len(items), seconds, drafted=any(item.num_drafted for item in items))

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence; unknown ids are ignored."""
        self._states.pop(seq_id, None)


@dataclass(slots=True)
class _DraftState:
    """State of one sequence. draft_lag: tokens that the draft model has not computed."""

    index: NgramIndex
    ngram_length: DraftLengthController
    model_length: DraftLengthController
    draft_lag: int = 0


def _propose_ngram(seq: Sequence, state: _DraftState, max_proposed: int) -> tuple[int, ...]:
    if not state.index.extend(seq.token_ids, _INDEXED_PER_STEP):
        return ()
    return state.index.propose(seq.token_ids, min(max_proposed, state.ngram_length.limit()))


# -- n-gram proposer --

_MAX_CANDIDATES = 16  # earlier positions compared per proposal, latest first


class NgramIndex:
    """Positions of each run of `min_match` tokens, updated token by token; about 200 bytes per token.

    A dictionary holds the latest position of a run, and an array links each position to the previous one. Neither an
    extension nor a proposal therefore costs more as the text grows. max_match: longer matches are not distinguished.
    """

    __slots__ = ("_latest", "_max_match", "_min_match", "_previous")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min_match = min_match
        self._max_match = max_match
        self._latest: dict[tuple[int, ...], int] = {}
        # A position is the index of the token after the run, so the first `min_match` tokens have none.
        self._previous = array("q", [-1] * min_match)

    def extend(self, token_ids: abc.Sequence[int], max_tokens: int) -> bool:
        """Index up to `max_tokens` new tokens of the growing list. Returns whether the index is complete."""
        n, latest, previous = self._min_match, self._latest, self._previous
        for position in range(len(previous), min(len(token_ids), len(previous) + max_tokens)):
            run = tuple(token_ids[position - n : position])
            previous.append(latest.get(run, -1))
            latest[run] = position
        return len(previous) >= len(token_ids)

    def propose(self, token_ids: abc.Sequence[int], count: int) -> tuple[int, ...]:
        """The `count` tokens that followed an earlier occurrence of the last tokens, or none.

        The position with the longest match is used, the latest among equals. If the text from there to the end is
        shorter than `count`, it is repeated.
        """
        length = len(token_ids)
        if length < self._min_match or count < 1:
            return ()
        position = self._latest.get(tuple(token_ids[length - self._min_match :]), -1)
        best, longest = -1, 0
        for _ in range(_MAX_CANDIDATES):
            if position < 0:
                break
            matched = self._match_length(token_ids, position)
            if matched > longest:
                best, longest = position, matched
            if matched == self._max_match:
                break
            position = self._previous[position]
        if best < 0:
            return ()
        period = length - best
        return tuple(token_ids[best + i % period] for i in range(count))

    def _match_length(self, token_ids: abc.Sequence[int], position: int) -> int:
        """Number of tokens before `position` that equal those before the end: min_match .. max_match."""
        length, matched, limit = len(token_ids), self._min_match, min(self._max_match, position)
        while matched < limit and token_ids[position - 1 - matched] == token_ids[length - 1 - matched]:
            matched += 1
        return matched


# -- adaptation to acceptance and step times --

_LONGEST_LENGTH_PAUSE = 64  # steps


class DraftLengthController:
    """Number of tokens that one sequence may propose next, adapted to the acceptance of its earlier proposals.

    A proposal that is accepted entirely doubles the next one; one that is rejected entirely halves it. A sequence whose single
    proposed token is rejected pauses, for 1 step at first, then 2, 4, … up to 64. A text that never repeats itself then
    computes one row in 64 for nothing, which bounds the loss even if every row costs its full price (many streams at once).
    """

    __slots__ = ("_limit", "_max_tokens", "_pause", "_wait")

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = self._limit = max_tokens
        self._pause = 0  # length of the last pause
        self._wait = 0  # steps left of this one

    def limit(self) -> int:
        """Tokens that may be proposed in this step; call it once per step."""
        if self._wait > 0:
            self._wait -= 1
            return 0
        return self._limit

    def observe(self, proposed: int, accepted: int) -> None:
        """Record that the first `accepted` of `proposed` tokens were accepted."""
        if accepted:
            self._pause = 0
            self._limit = min(self._max_tokens, 2 * proposed if accepted == proposed else accepted + 1)
        elif proposed > 1:
            self._limit = proposed // 2
        else:
            self._limit = 1
            self._pause = self._wait = min(_LONGEST_LENGTH_PAUSE, max(1, 2 * self._pause))


_WEIGHT = 0.1  # of the newest step in the averages

_PLAIN_EVERY = 64  # steps after which one is computed without the draft model, for comparison

_MIN_MEASURED = 6  # steps measured before a decision

_NUM_WARMUP = 8  # first steps, which are slower: shapes that occur for the first time are not recorded yet

_TRIAL = 7  # steps, the first of which is not measured

_SHORTEST_PAUSE, _LONGEST_PAUSE = 8, 256  # steps


@dataclass(slots=True)
class _Average:
    """Tokens and seconds of a step, each averaged separately, so that their quotient is tokens per second."""

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
    """Measurements of steps with a similar number of streams.

    skip_plain, skip_drafted: steps that are not measured yet. wait: steps left of a pause; trial: steps left of a trial.
    """

    plain: _Average
    drafted: _Average
    skip_plain: int = _NUM_WARMUP
    skip_drafted: int = _NUM_WARMUP
    since_plain: int = 0
    pause: int = 0
    wait: int = 0
    trial: int = 0

    @property
    def is_slower(self) -> bool:
        """Whether the draft model lowers the token rate, once enough steps are measured."""
        plain, drafted = self.plain, self.drafted
        if plain.num_steps < _MIN_MEASURED or drafted.num_steps < _MIN_MEASURED:
            return False
        return drafted.tokens * plain.seconds < plain.tokens * drafted.seconds


class DraftPayoff:
    """Decides by measured token rates whether the draft model is used.

    While it is slower, it pauses for 8, 16, … up to 256 steps between short trials. Numbers of streams are grouped by powers
    of two.
    """

    def __init__(self) -> None:
        self._known: dict[int, _BatchSizeStats] = {}
        self._last: tuple[_Average, int, float] | None = None  # a step whose accepted tokens are not complete

    def allows(self, num_streams: int) -> bool:
        """Whether the next step may use the draft model; call it once per step in which it could be used."""
        stats = self._of(num_streams)
        if stats.wait > 0:
            stats.wait -= 1
            return False
        if stats.trial > 0:
            stats.trial -= 1
            return True
        self.finish_step()
        if stats.plain.num_steps < _MIN_MEASURED:
            return False
        if stats.is_slower:
            stats.pause = stats.wait = min(_LONGEST_PAUSE, max(_SHORTEST_PAUSE, 2 * stats.pause))
            # A trial has its own average; in its first step the draft model computes what it missed during the pause.
            stats.trial, stats.drafted, stats.skip_drafted = _TRIAL, _Average(), 1
            return False
        if stats.drafted.num_steps >= _MIN_MEASURED:
            stats.pause = 0
        stats.since_plain += 1
        if stats.since_plain > _PLAIN_EVERY:
            stats.since_plain = 0
            return False
        return True

    def observe(self, num_streams: int, seconds: float, *, drafted: bool) -> None:
        """Record the duration of a step that computed the next token of every stream and nothing else."""
        stats = self._of(num_streams)
        if drafted and stats.skip_drafted > 0:
            stats.skip_drafted -= 1
        elif not drafted and stats.skip_plain > 0:
            stats.skip_plain -= 1
        else:
            self._last = (stats.drafted if drafted else stats.plain), num_streams, seconds

    def add_accepted(self, num_tokens: int) -> None:
        """Add accepted tokens to the step that was observed last."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = average, tokens + num_tokens, seconds

    def finish_step(self) -> None:
        """End the step that was observed last: all of its accepted tokens have been added."""
        if self._last is not None:
            average, tokens, seconds = self._last
            self._last = None
            average.add(tokens, seconds)

    def _of(self, num_streams: int) -> _BatchSizeStats:
        return self._known.setdefault(num_streams.bit_length(), _BatchSizeStats(_Average(), _Average()))
