"""The known name that a mistyped one is nearest to, for the messages of errors. Knows names, not what they name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_LONGEST = 64  # characters looked at: comparing takes time by the square of them
_CUTOFF = 0.7  # share of characters that agree: "prompts" is near "prompt", "foo" near nothing


def nearest(given: object, known: Iterable[str]) -> str | None:
    """The nearest of a few known names, letter case aside; None where none is near, or `given` is no text."""
    if not isinstance(given, str):
        return None
    by_lower = {name.lower(): name for name in known}
    found = difflib.get_close_matches(given[:_LONGEST].lower(), by_lower, n=1, cutoff=_CUTOFF)
    return by_lower[found[0]] if found else None


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The words " (did you mean 'yarn'?)", to stand behind a name in a message, or nothing."""
    name = nearest(given, known)
    return "" if name is None else f" (did you mean {name!r}?)"
