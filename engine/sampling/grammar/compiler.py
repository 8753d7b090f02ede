"""Turns grammars into matchers: the vocabulary they need, and the grammars that were compiled before.

Responsible for doing slow work once and beside the steps: a compiled grammar is found here as long as anybody holds it, and the
last used ones are kept for requests to come. One takes some 50 KB as a rule and 10 MB where it lists 20,000 strings; what it may
take at most, `grammar_limits` says. llguidance is imported when the first grammar comes or there is nothing else to do, and then
the tokenizer's file is read for the bytes behind each id: nothing else in the engine knows them, and nothing else is done with
them.
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

from windlass.engine.api.grammar_limits import GRAMMAR_LIMITS
from windlass.engine.errors import RequestError
from windlass.engine.sampling.grammar.mask import GrammarMask, next_mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

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
