"""Grammar-constrained decoding: compiled grammars, a matcher per sample, and token bitmasks.

llguidance parses the grammars; it is imported when the first grammar arrives or the engine is idle, and then reads the bytes of each
token from the tokenizer's file. A compiled grammar takes about 50 KB, and 10 MB where it lists 20,000 strings (`grammar_limits` is the bound).
Recently used ones are cached. Masks are computed in a thread while the model computes the logits; rejected proposed tokens are
rolled back.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from windlass.engine.errors import RequestError
from windlass.engine.interface.validation import GRAMMAR_LIMITS
from windlass.engine.sampling.sample_slot import SampleSlot

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """bits: int32 [ceil(V / 32)], bit i % 32 of word i // 32 set where token i may come; none are where the matcher failed.

    complete: nothing may follow but an end.
    """

    bits: Tensor
    complete: bool

    def allows(self, token_id: int) -> bool:
        return bool(int(self.bits[token_id // 32]) >> (token_id % 32) & 1)


def no_token(vocab_size: int) -> GrammarMask:
    """The mask of a text that the grammar does not have."""
    return GrammarMask(torch.zeros(-(-vocab_size // 32), dtype=torch.int32), complete=False)


def next_mask(matcher: LLMatcher, vocab_size: int) -> GrammarMask:
    """What may come where the matcher stands. The interpreter's lock is released meanwhile."""
    bits = no_token(vocab_size).bits
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
    return GrammarMask(bits, matcher.is_stopped() and not matcher.is_error())


_MAX_CACHED = 64  # grammars that are not compiled again though nobody holds them

_LONGEST_ERROR = 500


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class CompiledGrammar:
    """A matcher that has taken no token, and what it lets come first. No step compiles it as long as somebody holds it."""

    matcher: LLMatcher
    mask: GrammarMask


class GrammarCompiler:
    """One per engine; any thread may use it.

    directory: of the model. vocab_size: columns of the logits. eos_token_ids: what ends an output where its grammar lets it.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file, self._vocab_size, self._eos = directory / "tokenizer.json", vocab_size, list(eos_token_ids)
        self._compiling = threading.Lock()  # held for as long as a grammar takes
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()  # held for a moment: a step may wait for it
        self._compiled: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, CompiledGrammar] = OrderedDict()  # the last used ones last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine-grammar")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def known(self, grammar: str) -> CompiledGrammar | None:
        """One that was compiled before: a matcher of it costs no more than a copy."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._mark_used(grammar, found)
            return found

    def prepare_in_background(self) -> None:
        """Make in the background what any grammar needs: tenths of a second, in which no other Python code runs here.

        What is wrong with the model is told when a grammar comes.
        """
        if self._file.is_file():
            self._pool.submit(self._prepare)

    def _prepare(self) -> None:
        with self._compiling, contextlib.suppress(RequestError):
            self._vocabulary()

    def compile_in_background(self, grammar: str) -> Future[CompiledGrammar]:
        """Compile in the background; the future raises what `matcher` would."""
        return self._pool.submit(self._compile, grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at its beginning, the caller's own. Raises RequestError for one that cannot be used."""
        return self.begin(grammar)[0]

    def begin(self, grammar: str) -> tuple[LLMatcher, GrammarMask]:
        """The same with the mask of the first token, which is shared and never written to."""
        compiled = self.known(grammar) or self._compile(grammar)
        with self._lock:
            return compiled.matcher.deep_copy(), compiled.mask

    def _mark_used(self, grammar: str, compiled: CompiledGrammar) -> None:
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        while len(self._recent) > _MAX_CACHED:
            self._recent.popitem(last=False)

    def _compile(self, grammar: str) -> CompiledGrammar:
        with self._compiling:
            if (known := self.known(grammar)) is not None:
                return known
            from llguidance import LLMatcher, LLParserLimits

            matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
            # The first mask of a large grammar takes longer than any other: it is made here, where no step waits for it.
            mask = None if matcher.is_error() else next_mask(matcher, self._vocab_size)
            if mask is None or matcher.is_error():
                reason = " ".join(matcher.get_error().split())[:_LONGEST_ERROR]
                raise RequestError(f"this grammar cannot be used: {reason}", "grammar")
            compiled = CompiledGrammar(matcher, mask)
        with self._lock:
            self._compiled[grammar] = compiled
            self._mark_used(grammar, compiled)
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            if not self._eos:
                raise RequestError("this model names no token that ends an answer, which grammars need", "grammar")
            try:
                self._tokenizer = LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._eos)
            except Exception as error:  # the library raises what its parts raise
                reason = " ".join(str(error).split())[:_LONGEST_ERROR]
                raise RequestError(
                    f"no grammar can be used with this model: {self._file.name} does not tell the bytes of its tokens ({reason})",
                    "grammar",
                ) from None
        return self._tokenizer


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
