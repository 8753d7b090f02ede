"""Fill-in-the-middle (FIM) tokens of a tokenizer, and prompts made of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

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
        self,
        before: Sequence[int],
        after: Sequence[int],
        *,
        add_special_tokens: bool,
        around: Sequence[int] = (),
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
