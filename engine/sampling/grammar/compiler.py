"""Turns grammars into matchers: the vocabulary they need, and the grammars that were compiled before.

Responsible for doing slow work once and beside the steps. llguidance is imported when the first grammar comes, and then the
tokenizer's file is read for the bytes behind each id: nothing else in the engine knows them, and nothing else is done with them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.engine.api.grammar_limits import LIMITS
from windlass.engine.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 64  # grammars that are not compiled again
_LONGEST_ERROR = 500


class GrammarCompiler:
    """One per engine; any thread may use it.

    directory: of the model. vocab_size: columns of the logits. eos_token_ids: what ends an output where its grammar lets it.
    """

    def __init__(self, directory: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file, self._vocab_size, self._eos = directory / "tokenizer.json", vocab_size, list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._fresh: OrderedDict[str, LLMatcher] = OrderedDict()  # matchers at their beginning, the last used ones last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine-grammar")

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def has(self, grammar: str) -> bool:
        """Whether a matcher of it costs no more than a copy."""
        return grammar in self._fresh

    def compile_soon(self, grammar: str) -> Future[None]:
        """Compile in the background; the future raises what `matcher` would."""
        return self._pool.submit(self._compile, grammar)

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher at its beginning, the caller's own. Raises RequestError for one that cannot be used."""
        self._compile(grammar)
        with self._lock:
            return self._fresh[grammar].deep_copy()

    def _compile(self, grammar: str) -> None:
        with self._lock:
            if grammar in self._fresh:
                self._fresh.move_to_end(grammar)
                return
            from llguidance import LLMatcher, LLParserLimits

            matcher = LLMatcher(self._vocabulary(), grammar, log_level=0, limits=LLParserLimits(**LIMITS))
            if matcher.is_error():
                reason = " ".join(matcher.get_error().split())[:_LONGEST_ERROR]
                raise RequestError(f"this grammar cannot be used: {reason}", "grammar")
            self._fresh[grammar] = matcher
            while len(self._fresh) > _KEPT:
                self._fresh.popitem(last=False)

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
