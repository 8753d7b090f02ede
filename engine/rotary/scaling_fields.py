"""Fields of a rotary scaling: the keys of each kind, and how values are checked and normalised.

Errors name the field. Checks that need a model (list lengths) are in `rope_scaling`. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from windlass.engine.errors import RequestError, did_you_mean, nearest

Value = float | int | bool | tuple[float, ...]

Reader = Callable[[Any, str], Value]  # of a value and the name of its field

_YARN = "factor original_max_position_embeddings attention_factor beta_fast beta_slow"

KINDS: dict[str, tuple[str, ...]] = {
    kind: tuple(fields.split())
    for kind, fields in {
        "default": "",
        "linear": "factor",
        "ntk": "factor",
        "dynamic": "factor alpha",
        "yarn": f"{_YARN} mscale mscale_all_dim truncate",
        "llama3": "factor low_freq_factor high_freq_factor original_max_position_embeddings",
        "longrope": "short_factor long_factor factor original_max_position_embeddings attention_factor "
        "short_mscale long_mscale",
        "proportional": "factor",
        "learned": "",
        "dual_chunk": f"chunk_size local_size {_YARN} log_n length_scores",
        "self_extend": "group_size window original_max_position_embeddings log_n",
        "rerope": "window factor original_max_position_embeddings log_n",
        "log_n": "original_max_position_embeddings",
    }.items()
}

ALIASES = {"su": "longrope", "mrope": "default"}

# Three-part positions of vision models. On text the parts are equal, which gives the plain rotation, so every kind
# accepts these fields and only the sum of the sections is checked.
SECTION_FIELDS = ("mrope_section", "mrope_interleaved")
KNOWN = (*KINDS, *ALIASES)

_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "ntk": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}

_MAX_LIST = 4096

# Error codes of the API.
UNKNOWN, MISSING, INVALID = "unknown_field", "missing_field", "invalid_value"


def invalid(field: str, message: str, code: str = INVALID) -> RequestError:
    """An error whose message begins with the name of the field."""
    return RequestError(f"{field} {message}", field, code)


def fields_of(rope_type: str) -> tuple[str, ...]:
    """All keys of an object of this kind except `rope_type` and SECTION_FIELDS, in canonical order."""
    return KINDS[rope_type] if rope_type == "learned" else ("rope_theta", *KINDS[rope_type])


def read_rope_type(obj: dict[str, Any], param: str) -> str:
    """The canonical kind of a flat object, from `rope_type` or the older `type`. Raises RequestError."""
    names = [key for key in ("rope_type", "type") if obj.get(key) is not None]
    if not names:
        written = next((key for key in islice(obj, 16) if nearest(key, ("rope_type",))), None)
        meant = "" if written is None else f" (did you mean it by {format_value(written)}?)"
        raise invalid(f"{param}.rope_type", f"is missing{meant}: give one of {', '.join(KNOWN)}", MISSING)
    kinds = []
    for key in names:
        kind = obj[key]
        canonical = ALIASES.get(kind, kind) if isinstance(kind, str) else None
        if canonical not in KINDS:
            raise invalid(
                f"{param}.{key}",
                f"{format_value(kind)} is not known{did_you_mean(kind, KNOWN)}: use one of {', '.join(KNOWN)}",
            )
        kinds.append(canonical)
    if len(set(kinds)) > 1:
        raise RequestError(
            f"{param} has rope_type {kinds[0]!r} and type {kinds[1]!r}: keep rope_type only", f"{param}.type", INVALID
        )
    return kinds[0]


def read_fields(obj: dict[str, Any], rope_type: str, param: str) -> tuple[tuple[str, Value], ...]:
    """Check and normalise the values of a flat object of this kind, in canonical order. `null` means missing.

    Raises RequestError naming the field for an unknown key, a wrong type or value, or a missing one.
    """
    known = (*fields_of(rope_type), *SECTION_FIELDS)
    for key in obj:
        if key in ("rope_type", "type"):
            continue
        if key == "partial_rotary_factor":
            raise invalid(
                f"{param}.partial_rotary_factor", "belongs to the model and cannot be changed: leave it out", UNKNOWN
            )
        if key not in known:
            raise invalid(
                f"{param}.{format_key(key)}",
                f"is not a field of rope_type {rope_type!r}{did_you_mean(key, known)}: it takes {', '.join(known)}",
                UNKNOWN,
            )
    values = {key: _READERS[key](obj[key], f"{param}.{key}") for key in known if obj.get(key) is not None}
    for key in _REQUIRED.get(rope_type, ()):
        if key not in values:
            raise invalid(f"{param}.{key}", f"is missing: rope_type {rope_type!r} needs it", MISSING)
    _check_together(values, rope_type, param)
    return tuple(values.items())


def _check_together(values: dict[str, Any], rope_type: str, param: str) -> None:
    """Refuse combinations of values that are valid one by one."""

    def refuse(key: str, message: str) -> None:
        code = MISSING if message.startswith("is missing") else INVALID
        raise invalid(f"{param}.{key}", message, code)

    if rope_type == "dynamic":
        if "factor" not in values and "alpha" not in values:
            refuse("factor", "is missing: rope_type 'dynamic' needs factor, or alpha for a fixed base")
        if "alpha" in values and values.get("factor", 1.0) != 1.0:
            refuse("factor", "would be ignored with alpha: leave one of them out")
    elif rope_type == "yarn":
        if "factor" not in values and "original_max_position_embeddings" not in values:
            refuse("factor", "is missing: rope_type 'yarn' needs it (or original_max_position_embeddings)")
    elif rope_type in ("dual_chunk", "rerope"):
        if values.get("factor", 1.0) < 1.0:
            refuse("factor", "must be at least 1")
        for key in ("attention_factor", "beta_fast", "beta_slow"):
            if key in values and "factor" not in values:
                refuse(key, "would be ignored without factor: give both or neither")
    elif rope_type == "llama3":
        if values["high_freq_factor"] < values["low_freq_factor"]:
            refuse("high_freq_factor", "must not be smaller than low_freq_factor")
    elif rope_type == "longrope":
        if len(values["short_factor"]) != len(values["long_factor"]):
            refuse("long_factor", "must have as many numbers as short_factor")
        if ("short_mscale" in values) != ("long_mscale" in values):
            missing = "long_mscale" if "short_mscale" in values else "short_mscale"
            refuse(missing, "is missing: give short_mscale and long_mscale together")
        if "short_mscale" in values and "attention_factor" in values:
            refuse("attention_factor", "would be ignored with short_mscale and long_mscale: leave one out")
    if values.get("beta_fast", 32.0) < values.get("beta_slow", 1.0):
        refuse("beta_fast", "must not be smaller than beta_slow (they default to 32 and 1)")
    if values.get("local_size", 1) >= values.get("chunk_size", 2**53):
        refuse("local_size", "must be smaller than chunk_size")


def _number(value: Any, param: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid(param, f"must be a number, got {format_value(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise invalid(param, f"must be a finite number, got {format_value(value)}")
    return number


def _above(bound: int) -> Callable[[Any, str], float]:
    def read(value: Any, param: str) -> float:
        number = _number(value, param)
        if number <= bound:
            raise invalid(param, f"must be greater than {bound}, got {format_value(value)}")
        return number

    return read


_positive = _above(0)


def _not_negative(value: Any, param: str) -> float:
    number = _number(value, param)
    if number < 0:
        raise invalid(param, f"must not be negative, got {format_value(value)}")
    return number


def _whole(least: int, end: int, unit: str = "") -> Callable[[Any, str], int]:
    def read(value: Any, param: str) -> int:
        number = _number(value, param)
        if number != int(number) or not least <= number < end:
            message = f"{param} must be a whole number{unit}, at least {least}, got {format_value(value)}"
            raise RequestError(message, param, INVALID)
        return int(number)

    return read


_length, _tokens = _whole(2, 2**53, " of tokens"), _whole(1, 2**53, " of tokens")


def _sections(value: Any, param: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= _MAX_LIST:
        raise invalid(param, f"must be a list of pair counts, got {format_value(value)}")
    counts = tuple(_number(entry, f"{param}[{i}]") for i, entry in enumerate(value))
    if any(count != int(count) or count < 0 for count in counts):
        raise invalid(param, "must contain whole numbers of pairs that are not negative")
    return tuple(int(count) for count in counts)


def _flag(value: Any, param: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(param, f"must be true or false, got {format_value(value)}")
    return value


def _positives(value: Any, param: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple):
        raise invalid(param, f"must be a list of numbers, got {format_value(value)}")
    if not 1 <= len(value) <= _MAX_LIST:
        raise invalid(param, f"must hold one number per rotated pair, got {len(value)} numbers")
    return tuple(_positive(entry, f"{param}[{i}]") for i, entry in enumerate(value))


def format_value(value: Any) -> str:
    """A value of any size, shortened for a message, with JSON names."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge integer"  # repr() of a very long one is refused by Python
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_READERS: dict[str, Reader] = {
    **dict.fromkeys(("factor", "alpha", "attention_factor", "beta_fast", "beta_slow"), _positive),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "short_mscale", "long_mscale"), _positive),
    **dict.fromkeys(("mscale", "mscale_all_dim"), _not_negative),
    **dict.fromkeys(("original_max_position_embeddings", "chunk_size"), _length),
    **dict.fromkeys(("local_size", "window"), _tokens),
    **dict.fromkeys(("short_factor", "long_factor"), _positives),
    **dict.fromkeys(("truncate", "log_n", "length_scores", "mrope_interleaved"), _flag),
    "rope_theta": _above(1),
    "group_size": _whole(2, 2**31),
    "mrope_section": _sections,
}


def format_key(key: Any) -> str:
    """A key shortened for a message, with unprintable characters escaped."""
    text = str(key)
    text = text if len(text) <= 60 else text[:57] + "..."
    return text if text.isprintable() else repr(text)[1:-1]
