"""From a chat template to the text that puts a query and a document before the model.

A template is code of a model file: it is rendered once, where a text process loads, with marks in place of the texts. What comes
out is plain text with gaps, so that no pair of a caller ever meets the template.
"""

from __future__ import annotations

import re

from windlass.server.text.chat_template import ChatTemplate, ChatTemplateError
from windlass.server.text.pair_prompt import Gap, PairPrompt, PairTemplate

_ROLES: dict[Gap, str] = {"instruction": "system", "query": "query", "document": "document"}
_MARKS: dict[Gap, str] = {"instruction": "\ue000", "query": "\ue001", "document": "\ue002"}  # of no script
_SPACE = "\u2003"  # white space of no template: what is left of it tells whether a text is trimmed
_CUTS = re.compile(f"({_SPACE}?)([\ue000-\ue002])({_SPACE}?)")


def cut_pairs(template: ChatTemplate) -> PairTemplate:
    """Raises ChatTemplateError for a template that does not show messages of the roles `query` and `document`."""
    plain = _cut(template, ("query", "document"))
    missing = [role for role in ("query", "document") if role not in plain.gaps]
    if missing:
        raise ChatTemplateError(
            f"it shows no message of the role {' and none of '.join(missing)}, and has to show a query and a document"
        )
    try:
        instructed = _cut(template, ("instruction", "query", "document"))
    except ChatTemplateError:
        return PairTemplate(plain, None)
    return PairTemplate(plain, instructed if {*instructed.gaps} == {*_ROLES} else None)


def _cut(template: ChatTemplate, roles: tuple[Gap, ...]) -> PairPrompt:
    messages = [{"role": _ROLES[gap], "content": f"{_SPACE}{_MARKS[gap]}{_SPACE}"} for gap in roles]
    # The texts and, between them, of each gap the space before it, its mark, and the space behind it.
    pieces = _CUTS.split(template.render(messages))
    gaps = {mark: gap for gap, mark in _MARKS.items()}
    whole = [bool(before and behind) for before, behind in zip(pieces[1::4], pieces[3::4], strict=True)]
    return PairPrompt(tuple(pieces[::4]), tuple(gaps[mark] for mark in pieces[2::4]), tuple(not one for one in whole))
