"""Where tokens begin in the text that they make. Knows a tokenizer's tokens; no layouts and no log-probabilities."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer


class TextOffsets:
    """Where each token begins in the text, in characters, counted from `start`.

    A token that continues a character begins where that character does; special tokens that are left out of the text
    take no room.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = start

    def advance(self, token_id: int) -> int:
        """The offset of this token; the next call is for the token after it."""
        start = self._position
        if token_id not in self._skipped:
            self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start

    @property
    def position(self) -> int:
        """Where the next token will begin."""
        return self._position
