"""The notation of `--rope-ladder`: up to which length of a request which profile holds.

Whether the steps suit a model, and one another, is for `windlass.engine.rotary.auto_scaling` to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.rotary.auto_scaling import MAX_STEPS, ScalingThreshold
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.server.options.spelling import split

OPTION = "--rope-ladder"
EXAMPLE = "8192=none,32768=long"
_NONE = "none"  # the model as it is
_MOST_DIGITS = 10


def parse_ladder(values: Sequence[str] | None, profiles: Mapping[str, RopeScaling]) -> tuple[ScalingThreshold, ...]:
    """Steps from any number of `TOKENS=PROFILE`, repeated or with commas between them; raises LoadError naming one."""
    parts = split(list(values or ()))
    if len(parts) > MAX_STEPS:
        raise LoadError(f"{OPTION} has {len(parts)} steps: give at most {MAX_STEPS}")
    return tuple(_step(part, profiles) for part in parts)


def _step(part: str, profiles: Mapping[str, RopeScaling]) -> ScalingThreshold:
    tokens, equals, name = (piece.strip() for piece in part.partition("="))
    plain = tokens.isascii() and tokens.isdigit() and len(tokens) <= _MOST_DIGITS
    if not equals or not plain or not name or int(tokens) < 1:
        raise LoadError(f"{OPTION} must be TOKENS=PROFILE, several with commas, such as {EXAMPLE}; got {part[:60]!r}")
    if name in profiles:
        if name == _NONE:
            raise LoadError(f"{OPTION} {part}: none is the model as it is, and a --rope-profile too: rename that")
        return ScalingThreshold(int(tokens), profiles[name], name)
    if name == _NONE:
        return ScalingThreshold(int(tokens))
    raise LoadError(
        f"{OPTION} {part[:60]}: no --rope-profile has that name{did_you_mean(name, [*profiles, _NONE])}; none is the model "
        "as it is"
    )
