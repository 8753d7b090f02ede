"""Prompts of rerankers, with placeholders for query, document and instruction."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

PairField = Literal["query", "document", "instruction"]

# As published with Qwen3-Reranker. The instruction is an optional first message.
QWEN3_RERANKER_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: '
    "{{ messages[0].content if messages | length > 2 else "
    "'Given a web search query, retrieve relevant passages that answer the query' }}\n"
    "<Query>: {{ messages[-2].content }}\n<Document>: {{ messages[-1].content }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n\n"  # Jinja removes the last newline
)


def names_pair_roles(source: str) -> bool:
    """Whether a template names both roles, which templates of chats do not."""
    return all(re.search(rf"['\"]{role}['\"]", source) for role in ("query", "document"))


@dataclass(frozen=True, slots=True)
class PairPrompt:
    """A prompt with gaps. texts: around the gaps, one more than gaps. trimmed: per gap, whether its value is stripped."""

    texts: tuple[str, ...]
    pair_fields: tuple[PairField, ...]
    trimmed: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Characters around the gaps."""
        return sum(map(len, self.texts))

    def fill(self, values: Mapping[PairField, str]) -> tuple[str, int, str]:
        """(text, offset of the document's first occurrence in it, the document as inserted)."""
        parts, size = [self.texts[0]], len(self.texts[0])
        begin, document = size, ""
        for pair_field, trimmed, text in zip(self.pair_fields, self.trimmed, self.texts[1:], strict=True):
            value = values[pair_field].strip() if trimmed else values[pair_field]
            if pair_field == "document" and not document:
                begin, document = size, value
            parts += (value, text)
            size += len(value) + len(text)
        return "".join(parts), begin, document


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """The prompts of a reranker. instructed: with an instruction from the request, None if it has no gap for one."""

    plain: PairPrompt
    instructed: PairPrompt | None
