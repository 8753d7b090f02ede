"""Grammar-constrained decoding: compiled grammars, a matcher per sample, and token bitmasks.

llguidance parses the grammars; it is imported when the first grammar arrives or the engine is idle, and then reads the bytes of
each token from the tokenizer's file. Grammars of different callers are compiled at the same time. A compiled grammar takes about
50 KB, and 10 MB if it lists 20,000 strings (`GRAMMAR_LIMITS` bounds it). Recently used ones are cached. Masks are computed in a
thread while the model computes the logits; rejected proposed tokens are rolled back.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windlass.engine.errors import RequestError
from windlass.engine.interface.validation import GRAMMAR_LIMITS, GRAMMAR_STACK_BYTES
from windlass.engine.process_setup import thread_stack_size
from windlass.engine.sampling.sample_slot import SampleSlot

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Allowed tokens. bits: int32 [ceil(V / 32)]; bit i % 32 of word i // 32 is set if token i is allowed, none if the matcher
    failed. complete: only the end of the output is allowed.
    """

    bits: Tensor
    complete: bool

    def allows(self, token_id: int) -> bool:
        return bool(int(self.bits[token_id // 32]) >> (token_id % 32) & 1)


def no_token(vocab_size: int) -> GrammarMask:
    """A mask that allows no token, for text outside the grammar."""
    return GrammarMask(torch.zeros(-(-vocab_size // 32), dtype=torch.int32), complete=False)


def next_mask(matcher: LLMatcher, vocab_size: int) -> GrammarMask:
    """The mask of the next token. Releases the interpreter's lock while it computes."""
    bits = no_token(vocab_size).bits
    matcher.unsafe_compute_mask_ptr(bits.data_ptr(), bits.nbytes)
    return GrammarMask(bits, matcher.is_stopped() and not matcher.is_error())


# -- compiler --

_MAX_CACHED = 64  # grammars that stay compiled although no request uses them
_MAX_COMPILING = 3  # grammars compiled at once, each of another caller

_MAX_ERROR_LENGTH = 500


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class CompiledGrammar:
    """A matcher without tokens, and the mask of the first one. While an object refers to it, it is not compiled again."""

    matcher: LLMatcher
    mask: GrammarMask


class GrammarCompiler:
    """Compiles and caches the grammars of one engine; thread-safe.

    directory: of the model. vocab_size: columns of the logits. eos_token_ids: tokens that end an output where its grammar allows.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file, self.vocab_size, self._eos = directory / "tokenizer.json", vocab_size, list(eos_token_ids)
        self._loading = threading.Lock()  # held while the vocabulary is read
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()  # held briefly: a step may wait for it
        self._compiled: weakref.WeakValueDictionary[str, CompiledGrammar] = weakref.WeakValueDictionary()
        self._recent: OrderedDict[str, CompiledGrammar] = OrderedDict()  # most recently used last
        # Grammars that wait or are compiled, by caller.
        self._queues: dict[str, list[tuple[str, Future[CompiledGrammar]]]] = {}
        self._pool = ThreadPoolExecutor(_MAX_COMPILING, thread_name_prefix="engine-grammar")

    def known(self, grammar: str) -> CompiledGrammar | None:
        """A grammar that is compiled already, for which `begin` only copies a matcher."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._mark_used(grammar, found)
            return found

    def prepare_in_background(self) -> None:
        """Read the vocabulary in the background: tenths of a second, during which no other Python code runs.

        Errors are reported with the first grammar.
        """
        if self._file.is_file():
            self._submit(self._prepare)

    def _prepare(self) -> None:
        with contextlib.suppress(RequestError):
            self._vocabulary()

    def compile_in_background(self, grammar: str, caller: str = "") -> Future[CompiledGrammar]:
        """Compile in the background; the future raises RequestError for a grammar that cannot be used.

        caller: its grammars are compiled one after another, short ones first, and in turns with those of others.
        """
        compiled: Future[CompiledGrammar] = Future()
        with self._lock:
            queue = self._queues.setdefault(caller, [])
            queue.append((grammar, compiled))
            is_first = len(queue) == 1
        if is_first:
            self._submit(self._compile_next, caller)
        return compiled

    def _compile_next(self, caller: str) -> None:
        with self._lock:
            queue = self._queues[caller]
            grammar, compiled = job = min(queue, key=_length)
        if compiled.set_running_or_notify_cancel():
            try:
                compiled.set_result(self._compile(grammar))
            except BaseException as error:  # panics of the library are not Exceptions
                compiled.set_exception(error)
        with self._lock:
            queue.remove(job)
            if not queue:
                del self._queues[caller]
        if queue:
            self._submit(self._compile_next, caller)

    def _submit(self, function: Callable[..., None], *args: Any) -> None:
        with thread_stack_size(2 * GRAMMAR_STACK_BYTES):  # this may start a thread
            self._pool.submit(function, *args)

    def begin(self, grammar: str) -> tuple[LLMatcher, GrammarMask]:
        """A new matcher, and the mask of the first token, which is shared and must not be changed.

        Raises RequestError for a grammar that cannot be used.
        """
        compiled = self.known(grammar) or self.compile_in_background(grammar).result()
        with self._lock:
            return compiled.matcher.deep_copy(), compiled.mask

    def _mark_used(self, grammar: str, compiled: CompiledGrammar) -> None:
        self._recent[grammar] = compiled
        self._recent.move_to_end(grammar)
        while len(self._recent) > _MAX_CACHED:
            self._recent.popitem(last=False)

    def _compile(self, grammar: str) -> CompiledGrammar:
        if (known := self.known(grammar)) is not None:
            return known
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**GRAMMAR_LIMITS))
        # The first mask of a large grammar takes longest. It is computed here, where no step waits for it.
        mask = None if matcher.is_error() else next_mask(matcher, self.vocab_size)
        if mask is None or matcher.is_error():
            reason = " ".join(matcher.get_error().split())[:_MAX_ERROR_LENGTH]
            raise RequestError(f"this grammar cannot be used: {reason}", "grammar")
        compiled = CompiledGrammar(matcher, mask)
        with self._lock:
            self._compiled[grammar] = compiled
            self._mark_used(grammar, compiled)
        return compiled

    def _vocabulary(self) -> LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._load_vocabulary()
            return self._tokenizer

    def _load_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos:
            raise RequestError("this model has no end-of-sequence token, which grammars need", "grammar")
        try:
            return LLTokenizer(str(self._file), n_vocab=self.vocab_size, eos_token=self._eos)
        except Exception as error:  # the library raises what its parts raise
            reason = " ".join(str(error).split())[:_MAX_ERROR_LENGTH]
            raise RequestError(
                f"no grammar can be used with this model: {self._file.name} does not give the bytes of its tokens ({reason})",
                "grammar",
            ) from None


def _length(job: tuple[str, Future[CompiledGrammar]]) -> int:
    return len(job[0])


# -- masks --

_MAX_PROPOSED = 64  # tokens at the end of a text that may be proposed ones; those before never change


class _SampleMatcher:
    """A matcher that follows the output of one sample. begin: the number of tokens before the output."""

    def __init__(self, matcher: LLMatcher, first: GrammarMask, begin: int) -> None:
        self._matcher, self._first, self._begin = matcher, first, begin
        self._consumed: list[int] = []  # tokens that the matcher has consumed

    def advance_to(self, token_ids: Sequence[int]) -> bool:
        """Move the matcher after these tokens. Returns False, with fewer tokens consumed, if the grammar does not allow them."""
        begin = self._begin
        shared = min(len(self._consumed), len(token_ids) - begin)
        for i in range(max(0, shared - _MAX_PROPOSED), shared):
            if self._consumed[i] != token_ids[begin + i]:
                shared = i
                break
        if shared < len(self._consumed):
            self._matcher.rollback(len(self._consumed) - shared)
            del self._consumed[shared:]
        new = list(token_ids[begin + shared :])
        # Validated first: consuming a token that is not allowed would put the matcher into an error state permanently.
        allowed = new[: self._matcher.validate_tokens(new)] if new else new
        if allowed and self._matcher.consume_tokens(allowed):
            self._consumed += allowed
        return len(self._consumed) == len(token_ids) - begin

    def mask(self, vocab_size: int) -> GrammarMask:
        """The mask of the next token. The first one was computed by the compiler, because it may take long."""
        return next_mask(self._matcher, vocab_size) if self._consumed else self._first


class GrammarMasks:
    """The masks of one engine's samples. One thread calls `prepare` before a forward pass and `mask` after it."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._matchers: dict[int, _SampleMatcher] = {}
        self._masks: dict[tuple[int, int], GrammarMask] = {}  # by sequence and number of tokens
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine-masks")
        self._pending: Future[None] | None = None

    def __len__(self) -> int:
        return len(self._matchers)

    def forget(self, seq_id: int) -> None:
        """Drop the matcher of a sequence; unknown ids are ignored."""
        self._wait()
        self._matchers.pop(seq_id, None)

    def prepare(self, slots: Sequence[SampleSlot]) -> None:
        """Start to compute the masks of a step. Slots of one sequence are adjacent and ordered by their number of tokens."""
        self._wait()
        self._masks.clear()
        if slots:
            self._pending = self._thread.submit(self._compute_all, slots)

    def mask(self, slot: SampleSlot) -> GrammarMask:
        """The mask after the slot's tokens, prepared or computed now. Raises RequestError as `GrammarCompiler.begin` does."""
        self._wait()
        key = (slot.seq_id, len(slot.token_ids))
        if key not in self._masks:
            self._compute_all([slot])
        return self._masks[key]

    def _wait(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def _compute_all(self, slots: Sequence[SampleSlot]) -> None:
        for slot in slots:
            self._masks[slot.seq_id, len(slot.token_ids)] = self._compute(slot)

    def _compute(self, slot: SampleSlot) -> GrammarMask:
        sample_matcher = self._matchers.get(slot.seq_id)
        if sample_matcher is None:
            assert slot.sampling.grammar is not None
            matcher, first = self._compiler.begin(slot.sampling.grammar)
            sample_matcher = self._matchers[slot.seq_id] = _SampleMatcher(matcher, first, slot.num_prompt_tokens)
        if not sample_matcher.advance_to(slot.token_ids):
            return no_token(self._compiler.vocab_size)
        return sample_matcher.mask(self._compiler.vocab_size)
