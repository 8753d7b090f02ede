"""What `\\d`, `\\w` and `\\s` stand for in a caller's patterns: ASCII, as in the patterns of JSON schemas and in JavaScript.

llguidance reads them as Unicode does: a model would write the digits of any script where a number is asked for.
"""

from __future__ import annotations

import re

# In brackets, which may stand inside those of another class; no white space as itself, which (?x) leaves out of account.
_DIGITS, _WORD, _SPACES = "0-9", "0-9A-Za-z_", r"\t\n\x0B\f\r\x20"
_ASCII = {
    f"\\{letter if sign == '' else letter.upper()}": f"[{sign}{members}]"
    for letter, members in (("d", _DIGITS), ("w", _WORD), ("s", _SPACES))
    for sign in ("", "^")
}
_ESCAPED = r"\\."
# Inside a class a range comes first: one that would end in a class has no meaning, and stays for llguidance to refuse.
_INSIDE = re.compile(rf"(?:\\[^dwsDWS]|[^\\\[\]-])-(?:{_ESCAPED}|[^\\\[\]-])|{_ESCAPED}|\[\^?\]?|.", re.DOTALL)
_OUTSIDE = re.compile(rf"{_ESCAPED}|\[\^?\]?|.", re.DOTALL)
# What llguidance's Lark is made of, as far as slashes may stand in it: comments, strings, special tokens and patterns.
_LARK = re.compile(rf'(?:#|//)[^\n]*|"(?:{_ESCAPED}|[^"\\])*"|<[^<>\s]+>|(/(?:{_ESCAPED}|[^/\\])+/)', re.DOTALL)


def in_pattern(pattern: str) -> str:
    """The pattern with the classes written out."""
    parts: list[str] = []
    depth = place = 0
    while found := (_INSIDE if depth else _OUTSIDE).match(pattern, place):
        part, place = found[0], found.end()
        parts.append(_ASCII.get(part, part))
        if part.startswith("["):
            depth += 1
        elif part == "]" and depth:
            depth -= 1
    return "".join(parts)


def in_lark(grammar: str) -> str:
    """The grammar with the classes written out in its patterns."""
    return _LARK.sub(lambda found: found[0] if found[1] is None else in_pattern(found[1]), grammar)
