"""Rotary scalings as text: the short form `yarn 4 beta_fast=16`, or a JSON object. Imports no torch."""

from __future__ import annotations

import json
from typing import Any

from windlass.engine.errors import RequestError
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.scaling_fields import INVALID, KNOWN, format_value, invalid

EXAMPLE = 'yarn 4, or {"rope_type": "yarn", "factor": 4}'
MAX_CHARACTERS = 65_536


def names_kind(text: str) -> bool:
    """Whether a text is a scaling rather than a profile's name: a JSON object, or words that begin with a kind."""
    return text.lstrip().startswith("{") or (text.split(None, 1) or [""])[0].lower() in KNOWN


def parse_scaling(text: str, *, param: str = "rope_scaling") -> RopeScaling:
    """The scaling of a text: a kind with its factor and further fields as `name=value`, or a JSON object.

    Raises RequestError that names `param` or its field.
    """
    if len(text) > MAX_CHARACTERS:
        raise invalid(param, f"has {len(text)} characters: write at most {MAX_CHARACTERS}")
    if text.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not valid JSON ({error}): write {EXAMPLE}", param, INVALID) from None
        return RopeScaling.from_dict(given, param=param)
    kind, *words = split_words(text) or [""]
    if not kind:
        raise invalid(param, f"is empty: write {EXAMPLE}")
    fields: dict[str, Any] = {"rope_type": kind.lower() if kind.lower() in KNOWN else kind}  # as in "YaRN 4"
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            name, value = "factor", word
        if name in fields:
            raise invalid(f"{param}.{name[:60]}", f"is given twice in {format_value(text)}: write it once")
        fields[name] = read_value(value)
    return RopeScaling.from_dict(fields, param=param)


def split_words(text: str) -> list[str]:
    """Words of a line. Values in double quotes or brackets may contain spaces."""
    words: list[str] = []
    start, depth, quoted = None, 0, False
    for position, letter in enumerate(text):
        if letter == '"' and text[position - 1 : position] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (letter in "[{") - (letter in "]}")
        if not letter.isspace() or depth != 0 or quoted:
            start = position if start is None else start
        elif start is not None:
            words.append(text[start:position])
            start = None
    return words if start is None else [*words, text[start:]]


def read_value(text: str) -> Any:
    """The value of a JSON text; other texts unchanged."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
