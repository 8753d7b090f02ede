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

# Before the text in front, before the text behind, before the answer; all in this order. Qwen-Coder, CodeGemma, Granite and
# Yi-Coder; StarCoder, SmolLM and Granite's elder ones; SantaCoder; DeepSeek-Coder. Models whose tokenizers put a space in
# front of a text (CodeLlama, the first Codestral) would need other rules for where a text begins, and are not here.
_DIALECTS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


@dataclass(frozen=True, slots=True)
class FillIn:
    """names: the three tokens as text, ids: as ids. start: ids that the tokenizer puts before any text."""

    MOST_AROUND: ClassVar[int] = 4  # tokens beside the two texts

    names: tuple[str, str, str]
    ids: tuple[int, int, int]
    start: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> FillIn | None:
        """What the tokenizer has, None where it has none of these tokens."""
        added = {token.content: index for index, token in tokenizer.backend.get_added_tokens_decoder().items()}
        for names in _DIALECTS:
            if all(name in added for name in names):
                prefix, suffix, middle = (added[name] for name in names)
                around = tokenizer.encode("")  # what may stand behind a text has no place before a gap
                start = around[:1] if around and around[0] == tokenizer.bos_token_id else []
                return cls(names, (prefix, suffix, middle), tuple(start))
        return None

    def pieces(self, text: str) -> list[str]:
        """The text in pieces none of which holds one of the tokens: what a caller writes never ends the part it stands in.

        Takes time in proportion to the text: call it beside the event loop.
        """
        marks = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, self.names)), text)]
        return [text[start:end] for start, end in zip([0, *marks], [*marks, len(text)], strict=True) if start < end]

    def prompt(self, before: Sequence[int], after: Sequence[int], *, add_special_tokens: bool) -> list[int]:
        """The ids of a prompt with a gap between two texts, which are tokenized without special tokens."""
        prefix, suffix, middle = self.ids
        return [*(self.start if add_special_tokens else ()), prefix, *before, suffix, *after, middle]
