"""Fill-in-the-middle: the tokens by which models that were taught it are told what stands before and after a gap.

Responsible for which tokens those are and in which order a prompt holds them. Tokenizes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from windlass.server.text.tokenizer import Tokenizer

_SPACES = ("▁", "Ġ")  # how a token writes the space that a tokenizer puts before a text
_SNIPPET_SEPARATOR = "\n\n--- snippet ---\n\n"  # what llama.cpp puts before a passage where there is no token for it


@dataclass(frozen=True, slots=True)
class _FimTokenNames:
    """names: before the text in front, before the text behind, before the answer; prompts have them in this order.

    file, repository: what stands before the name of a file, and of all of them; the first that a tokenizer has.
    """

    names: tuple[str, str, str]
    file: tuple[str, ...] = ()
    repository: tuple[str, ...] = ()


# Qwen-Coder, CodeGemma, Granite and Yi-Coder; StarCoder and Granite's elder ones; SantaCoder; DeepSeek-Coder. Models
# whose tokenizers put a space in front of a text (CodeLlama, the first Codestral) would need other rules for where a text
# begins, and are not here.
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
    """ids: of the three tokens. start: ids that the tokenizer puts before any text.

    file, repository: the token before the name of a file, and of all of them; None where there is none.
    marks: matches every token that a text may not be taken for.
    """

    MAX_MARKER_TOKENS: ClassVar[int] = 4  # tokens beside the two texts

    ids: tuple[int, int, int]
    start: tuple[int, ...]
    file: int | None
    repository: int | None
    special_token_pattern: re.Pattern[str]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FimTokens | None:
        """What the tokenizer has, None where it has none of these tokens or begins each text with a space."""
        added = tokenizer.backend.get_added_tokens_decoder()
        ids = {token.content: index for index, token in added.items()}
        spaced = tokenizer.backend.encode("x", add_special_tokens=False).tokens[:1]
        if spaced and spaced[0].startswith(_SPACES):
            return None
        for token_names in _KNOWN_TOKEN_NAMES:
            if not all(name in ids for name in token_names.names):
                continue
            around = tokenizer.encode("")  # what may stand behind a text has no place before a gap
            file, repository = (
                next((name for name in names if name in ids), None)
                for names in (token_names.file, token_names.repository)
            )
            special_token_pattern = {token.content for token in added.values() if token.special and token.content}
            special_token_pattern.update(token_names.names, filter(None, (file, repository)))
            prefix, suffix, middle = (ids[name] for name in token_names.names)
            return cls(
                ids=(prefix, suffix, middle),
                start=tuple(around[:1] if around and around[0] == tokenizer.bos_token_id else ()),
                file=None if file is None else ids[file],
                repository=None if repository is None else ids[repository],
                special_token_pattern=re.compile(
                    "|".join(map(re.escape, sorted(special_token_pattern, key=len, reverse=True)))
                ),
            )
        return None

    def pieces(self, text: str) -> list[str]:
        """The text in pieces none of which holds a special token: what a caller writes never ends the part it stands in.

        Takes time in proportion to the text: call it beside the event loop.
        """
        special_token_pattern = [match.start() + 1 for match in self.special_token_pattern.finditer(text)]
        return [
            text[start:end]
            for start, end in zip([0, *special_token_pattern], [*special_token_pattern, len(text)], strict=True)
            if start < end
        ]

    def prompt(
        self,
        before: Sequence[int],
        after: Sequence[int],
        *,
        add_special_tokens: bool,
        around: Sequence[int] = (),
    ) -> list[int]:
        """The ids of a prompt with a gap between two texts, which are tokenized without special tokens.

        around: passages of other files, with their heads.
        """
        prefix, suffix, middle = self.ids
        start = self.start if add_special_tokens else ()
        return [*start, *around, prefix, *before, suffix, *after, middle]

    def head(self, name: str) -> tuple[list[int], str]:
        """What stands in front of a passage of another file: ids, and a text that is tokenized like any other."""
        return ([], _SNIPPET_SEPARATOR) if self.file is None else ([self.file], f"{name}\n")

    def project(self) -> tuple[list[int], str]:
        """What stands in front of all passages, in the same way. Nobody tells the project's name, so llama.cpp's stands in."""
        return ([], "") if self.repository is None else ([self.repository], "myproject\n")

    def current(self) -> tuple[list[int], str]:
        """What stands behind all passages, before the gap's own file."""
        return ([], "") if self.file is None else self.head("filename")
