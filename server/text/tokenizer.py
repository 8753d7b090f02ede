"""A model's tokenizer: text to token ids and back, and where tokens begin in a text."""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from windlass.engine.errors import LoadError, RequestError
from windlass.server.text.template_facts import chat_templates
from windlass.server.text.token_pieces import PieceDecoder
from windlass.server.text.tokenizer_files import (
    TOKENIZER,
    add_missing_tokens,
    find_tokenizer,
    one_line,
    read_json,
    special_tokens,
    token_content,
)

_MAX_ID = 2**32 - 1


class Tokenizer:
    """A loaded tokenizer. Every method may be called from any thread.

    vocab_size: one more than the largest id. special_tokens: named tokens (bos_token, eos_token, …) as text.
    chat_template: the default template's source; tool_template: that of chats with functions, where they have one of their own;
    chat_templates: all of them by name ("default", "tool_use", …).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # a prompt that is too long is refused by length, never cut behind the caller's back
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.chat_template = self.chat_templates.get("default")
        self.tool_template = self.chat_templates.get("tool_use")
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in added.items() if token.special)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        self.pieces = PieceDecoder.for_tokenizer(backend)
        self._bytes: dict[int, bytes] = {}

    def template_for(self, tools: bool) -> str | None:
        """The source of the template for a chat. tools: whether functions are on offer."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load from a model directory; raises LoadError (one line) when that cannot be done."""
        directory = Path(path)
        text, config = _read_files(find_tokenizer(directory))
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic inside the Rust library is not an Exception
            raise LoadError(
                f"cannot read {directory / TOKENIZER} ({one_line(error)}): fetch the file again or re-save the tokenizer"
            ) from error
        try:
            named, extra = special_tokens(directory, config)
            add_missing_tokens(backend, directory, config, named, extra)
            templates = chat_templates(directory, config)
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise LoadError(
                f"cannot understand tokenizer_config.json in {directory} ({one_line(error)}): fetch the file again"
            ) from error
        return cls(backend, {name: token_content(token) for name, token in named.items()}, templates)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers` object itself, for libraries that need it. Do not change it."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; raises RequestError when it holds lone surrogates."""
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids and, parallel to them, the half-open range of characters of each; (0, 0) for added specials."""
        encoding = self._encoding(text, add_special_tokens)
        return list(encoding.ids), list(encoding.offsets)

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], int]:
        """Token ids of two texts as one, joined as the tokenizer joins pairs, and where those of the second begin.

        most: the second is cut at its end to fit into so many. Raises RequestError where the first alone does not, or for lone
        surrogates.
        """
        first_encoding, second_encoding = (self._encoding(text, False) for text in (first, second))
        added = self._backend.num_special_tokens_to_add(True) if add_special_tokens else 0
        if max_tokens is not None and len(first_encoding.ids) + len(second_encoding.ids) + added > max_tokens:
            available = max_tokens - len(first_encoding.ids) - added
            if available < 1:
                raise RequestError(
                    f"the first text has {len(first_encoding.ids)} tokens, which leave no room for the second among "
                    f"{max_tokens}: shorten it"
                )
            second_encoding.truncate(available)
        joined = self._backend.post_process(first_encoding, second_encoding, add_special_tokens)
        of_first = [index for index, text in enumerate(joined.sequence_ids) if text == 0]
        types = joined.type_ids
        # Where types tell nothing apart, behind the last token of the first text.
        return list(joined.ids), types.index(1) if 1 in types else of_first[-1] + 1 if of_first else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids: unknown ids give nothing, broken UTF-8 U+FFFD. Raises RequestError for negative ids."""
        for token_id in token_ids:
            if not 0 <= token_id <= _MAX_ID:
                raise RequestError(f"{token_id} is not a token id: ids run from 0 to {self.vocab_size - 1}")
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """What the token adds mid-text, as UTF-8 (possibly part of a character); empty for unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            known = b"" if token is None else self._piece(token_id, token)
            if token is not None:  # callers may ask for any integer: remember only what the vocabulary bounds
                self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """The same as text; a token that is not valid UTF-8 by itself is shown as OpenAI does, `bytes:\\xe2\\x82`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def max_token_chars(self) -> int:
        """No text of more than n * max_token_chars characters has n tokens or fewer.

        Exact for byte-level vocabularies. Where a normaliser, an unknown token or a whitespace-eating special token may
        swallow characters, a generous guess takes its place. Computed on first use: it visits the whole vocabulary.
        """
        starts = 1
        for token_id in self._backend.get_vocab(with_added_tokens=True).values():
            data = self.token_bytes(token_id)
            starts = max(starts, sum(byte & 0xC0 != 0x80 for byte in data))  # characters that begin in this token
        return (
            starts * 4
            if self._character_loss == "composition"
            else starts
            if self._character_loss == "none"
            else max(starts, 4096)
        )

    @property
    def _character_loss(self) -> str:
        """How tokenizing may lose characters: "none", "composition" (up to 4 become 1) or "unbounded"."""
        added = self._backend.get_added_tokens_decoder().values()
        normalizers = _component_types(self._backend.normalizer)
        if (
            self.pieces is None
            or not self.pieces.covers_every_byte(self._backend)
            or any(token.lstrip or token.rstrip for token in added)
            or normalizers - {"NFC", "NFKC", "NFD", "NFKD", "Prepend", "Replace", "ByteLevel", "Lowercase"}
            or _component_types(self._backend.pre_tokenizer) - {"ByteLevel", "Metaspace", "Split", "Digits"}
        ):
            return "unbounded"
        return "composition" if normalizers & {"NFC", "NFKC"} else "none"

    def _encoding(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError("the text is not valid Unicode: it holds a lone surrogate") from error

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def _piece(self, token_id: int, token: str) -> bytes:
        if self.pieces is not None:
            return self.pieces.decode_token(token)
        # A decoder without a rule per token: what the token adds behind a copy of itself is what it adds mid-text.
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(once) :] if twice.startswith(once) else once).encode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _read_files(file: Path) -> tuple[str, dict[str, Any]]:
    """The text of tokenizer.json and the content of tokenizer_config.json, made where the vocabulary is in another file."""
    if file.name != TOKENIZER:
        from windlass.server.text.vocabularies.conversion import tokenizer_files

        made = tokenizer_files(file)
        return made.tokenizer, json.loads(made.config)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {file} ({one_line(error)}): fetch the file again") from error
    return text, read_json(file.parent / "tokenizer_config.json")


def _component_types(component: Any) -> set[str]:
    """Type names of a normaliser or pre-tokenizer and of all inside it; "Shrinking" for rules that drop characters."""
    if component is None:
        return set()

    def walk(node: dict[str, Any]) -> set[str]:
        if node["type"] == "Sequence":
            children = node.get("normalizers") or node.get("pretokenizers") or ()
            return {kind for child in children for kind in walk(child)}
        if node["type"] == "Replace":
            pattern = node["pattern"]
            shorter = "String" not in pattern or len(node["content"]) < len(pattern["String"])
            return {"Shrinking" if shorter else "Replace"}
        return {"Shrinking"} if node.get("behavior") == "Removed" else {node["type"]}

    return walk(json.loads(component.__getstate__()))


def rerank_answer_ids(tokenizer: Tokenizer, tokens: Sequence[str | int]) -> tuple[int, ...]:
    """Their ids. Raises LoadError for a text that is no single token, and for an id that the tokenizer does not have."""
    found = tuple(_id_of(tokenizer, token) for token in tokens)
    if len(set(found)) != len(found):
        raise LoadError(f"reranking: {' and '.join(map(repr, tokens))} are one and the same token: name two")
    return found


def _id_of(tokenizer: Tokenizer, token: str | int) -> int:
    if isinstance(token, int):
        if token >= tokenizer.vocab_size:
            raise LoadError(
                f"reranking: the model's files name the token id {token}, and its tokenizer has {tokenizer.vocab_size} ids"
            )
        return token
    known = tokenizer.backend.token_to_id(token)
    if known is not None:
        return known
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise LoadError(
            f"reranking: {token!r} is {len(ids)} tokens of this model's tokenizer, and an answer is one: name another with "
            "--rerank-tokens"
        )
    return ids[0]


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
