"""What a chat template does, told by its text: what it shows to the model, and in which form it wants it."""

from __future__ import annotations

import re
from dataclasses import dataclass

RESERVED = ("messages", "tools", "add_generation_prompt")  # variables of templates that a request sets itself
_USE = re.compile(r"""\barguments['"]?\s*\]?\)?\s*(\|\s*\w+|is\s+\w+|\.\s*\w+|[+~]|-?[%}]})?""")
_SHORT_IDS = re.compile(r"length\s*(!=|<)\s*9\b")
_QUOTED = re.compile(r"""(['"])([\w-]{1,64})\1""")
_IS_NONE = re.compile(r"""content['"]?\s*\]?\s+is\s+(not\s+)?none""")


@dataclass(frozen=True, slots=True)
class TemplateFacts:
    """What a template can be told, by its text.

    tools: it shows them to the model. calls: it renders calls and their results. text_arguments: it wants the arguments of
    a call as JSON text, not as an object. null_content: it asks whether content is null. short_ids: it takes no ids of
    calls but those of nine characters. single_call: a message of its has one call at most. developer: it knows that role.
    words: what stands in quotes, the roles that it asks for among them.
    """

    tools: bool
    calls: bool
    text_arguments: bool
    null_content: bool
    short_ids: bool
    single_call: bool
    developer: bool
    words: frozenset[str]

    @classmethod
    def of(cls, source: str) -> TemplateFacts:
        """The facts of a template."""
        uses = [use.strip() for use in _USE.findall(source)]
        as_object = any(use[:1] in ("|", ".") or use.startswith("is") for use in uses)
        return cls(
            tools=re.search(r"\btools\b", source) is not None,
            calls="tool_calls" in source,
            text_arguments=not as_object and any(use[:1] in ("+", "~", "-", "}") for use in uses),
            null_content=_IS_NONE.search(source) is not None,
            short_ids=_SHORT_IDS.search(source) is not None,
            single_call="single tool-call" in source,
            developer="developer" in source,
            words=frozenset(word for _, word in _QUOTED.findall(source)),
        )
