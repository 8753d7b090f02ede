"""How families of models mark their thinking, as data, and where a prompt leaves the answer: before, inside or behind it.

A new family is a `ThinkingFormat`. Knows texts only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Place = Literal["before", "inside", "behind"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingFormat:
    """Thinking stands at the beginning of an answer, between an opening and a closing marker.

    opens, closes: the markers, the usual spelling first. always: thinking begins with the first token, whether a marker
    opens it or not. wrapper: markers around the answer behind the thinking, which are no part of it.
    label: a word right behind an opening marker, which says that thinking follows. anywhere: thinking may be opened at any
    place of an answer, again and again, and no marker is text. interrupts: what ends the thinking and belongs to the answer.
    """

    name: str
    opens: tuple[str, ...]
    closes: tuple[str, ...]
    always: bool = False
    wrapper: tuple[str, str] | None = None
    label: str = ""
    anywhere: bool = False
    interrupts: tuple[str, ...] = ()

    @property
    def openings(self) -> tuple[str, ...]:
        """What opens thinking: the markers, each with the label."""
        return tuple(marker + self.label for marker in self.opens)

    @property
    def markers(self) -> frozenset[str]:
        """Every text that the parser has to see, even where it is a special token."""
        return frozenset((*self.opens, *self.closes, *(self.wrapper or ())))

    def place(self, prompt: str, continued: str | None = None) -> Place:
        """Where an answer to this rendered prompt begins.

        continued: the text of the last message, where the answer goes on with it.
        """
        if continued is not None:
            # Where the message is continued its thinking is over, unless it says so itself.
            opened, closed = _last(continued, self.openings), _last(continued, self.closes)
            return "inside" if opened > closed else "behind"
        end = prompt[-256:].rstrip()
        if end.endswith(self.openings):
            return "inside"
        if end.endswith(self.closes):
            return "behind"  # a template that was told not to think closes what it opened
        return "inside" if self.always else "before"


def _last(text: str, markers: Sequence[str]) -> int:
    return max(text.rfind(marker) for marker in markers)


QWEN3 = ThinkingFormat(name="qwen3", opens=("<think>",), closes=("</think>",))
DEEPSEEK_R1 = replace(QWEN3, name="deepseek_r1", always=True)
GRANITE = ThinkingFormat(
    name="granite",
    opens=("<think>", "Here is my thought process:", "Here's my thought process:"),
    closes=("</think>", "Here is my response:", "Here's my response:"),
    wrapper=("<response>", "</response>"),
)
GEMMA4 = ThinkingFormat(
    name="gemma4",
    opens=("<|channel>",),
    closes=("<channel|>",),
    label="thought",
    anywhere=True,
    interrupts=("<|tool_call>",),
)
FORMATS = {each.name: each for each in (DEEPSEEK_R1, QWEN3, GRANITE, GEMMA4)}

HARMONY = "gpt_oss"
HARMONY_OPENS = ("<|channel|>analysis<|message|>",)
HARMONY_CLOSES = ("<|end|>",)
AUTO = "auto"
NONE = "none"
NAMES = (AUTO, *FORMATS, HARMONY, NONE)


def format_of_template(template: str | None) -> str:
    """The name of the format that a chat template speaks of, `none` where it speaks of none."""
    if template is None:
        return NONE
    if "<|channel|>" in template:
        return HARMONY
    if GEMMA4.opens[0] in template:
        return GEMMA4.name
    if "thought process" in template or ("<think>" in template and "<response>" in template):
        return GRANITE.name
    if "</think>" not in template and "<think>" not in template:
        return NONE
    # DeepSeek's models think whether or not their template opens the thinking for them.
    return DEEPSEEK_R1.name if "<\uff5cAssistant\uff5c>" in template else QWEN3.name
