"""Tokenizer of a model: conversion of text to token ids and back, text offsets of tokens, and fill-in-the-middle prompts."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import tokenizers

from windlass.engine.bounded_files import MAX_TOKENIZER_BYTES, MAX_TOKENIZER_ENTRIES, read_json_text
from windlass.engine.errors import LoadError, RequestError
from windlass.server.text.token_pieces import PieceDecoder
from windlass.server.text.tokenizer_files import (
    TOKENIZER,
    add_missing_tokens,
    chat_templates,
    find_tokenizer,
    one_line,
    read_json,
    special_tokens,
    token_content,
)

_MAX_ID = 2**32 - 1


class Tokenizer:
    """Loaded tokenizer. All methods are thread-safe.

    vocab_size: largest id plus one. special_tokens: texts of named tokens (bos_token, eos_token, …).
    chat_templates: sources of the chat templates by name ("default", "tool_use", …). chat_template: the default one.
    tool_template: the one for chats with tools, if it is separate.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        backend.no_truncation()  # the server rejects or truncates long prompts itself
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
        self.piece_decoder = PieceDecoder.for_tokenizer(backend)
        self._bytes: dict[int, bytes] = {}

    def template_for(self, tools: bool) -> str | None:
        """Return the source of the template for a chat. tools: whether the request has tools."""
        return self.tool_template if tools and self.tool_template is not None else self.chat_template

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Load the tokenizer of a model directory. Raises LoadError, one line."""
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
        """The `tokenizers` object, for libraries that need it. Must not be modified."""
        return self._backend

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError for lone surrogates."""
        return list(self._encoding(text, add_special_tokens).ids)

    def encode_with_offsets(
        self, text: str, *, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids and the half-open character range of each, (0, 0) for added special tokens."""
        encoding = self._encoding(text, add_special_tokens)
        return list(encoding.ids), list(encoding.offsets)

    def encode_pair(
        self, first: str, second: str, *, add_special_tokens: bool, max_tokens: int | None
    ) -> tuple[list[int], int]:
        """Return the token ids of a pair of texts, and the index at which the second begins.

        max_tokens: the second text is truncated at its end to this total. Raises RequestError if the first text leaves no
        token for it, and for lone surrogates.
        """
        first_encoding, second_encoding = (self._encoding(text, False) for text in (first, second))
        added = self._backend.num_special_tokens_to_add(True) if add_special_tokens else 0
        if max_tokens is not None and len(first_encoding.ids) + len(second_encoding.ids) + added > max_tokens:
            available = max_tokens - len(first_encoding.ids) - added
            if available < 1:
                raise RequestError(
                    f"the first text has {len(first_encoding.ids)} tokens and leaves none of {max_tokens} for the second: "
                    "shorten it"
                )
            second_encoding.truncate(available)
        joined = self._backend.post_process(first_encoding, second_encoding, add_special_tokens)
        of_first = [index for index, text in enumerate(joined.sequence_ids) if text == 0]
        types = joined.type_ids
        # Without type ids of the second text, it begins after the last token of the first.
        return list(joined.ids), types.index(1) if 1 in types else of_first[-1] + 1 if of_first else 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids. Unknown ids are ignored, invalid UTF-8 becomes U+FFFD.

        Raises RequestError for integers that are not token ids.
        """
        for token_id in token_ids:
            if not 0 <= token_id <= _MAX_ID:
                raise RequestError(f"{token_id} is not a token id: ids are 0 to {self.vocab_size - 1}")
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 of a token within a text, possibly a part of a character; empty for unknown ids."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            known = b"" if token is None else self._piece(token_id, token)
            if token is not None:  # cache only valid ids: callers may pass any integer
                self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        r"""Return the text of a token within a text. Invalid UTF-8 is written like OpenAI's API does, `bytes:\xe2\x82`."""
        data = self.token_bytes(token_id)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @cached_property
    def max_token_chars(self) -> int:
        """Upper bound of the characters per token: a text of more than n * max_token_chars characters has more than n tokens.

        Exact for byte-level vocabularies. A generous estimate if a normalizer, an unknown token or a special token that
        strips white space may remove characters. Computed on first use, because it sorts the entire vocabulary.
        """
        starts = 1
        growth = None if self.piece_decoder is None else self.piece_decoder.growth
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        for token in sorted(vocabulary, key=len, reverse=True):
            if growth is not None and len(token) + growth <= starts:
                break  # no shorter token has more
            data = self._piece(vocabulary[token], token)
            starts = max(starts, sum(byte & 0xC0 != 0x80 for byte in data))  # characters that begin in this token
        match self._character_loss():
            case "none":
                return starts
            case "composition":
                return starts * 4
            case _:
                return max(starts, 4096)

    def _character_loss(self) -> str:
        """Return how tokenizing may remove characters: "none", "composition" (up to 4 become 1) or "unbounded"."""
        added = self._backend.get_added_tokens_decoder().values()
        normalizers = _component_types(self._backend.normalizer)
        if (
            self.piece_decoder is None
            or not self.piece_decoder.covers_every_byte(self._backend)
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
            raise RequestError("the text is not valid Unicode: it contains a lone surrogate") from error

    def _token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def _piece(self, token_id: int, token: str) -> bytes:
        if self.piece_decoder is not None:
            return self.piece_decoder.decode_token(token)
        # Unsupported decoder: the token's text within a text is what it adds after a copy of itself.
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        return (twice[len(once) :] if twice.startswith(once) else once).encode("utf-8", "replace")

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)


def _read_files(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of tokenizer.json and the content of tokenizer_config.json, converted from other files if necessary."""
    if file.name != TOKENIZER:
        from windlass.server.text.vocabularies.conversion import tokenizer_files

        made = tokenizer_files(file)
        return made.tokenizer, json.loads(made.config)
    try:
        text = read_json_text(file, max_bytes=MAX_TOKENIZER_BYTES, max_entries=MAX_TOKENIZER_ENTRIES)
    except (OSError, ValueError) as error:
        raise LoadError(f"cannot read {file} ({one_line(error)}): fetch the file again") from error
    return text, read_json(file.parent / "tokenizer_config.json")


def _component_types(component: Any) -> set[str]:
    """Return the type names of a normalizer or pre-tokenizer and its parts; "Shrinking" for rules that remove characters."""
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
    """Return the ids of a reranker's answers. Raises LoadError for texts that are not one token, unknown and equal ids."""
    found = tuple(_id_of(tokenizer, token) for token in tokens)
    if len(set(found)) != len(found):
        raise LoadError(f"reranking: {' and '.join(map(repr, tokens))} are the same token: specify two")
    return found


def _id_of(tokenizer: Tokenizer, token: str | int) -> int:
    if isinstance(token, int):
        if token >= tokenizer.vocab_size:
            raise LoadError(
                f"reranking: token id {token} of the model's files is not below {tokenizer.vocab_size}, the tokenizer's size"
            )
        return token
    known = tokenizer.backend.token_to_id(token)
    if known is not None:
        return known
    ids = tokenizer.encode(token, add_special_tokens=False)
    if len(ids) != 1:
        raise LoadError(
            f"reranking: {token!r} is {len(ids)} tokens of this model's tokenizer, but an answer must be one: specify "
            "another with `rerank_tokens`"
        )
    return ids[0]


class TextOffsets:
    """Offset of each token in a text, in characters from `start`.

    A token that continues a character has the offset of that character. Omitted special tokens have no length.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, start: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._position = start

    def advance(self, token_id: int) -> int:
        """Return the offset of the next token."""
        start = self._position
        if token_id not in self._skipped:
            self._position += len(self._decoder.decode(self._tokenizer.token_bytes(token_id)))
        return start

    @property
    def position(self) -> int:
        """Offset of the token after the last one."""
        return self._position


_SPACES = ("▁", "Ġ")  # a leading space inside a token
_SNIPPET_SEPARATOR = "\n\n--- snippet ---\n\n"  # llama.cpp's text before a passage, for tokenizers without a file token


@dataclass(frozen=True, slots=True)
class _FimTokenNames:
    """Texts of the tokens of one model family.

    names: tokens before the prefix, the suffix and the answer, in prompt order.
    file, repository: tokens before the name of a file and of the repository; the first that a tokenizer has is used.
    """

    names: tuple[str, str, str]
    file: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()


# Qwen-Coder, CodeGemma, Granite and Yi-Coder; StarCoder and older Granite models; SantaCoder; DeepSeek-Coder. Models whose
# tokenizers insert a space before a text (CodeLlama, the first Codestral) need other rules and are not supported.
_KNOWN_TOKEN_NAMES = (
    _FimTokenNames(
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|file_sep|>", "<|file_separator|>"),
        ("<|repo_name|>",),
    ),
    _FimTokenNames(
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), ("<file_sep>", "<filename>"), ("<repo_name>", "<reponame>")
    ),
    _FimTokenNames(("<fim-prefix>", "<fim-suffix>", "<fim-middle>")),
    _FimTokenNames(("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FimTokens:
    """Token ids for fill-in-the-middle prompts.

    ids: tokens before the prefix, the suffix and the answer. start: ids that the tokenizer inserts before any text.
    file, repository: tokens before the name of a file and of the repository, None if the tokenizer has none.
    special_token_pattern: matches all tokens that must not be recognized inside a client's text.
    """

    MAX_MARKER_TOKENS: ClassVar[int] = 4  # tokens of a prompt in addition to prefix and suffix

    ids: tuple[int, int, int]
    start: tuple[int, ...]
    file: int | None
    repository: int | None
    special_token_pattern: re.Pattern[str]

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> FimTokens | None:
        """Find a tokenizer's tokens. Returns None if it has none or inserts a space before each text."""
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = {token.content: index for index, token in added.items()}
        spaced = tokenizer.backend.encode("x", add_special_tokens=False).tokens[:1]
        if spaced and spaced[0].startswith(_SPACES):
            return None
        for token_names in _KNOWN_TOKEN_NAMES:
            if not all(name in ids for name in token_names.names):
                continue
            around = tokenizer.encode("")  # without tokens that end a text
            file, repository = (
                next((name for name in names if name in ids), None)
                for names in (token_names.file, token_names.repository)
            )
            special = {token.content for token in added.values() if token.special and token.content}
            special.update(token_names.names, filter(None, (file, repository)))
            prefix, suffix, middle = (ids[name] for name in token_names.names)
            return cls(
                ids=(prefix, suffix, middle),
                start=tuple(around[:1] if around and around[0] == tokenizer.bos_token_id else ()),
                file=None if file is None else ids[file],
                repository=None if repository is None else ids[repository],
                special_token_pattern=re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True)))),
            )
        return None

    def pieces(self, text: str) -> list[str]:
        """Split a text inside each special token, so that a client's text cannot end its own part of the prompt.

        Takes time proportional to the length of the text: do not call it on the event loop.
        """
        cuts = [match.start() + 1 for match in self.special_token_pattern.finditer(text)]
        return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True) if start < end]

    def prompt(
        self, before: Sequence[int], after: Sequence[int], *, add_special_tokens: bool, around: Sequence[int] = ()
    ) -> list[int]:
        """Return the ids of a prompt with a gap between two texts, which were tokenized without special tokens.

        around: tokens of passages of other files, with their heads.
        """
        prefix, suffix, middle = self.ids
        start = self.start if add_special_tokens else ()
        return [*start, *around, prefix, *before, suffix, *after, middle]

    def head(self, name: str) -> tuple[list[int], str]:
        """Return the ids and the text (still to be tokenized) before a passage of another file."""
        return ([], _SNIPPET_SEPARATOR) if self.file is None else ([self.file], f"{name}\n")

    def project(self) -> tuple[list[int], str]:
        """Return the ids and the text before all passages. The name of the project is llama.cpp's default."""
        return ([], "") if self.repository is None else ([self.repository], "myproject\n")

    def current(self) -> tuple[list[int], str]:
        """Return the ids and the text after all passages, before the file with the gap."""
        return ([], "") if self.file is None else self.head("filename")
