"""Speculative decoding by prompt lookup: which tokens a running stream proposes beside its own, and how many.

A step of k + 1 rows costs little more than one of a single row as long as reading the weights is what takes time. So a
stream may propose the k tokens that followed its last tokens where those stood before (`ngram`); the step computes
them all, and those that the model would have drawn itself are kept. Nothing about the answer changes.

Responsible for what is proposed, within what a step may hold, and for how eager a sequence is. Whether a proposal holds
is found by `verify`.
"""

from __future__ import annotations

from dataclasses import dataclass

from windlass.engine.api.config import SpeculationConfig
from windlass.engine.cache.blocks import BlockManager
from windlass.engine.scheduling.counters import SchedulerCounters
from windlass.engine.scheduling.ngram import NgramIndex
from windlass.engine.scheduling.plan_writer import PlannedChunk, PlannedStep
from windlass.engine.scheduling.sequence import Sequence

_INDEXED_PER_STEP = 2048  # of a long prompt, so that no step waits for an index; no proposals before it is complete
_LONGEST_PAUSE = 64


class Pace:
    """How many tokens one sequence may propose next, learnt from what became of its earlier proposals.

    Proposals that hold double the next one; one that fails outright halves it. A sequence that fails with a single
    token pauses, for 1 step at first, then 2, 4, … up to 64: so a text that never repeats itself ends up computing one
    row in 64 for nothing, which bounds the loss even where every row costs its full price (many streams at once).
    """

    __slots__ = ("_limit", "_most", "_pause", "_wait")

    def __init__(self, most: int) -> None:
        self._most = self._limit = most
        self._pause = 0  # length of the last one
        self._wait = 0  # steps left of this one

    def limit(self) -> int:
        """Tokens that may be proposed in this step; call it once per step."""
        if self._wait > 0:
            self._wait -= 1
            return 0
        return self._limit

    def observe(self, proposed: int, accepted: int) -> None:
        """Learn that of `proposed` tokens the first `accepted` held."""
        if accepted:
            self._pause = 0
            self._limit = min(self._most, 2 * proposed if accepted == proposed else accepted + 1)
        elif proposed > 1:
            self._limit = proposed // 2
        else:
            self._limit = 1
            self._pause = self._wait = min(_LONGEST_PAUSE, max(1, 2 * self._pause))


@dataclass(slots=True)
class Drafting:
    """What one sequence remembers of its own text and proposals."""

    index: NgramIndex
    pace: Pace


class Speculation:
    """Adds proposals to planned steps. max_model_len, max_num_batched_tokens: the scheduler's limits."""

    def __init__(
        self,
        config: SpeculationConfig,
        blocks: BlockManager,
        counters: SchedulerCounters,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._counters = counters
        self._max_model_len = max_model_len
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
        depend on the length, all must stand under those of the moment.
        """
        length, sampling = seq.num_tokens, seq.request.sampling
        room = min(sampling.max_tokens - seq.num_output_tokens, self._max_model_len - length) - 1
        last = seq.stage.last_length
        return room if last is None else min(room, last - length)
