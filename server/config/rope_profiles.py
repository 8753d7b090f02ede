"""Named rotary scalings that an operator defines on the command line or in the environment."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.rotary.auto_scaling import AUTO_NAME
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.scaling_fields import KNOWN
from windlass.engine.rotary.scaling_text import parse_scaling

OPTION = "`rope_profile`"
DEFAULT_NAME = "default"  # name of the scaling of requests that set none
EXAMPLE = 'long="yarn 4"'
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX_OF_NAME = re.compile(r"\s*([^\s={}]*)=")

# A word after a short form that begins the next profile: unlike a field, its value is a kind or an object.
_NEXT_PROFILE = re.compile(rf"\s(?=[^\s={{}}]*=\s*(?:\{{|(?:{'|'.join(KNOWN)})(?:\s|$))|\{{)")


def is_profile_name(text: str) -> bool:
    """Whether this may be the name of a profile: 1 to 64 letters, digits, dots, hyphens and underscores."""
    return _NAME.fullmatch(text) is not None


def parse_profiles(values: Sequence[str]) -> dict[str, RopeScaling]:
    """Profiles from any number of `NAME=SCALING` and `{"NAME": SCALING, …}`; a scaling is JSON or a short form.

    Raises LoadError, or RequestError that names one.

    The values are read as one text, because the value of a variable is split at its spaces.
    """
    text = " ".join(values)
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates)
    profiles: dict[str, RopeScaling] = {}
    position = len(text) - len(text.lstrip())
    while position < len(text):
        name = None
        if text[position] != "{":
            match = _PREFIX_OF_NAME.match(text, position)
            if match is None:
                raise LoadError(f"{OPTION} must be NAME=SCALING such as {EXAMPLE}, got {_excerpt(text[position:])}")
            name, position = match[1], match.end()
        if name is not None and not text[position:].lstrip().startswith("{"):
            following = _NEXT_PROFILE.search(text, position)
            end = len(text) if following is None else following.start()
            _add(profiles, name, text[position:end])
            position = end + _count_spaces(text, end)
            continue
        try:
            value, position = decoder.raw_decode(text, position + _count_spaces(text, position))
        except (ValueError, RecursionError) as error:
            what = f" {name}" if name else ""
            raise LoadError(f"{OPTION}{what} is not valid JSON ({error}): write {EXAMPLE}") from None
        for key, item in {name: value}.items() if name is not None else value.items():
            _add(profiles, key, item)
        position += _count_spaces(text, position)
    return profiles


def _add(profiles: dict[str, RopeScaling], name: str, value: Any) -> None:
    if not is_profile_name(name):
        raise LoadError(
            f"{OPTION} {_excerpt(name)}: a name has 1 to 64 letters, digits, dots, hyphens and underscores and begins "
            "with a letter or digit"
        )
    if name == AUTO_NAME:
        raise LoadError(f"{OPTION} {name}: the name means the smallest scaling that a length needs: choose another")
    if name in profiles:
        raise LoadError(f"{OPTION} {name} is given twice: remove one")
    param = f"{OPTION} {name}"
    profiles[name] = (
        parse_scaling(value, param=param) if isinstance(value, str) else RopeScaling.from_dict(value, param=param)
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [key for key, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:64]!r} is given twice")
    return found


def _count_spaces(text: str, position: int) -> int:
    """The number of spaces at `position`."""
    return len(text) - position - len(text[position:].lstrip())


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
