"""Which tokens each sample that has a grammar may draw next, as bits.

Responsible for a matcher per sample that follows its tokens, back as well as forth: proposed tokens are taken back where they
were not accepted. Masks are made in a thread while the model computes the logits that they meet. It draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from windlass.engine.sampling.grammar.compiler import GrammarCompiler
from windlass.engine.sampling.grammar.mask import GrammarMask, next_mask, no_token
from windlass.engine.sampling.slot import SampleSlot

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Tokens at the end of a text that may have been proposed only: those before never change.
_MAX_PROPOSED = 64


class _SampleMatcher:
    """A matcher that stands behind the output of one sample."""

    def __init__(self, matcher: LLMatcher, first: GrammarMask, begin: int) -> None:
        self._matcher, self._first, self._begin = matcher, first, begin
        self._taken: list[int] = []  # what the matcher has taken

    def advance_to(self, token_ids: Sequence[int]) -> bool:
        """Stand behind these tokens; False, with the matcher somewhere before, where the grammar has no such text."""
        begin = self._begin
        shared = min(len(self._taken), len(token_ids) - begin)
        for at in range(max(0, shared - _MAX_PROPOSED), shared):
            if self._taken[at] != token_ids[begin + at]:
                shared = at
                break
        self._rollback(shared)
        wanted = list(token_ids[begin + shared :])
        # Asked before they are taken: a token that does not fit would put the matcher into an error for good.
        fitting = wanted[: self._matcher.validate_tokens(wanted)] if wanted else wanted
        if fitting and self._matcher.consume_tokens(fitting):
            self._taken += fitting
        return len(self._taken) == len(token_ids) - begin

    def mask(self, vocab_size: int) -> GrammarMask:
        """Of the tokens after those it stands behind; the first was made with the matcher, since it may take long."""
        return next_mask(self._matcher, vocab_size) if self._taken else self._first

    def _rollback(self, count: int) -> None:
        if count < len(self._taken):
            self._matcher.rollback(len(self._taken) - count)
            del self._taken[count:]


class GrammarMasks:
    """The masks of one engine's samples. `prepare` before a forward pass, `mask` behind it; one thread calls both."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, _SampleMatcher] = {}
        self._made: dict[tuple[int, int], GrammarMask] = {}  # by sequence and number of its tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-masks")
        self._pending: Future[None] | None = None

    def __len__(self) -> int:
        return len(self._matchers)

    def forget(self, seq_id: int) -> None:
        """Drop what is kept for a sequence; unknown ids are ignored."""
        self._wait()
        self._matchers.pop(seq_id, None)

    def prepare(self, slots: Sequence[SampleSlot]) -> None:
        """Begin to make the masks of a step. Slots of one sequence, with more and more tokens proposed, follow each other."""
        self._wait()
        self._made.clear()
        if slots:
            self._pending = self._thread.submit(self._make_all, slots)

    def mask(self, slot: SampleSlot) -> GrammarMask:
        """The mask after the slot's tokens, prepared or made now. Raises RequestError, as `GrammarCompiler.matcher` does."""
        self._wait()
        key = (slot.seq_id, len(slot.token_ids))
        if key not in self._made:
            self._make_all([slot])
        return self._made[key]

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _make_all(self, slots: Sequence[SampleSlot]) -> None:
        for slot in slots:
            self._made[slot.seq_id, len(slot.token_ids)] = self._make(slot)

    def _make(self, slot: SampleSlot) -> GrammarMask:
        sample_matcher = self._matchers.get(slot.seq_id)
        if sample_matcher is None:
            assert slot.sampling.grammar is not None
            matcher, first = self._compiler.begin(slot.sampling.grammar)
            sample_matcher = self._matchers[slot.seq_id] = _SampleMatcher(matcher, first, slot.num_prompt_tokens)
        if not sample_matcher.advance_to(slot.token_ids):
            return no_token(self._compiler.vocab_size)
        return sample_matcher.mask(self._compiler.vocab_size)
