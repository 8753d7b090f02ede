"""Incremental detokenization with stop strings and line limits."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from windlass.server.text.token_pieces import PieceDecoder
from windlass.server.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from windlass.server.text.reasoning import AnswerLocator

_INDENT_CHARACTERS = " \t"
_REPLACEMENT = "\ufffd"
_MAX_PROMPT_TAIL = 64  # tokens at the end of a prompt that may affect the text after it
_WINDOW = 6  # tokens of context for decoders without a rule per token
_MAX_PENDING = 5  # a character has at most 4 bytes, so at most 4 tokens


@dataclass(frozen=True, slots=True)
class LineLimits:
    """Limits that end an answer at a line.

    indent: minimum number of blanks at the beginning of each line but the first, 0 for no limit.
    seconds: time after which an answer with a complete line ends, None for no limit.
    """

    indent: int = 0
    seconds: float | None = None


@dataclass(slots=True)
class LineLimiter:
    """Applies line limits to one answer. Blanks at the beginning of a line are held back until its indentation is known."""

    limits: LineLimits
    ended: bool = False
    _held: str | None = field(default=None)  # blanks at the beginning of the current line; None after them
    _lines: int = 0

    def feed(self, text: str, seconds: float) -> str:
        """Return the part of `text` that may be sent; sets `ended` if nothing may follow.

        seconds: time since the answer's first token.
        """
        if self.ended:
            return ""
        sent = self._until_short_indent(text) if self.limits.indent else text
        self._lines += text.count("\n")
        late = self.limits.seconds is not None and seconds > self.limits.seconds
        self.ended = self.ended or (late and self._lines > 0)
        return sent

    def flush(self) -> str:
        """Return the text held back, if the answer ends for another reason."""
        held, self._held = self._held, None
        return "" if self.ended else held or ""

    def _until_short_indent(self, text: str) -> str:
        """Return the text up to the first line with too little indentation."""
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


class Detokenizer:
    """Incremental conversion of one sample's tokens to text.

    The text is decode(prompt + tokens) without decode(prompt), so that a SentencePiece token after a prompt has its leading
    space. One difference, for invalid UTF-8 only: with byte fallback tokens, a valid character is returned when it is
    complete, even if invalid bytes follow it.

    stop: non-empty strings; generation should end when one is complete. They may contain skipped special tokens.
    include_stop: keep it in the text. locator: finds the answer, to which the search is limited; None: all text is searched.
    min_tokens: number of tokens whose text is not searched for stop strings.
    visible_special_tokens: special tokens that remain in the text while others are skipped.
    sibling: detokenizer of another sample with the same prompt and options, so that the prompt is not read again.
    stopped: the stop string that matched. num_tokens: tokens up to the one that completed the stop string.
    token_texts: the text of the last `push` by the token that released it, with a further item for text released at the end.
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
        visible_special_tokens: frozenset[int] = frozenset(),
        locator: AnswerLocator | None = None,
        sibling: Detokenizer | None = None,
    ) -> None:
        if not all(stop):
            raise ValueError("stop strings must not be empty")
        skipped = tokenizer.special_token_ids - visible_special_tokens if skip_special_tokens else frozenset()
        # Never fed: a stream in the state after the prompt, which is copied for each sample.
        self._initial: _PieceStream | _WindowStream
        self._initial = _initial_stream(tokenizer, prompt_token_ids, skipped) if sibling is None else sibling._initial
        self._stream = self._initial.copy()
        self._matcher = _StopMatcher(stop, include_stop) if stop else None
        self._locator = locator if stop else None
        # Skipped tokens that stop strings contain, by id.
        self._skipped_texts: dict[int, str] = (
            _skipped_texts(tokenizer, skipped, stop) if sibling is None else sibling._skipped_texts
        )
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._done = False
        self.stopped: str | None = None
        self.num_tokens = 0
        self.token_texts: list[str] = []

    @property
    def text(self) -> str:
        """All text that `push` has returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def push(self, token_ids: Sequence[int], *, hide_last: bool = False, final: bool = False) -> str:
        """Add tokens; return the text that may be sent, possibly empty.

        hide_last: the last token ended the generation (an EOS or stop id): it is counted, but not part of the text.
        final: no tokens follow, so text held back is returned, an incomplete last character as U+FFFD. After that, and after
        a stop string matched, further calls return an empty string.
        """
        if self._done:
            return ""
        safe: list[str] = []
        last = len(token_ids) - 1
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if hide_last and index == last:
                break
            if token_id in self._skipped_texts:
                safe.append(self._match_skipped(self._skipped_texts[token_id]))
            else:
                safe.append(self._search(self._stream.feed(token_id)))
            if self._done:
                break
        if final and not self._done:
            safe.append(self._search(self._stream.flush(), final=True))
            if self._matcher is not None and not self._done:
                safe.append(self._matcher.flush())
            self._done = True
        self.token_texts = safe
        text = "".join(safe)
        if text:
            self._parts.append(text)
        return text

    def _search(self, text: str, *, final: bool = False) -> str:
        """Return the text that may be sent. Sets `stopped` if the answer in it completes a stop string."""
        if self._matcher is None:
            return text
        if self._locator is None:
            return self._match(text)
        safe: list[str] = []
        for piece, is_answer in self._locator.feed(text, final=final):
            if self._done:
                break
            safe.append(self._match(piece) if is_answer else self._matcher.flush() + piece)
        return "".join(safe)

    def _match(self, text: str, *, visible: bool = True) -> str:
        if self._matcher is None or not text or self.num_tokens <= self._min_tokens:
            return text if visible else ""
        text, self.stopped = self._matcher.feed(text, visible=visible)
        self._done = self.stopped is not None
        return text

    def _match_skipped(self, text: str) -> str:
        """The same for a special token that is omitted from the text."""
        return self._match(text, visible=False) if self._locator is None or self._locator.in_answer else ""


def _skipped_texts(tokenizer: Tokenizer, skipped: frozenset[int], stop: Sequence[str]) -> dict[int, str]:
    """Return the texts of skipped tokens that stop strings contain."""
    if not stop:
        return {}
    texts = ((token_id, tokenizer.backend.id_to_token(token_id)) for token_id in skipped)
    return {token_id: text for token_id, text in texts if text and any(text in string for string in stop)}


def _initial_stream(
    tokenizer: Tokenizer, prompt: Sequence[int], skipped: frozenset[int]
) -> _PieceStream | _WindowStream:
    """Return a stream in the state after the prompt."""
    tail_ids = [token_id for token_id in prompt[-_MAX_PROMPT_TAIL:] if token_id not in skipped]
    if tokenizer.piece_decoder is None:
        return _WindowStream(tokenizer, tail_ids, skipped)
    stream = _PieceStream(tokenizer, tokenizer.piece_decoder, skipped)
    stream.read_prompt(prompt, tail_ids)
    return stream


def _replace_every_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _REPLACEMENT * (error.end - error.start), error.end


# With byte fallback, `tokenizers` replaces each invalid byte, while a byte-level decoder replaces each invalid character.
codecs.register_error("windlass.replace_every_byte", _replace_every_byte)


class _PieceStream:
    """Stream that joins the bytes of tokens and decodes complete characters: exact, with constant work per token."""

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
        """Return a stream in the same state."""
        other = _PieceStream(self._tokenizer, self._pieces, self._skipped)
        other._first, other._strip = self._first, self._strip
        other._utf8.setstate(self._utf8.getstate())
        return other

    def read_prompt(self, prompt: Sequence[int], tail_ids: Sequence[int]) -> None:
        """Set the state after a prompt: whether a text has begun, and an incomplete character at its end.

        tail_ids: the last tokens of the prompt without skipped ones.
        """
        begin = self._first_text_index(prompt)
        for position in range(begin, len(prompt)):
            self._bytes(prompt[position])
            if not self._strip:
                break
        tail = b""
        for token_id in reversed(tail_ids):
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= 4:
                break
        self._utf8.decode(tail)
        unfinished = self._utf8.getstate()[0]
        self._utf8.reset()
        self._utf8.decode(unfinished)

    def _first_text_index(self, prompt: Sequence[int]) -> int:
        """Return the index of the first token with a text. Each id is checked once, because a long prompt may have no text."""
        for part in (prompt[:_MAX_PROMPT_TAIL], prompt):
            for token_id in dict.fromkeys(part):
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
    """Stream for any decoder: decodes a few tokens of context with and without the new tokens and returns the difference."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context = list(context[-_WINDOW:])
        self._pending: list[int] = []

    def copy(self) -> _WindowStream:
        """Return a stream in the same state, before any token was fed."""
        return _WindowStream(self._tokenizer, self._context, self._skipped)

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._pending.append(token_id)
        return self._decode_pending(final=len(self._pending) >= _MAX_PENDING)

    def flush(self) -> str:
        return self._decode_pending(final=True)

    def _decode_pending(self, *, final: bool) -> str:
        if not self._pending:
            return ""
        tokens = self._context + self._pending
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        if not final and text.endswith(_REPLACEMENT):
            return ""
        known = len(self._tokenizer.decode(self._context, skip_special_tokens=False))
        self._context = tokens[-_WINDOW:]
        self._pending = []
        return text[known:]


class _StopMatcher:
    """Search for the stop string that completes first. The result does not depend on how the text is split.

    One Knuth-Morris-Pratt automaton per stop string. Its state is the length of the longest prefix of the string at the
    end of the text, which is also the length that must be held back. Of two strings that complete at the same character,
    the longer one is reported.
    """

    def __init__(self, stop: Sequence[str], include_stop: bool) -> None:
        self._stop = tuple(stop)
        self._include = include_stop
        self._failure = [_failure_table(string) for string in self._stop]
        self._state = [0] * len(self._stop)
        self._begins = frozenset(string[0] for string in self._stop)
        self._held = ""
        self._visible = b""  # by character of the held text: whether it is sent

    def feed(self, text: str, *, visible: bool = True) -> tuple[str, str | None]:
        """Return the text that may be sent, and the stop string if one is complete; the text after it is dropped.

        visible: whether this text is part of what is sent.
        """
        if not self._held and self._begins.isdisjoint(text):
            return text if visible else "", None
        buffer = self._held + text
        self._visible += bytes([visible]) * len(text)
        for position in range(len(self._held), len(buffer)):
            matched = self._advance(buffer[position])
            if matched is not None:
                self._held = ""
                before = self._sent(buffer, position + 1 - len(matched))
                return before + matched if self._include else before, matched
        safe = len(buffer) - max(self._state)
        sent = self._sent(buffer, safe)
        self._held, self._visible = buffer[safe:], self._visible[safe:]
        return sent, None

    def _sent(self, buffer: str, end: int) -> str:
        """Return the visible part of the first characters."""
        text = buffer[:end]
        if 0 not in self._visible[:end]:
            return text
        return "".join(character for character, visible in zip(text, self._visible, strict=False) if visible)

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
        """Return the text held back, and search the next text from its beginning."""
        sent = self._sent(self._held, len(self._held))
        self._held, self._visible = "", b""
        self._state = [0] * len(self._stop)
        return sent


def _failure_table(string: str) -> list[int]:
    """Return table[i]: length of the longest proper prefix of string[: i + 1] that is also its suffix."""
    table = [0] * len(string)
    state = 0
    for index in range(1, len(string)):
        while state and string[index] != string[state]:
            state = table[state - 1]
        state += string[index] == string[state]
        table[index] = state
    return table
