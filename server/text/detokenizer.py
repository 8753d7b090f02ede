"""Incremental detokenization with stop strings and limits of lines."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from windlass.server.text.token_pieces import PieceDecoder
from windlass.server.text.tokenizer import Tokenizer

_INDENT_CHARACTERS = " \t"


@dataclass(frozen=True, slots=True)
class LineLimits:
    """indent: the fewest blanks that a line begins with, the first one apart; 0 for no such limit.

    seconds: after which an answer with a whole line ends; None for no such limit.
    """

    indent: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class LineLimiter:
    """Follows one answer. The blanks that a line begins with are held back until it is known whether the line stays."""

    limits: LineLimits
    ended: bool = False
    _held: str | None = field(default=None)  # blanks of a line that has begun; None within a line
    _lines: int = 0

    def feed(self, text: str, seconds: float) -> str:
        """What of `text` may be sent. seconds: since the answer's first token. `ended` tells whether nothing may follow."""
        if self.ended:
            return ""
        sent = self._until_short_indent(text) if self.limits.indent else text
        self._lines += text.count("\n")
        late = self.limits.seconds is not None and seconds > self.limits.seconds
        self.ended = self.ended or (late and self._lines > 0)
        return sent

    def flush(self) -> str:
        """What was held back, at an end that others found."""
        held, self._held = self._held, None
        return "" if self.ended else held or ""

    def _until_short_indent(self, text: str) -> str:
        """The text up to the first line that is indented too little."""
        sent: list[str] = []
        position = 0
        while position < len(text):
            if self._held is None:
                end = text.find("\n", position) + 1
                if not end:
                    sent.append(text[position:])
                    break
                sent.append(text[position:end])
                self._held, position = "", end
                continue
            end = position
            while end < len(text) and text[end] in _INDENT_CHARACTERS:
                end += 1
            self._held += text[position:end]
            position = end
            if position < len(text):
                if len(self._held) < self.limits.indent:
                    self.ended = True
                    break
                sent.append(self._held)
                self._held = None
        return "".join(sent)


_REPLACEMENT = "\ufffd"

_MAX_PROMPT_TAIL = 64  # tokens at the end of a prompt that are looked at

_WINDOW = 6  # tokens of context for decoders that cannot be taken apart

_MAX_PENDING = 5  # a character has at most 4 bytes, so at most 4 tokens


def _replace_every_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# `tokenizers` marks each stray byte token by itself, where a byte-level decoder marks a broken character once.
codecs.register_error("windlass.replace_every_byte", _replace_every_byte)


class _TextStream(Protocol):
    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class _PromptState:
    """What a prompt leaves for the text behind it: worked out once for all samples of a request."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]) -> None:
        self.last = [token_id for token_id in prompt[-_MAX_PROMPT_TAIL:] if token_id not in skipped]
        stream = None if tokenizer.pieces is None else _PieceStream(tokenizer, tokenizer.pieces, skipped)
        self._initial_stream = stream if stream is None else stream.after_prompt(prompt, self.last)

    def stream(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> _TextStream:
        if self._initial_stream is None:
            return _WindowStream(tokenizer, self.last, skipped)
        return self._initial_stream.copy()


class _PieceStream:
    """Joins the bytes of tokens and decodes them as they complete: exact, and constant work per token."""

    def __init__(self, tokenizer: Tokenizer, pieces: PieceDecoder, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._pieces = pieces
        self._skipped = skipped
        self._first = True
        self._strip = pieces.strip_left
        self._strip_bytes = pieces.strip_char.encode("utf-8", "replace")
        errors = "windlass.replace_every_byte" if pieces.byte_fallback else "replace"
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def copy(self) -> _PieceStream:
        """Another one in the same state."""
        other = _PieceStream(self._tokenizer, self._pieces, self._skipped)
        other._first, other._strip = self._first, self._strip
        other._utf8.setstate(self._utf8.getstate())
        return other

    def after_prompt(self, prompt: Sequence[int], last: Sequence[int]) -> _PieceStream:
        """With the state that the prompt leaves: whether a text has begun, and a character it may end within."""
        begin = self._first_text_index(prompt)
        for position in range(begin, len(prompt)):
            self._bytes(prompt[position])
            if not self._strip:
                break
        tail = b""
        for token_id in reversed(last):
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 4:
                break
        self._utf8.decode(tail)
        unfinished = self._utf8.getstate()[0]
        self._utf8.reset()
        self._utf8.decode(unfinished)
        return self

    def _first_text_index(self, prompt: Sequence[int]) -> int:
        """Where the first token with a text stands. A prompt may be nothing but others, so each id of them is looked at once."""
        for few in (prompt[:_MAX_PROMPT_TAIL], prompt):
            for token_id in dict.fromkeys(few):
                if token_id not in self._skipped and self._tokenizer.backend.id_to_token(token_id) is not None:
                    return prompt.index(token_id)
        return len(prompt)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        if self._first:
            token = self._tokenizer.backend.id_to_token(token_id)
            if token is None:
                return b""
            data = self._pieces.decode_token(token, first=True)
            self._first = False
        else:
            data = self._tokenizer.token_bytes(token_id)
        while self._strip and data:
            if not data.startswith(self._strip_bytes):
                self._strip = 0
                break
            data = data[len(self._strip_bytes) :]
            self._strip -= 1
        return data

    def feed(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowStream:
    """Decodes a little context with and without the new tokens and takes the difference: for any decoder."""

    def __init__(self, tokenizer: Tokenizer, last: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = list(last[-_WINDOW:])
        self._pending: list[int] = []

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        return self._take(len(self._pending) >= _MAX_PENDING)

    def flush(self) -> str:
        return self._take(True)

    def _take(self, whole: bool) -> str:
        if not self._pending:
            return ""
        tokens = self._context + self._pending
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        if not whole and text.endswith(_REPLACEMENT):
            return ""
        known = len(self._tokenizer.decode(self._context, skip_special_tokens=False))
        self._context = tokens[-_WINDOW:]
        self._pending = []
        return text[known:]


class _StopMatcher:
    """Finds the stop string that completes first, character by character, so the answer never depends on chunks.

    One Knuth-Morris-Pratt automaton per stop string: its state is how much of the string the text so far ends with,
    which is also how much must be held back. Of two strings that complete at the same character the longer one counts.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_stop
        self._failure = [_failure_table(string) for string in self._stop]
        self._state = [0] * len(self._stop)
        self._begins = frozenset(string[0] for string in self._stop)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to send now, and the stop string if one is complete (what follows it is dropped)."""
        if not self._held and self._begins.isdisjoint(text):
            return text, None
        buffer = self._held + text
        for position in range(len(self._held), len(buffer)):
            matched = self._advance(buffer[position])
            if matched is not None:
                self._held = ""
                end = position + 1
                return buffer[: end if self._include else end - len(matched)], matched
        safe = len(buffer) - max(self._state)
        self._held = buffer[safe:]
        return buffer[:safe], None

    def _advance(self, char: str) -> str | None:
        matched: str | None = None
        for index, string in enumerate(self._stop):
            state = self._state[index]
            failure = self._failure[index]
            while state and string[state] != char:
                state = failure[state - 1]
            if string[state] == char:
                state += 1
            if state == len(string):
                if matched is None or len(string) > len(matched):
                    matched = string
                state = failure[state - 1]
            self._state[index] = state
        return matched

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _failure_table(string: str) -> list[int]:
    """table[i]: length of the longest proper prefix of string[: i + 1] that is also its suffix."""
    table = [0] * len(string)
    state = 0
    for index in range(1, len(string)):
        while state and string[index] != string[state]:
            state = table[state - 1]
        state += string[index] == string[state]
        table[index] = state
    return table


class Detokenizer:
    """The text side of one sample of a request.

    The text is what the tokens add behind the prompt: decode(prompt + tokens) without decode(prompt), so that a
    sentencepiece token keeps its leading space when a prompt stands before it. One difference, on malformed output
    only: with byte fallback tokens a valid character is sent when complete, even if stray bytes follow it.

    stop: non-empty strings; generation should end when one completes. include_stop: leave it in the text.
    min_tokens: text of the first so many tokens is never searched for stop strings.
    shown: special tokens that stay in the text although others are skipped.
    like: that of another sample with the same prompt and the same options, which spares reading the prompt.
    stopped: the stop string that matched. num_tokens: tokens taken, the one that completed the stop string included and
    later ones not. pieces: the text that the last `push` returned, by the token that released it; more at the end.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
        sibling: Detokenizer | None = None,
    ) -> None:
        if not all(stop):
            raise ValueError("stop strings must not be empty")
        skipped = tokenizer.special_token_ids - shown if skip_special_tokens else frozenset()
        self._prompt_state: _PromptState
        self._prompt_state = (
            _PromptState(tokenizer, prompt_token_ids, skipped) if sibling is None else sibling._prompt_state
        )
        self._stream = self._prompt_state.stream(tokenizer, skipped)
        self._matcher = _StopMatcher(stop, include_stop) if stop else None
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._done = False
        self.stopped: str | None = None
        self.num_tokens = 0
        self.pieces: list[str] = []

    @property
    def text(self) -> str:
        """Everything `push` has returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int], *, hide_last: bool = False, final: bool = False) -> str:
        """Take new tokens; returns the text that became safe to send, possibly none.

        hide_last: the last token ended the generation (an eos or stop id): counted, but not part of the text.
        final: nothing follows, so text held back comes out, a broken last character as U+FFFD. After that, and after a
        stop string matched, further calls return nothing.
        """
        if self._done:
            return ""
        safe: list[str] = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if hide_last and index == last:
                break
            safe.append(self._match(self._stream.feed(token_id), self.num_tokens > self._min_tokens))
            if self._done:
                break
        if final and not self._done:
            safe.append(self._match(self._stream.flush(), self.num_tokens > self._min_tokens))
            if self._matcher is not None and not self._done:
                safe.append(self._matcher.flush())
            self._done = True
        self.pieces = safe
        text = "".join(safe)
        if text:
            self._parts.append(text)
        return text

    def _match(self, text: str, searched: bool) -> str:
        if self._matcher is None or not text or not searched:
            return text
        text, self.stopped = self._matcher.feed(text)
        self._done = self.stopped is not None
        return text
