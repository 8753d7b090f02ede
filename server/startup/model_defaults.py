"""The sampling that a model asks for itself, in its generation_config.json. Reads the file; knows no requests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.engine.errors import LoadError
from windlass.engine.model.loading.preflight import read_json
from windlass.server.options.settings import SamplingDefaults

FILE = "generation_config.json"

_Test = Callable[[float], bool]
# The bounds of the request's fields of these names.
_NUMBERS: dict[str, tuple[_Test, str]] = {
    "temperature": (lambda value: 0 <= value <= 100, "a number from 0 to 100"),
    "top_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "min_p": (lambda value: 0 <= value <= 1, "a number from 0 to 1"),
    "typical_p": (lambda value: 0 < value <= 1, "a number above 0, to 1"),
    "repetition_penalty": (lambda value: 0 < value <= 100, "a number above 0, to 100"),
}
_MOST = 2**31 - 1


def read_defaults(directory: Path) -> SamplingDefaults:
    """What the model's file sets; neutral values where it says nothing, or where there is no file.

    `do_sample: false` means temperature 0, as in transformers. Lengths (`max_new_tokens`) are not taken: they are the
    operator's. Raises LoadError, one line, for values that no request could set either.
    """
    path = directory / FILE
    if not path.is_file():
        return SamplingDefaults()
    values = {name: value for name, value in read_json(path).items() if value is not None}
    found: dict[str, Any] = {}
    for name, (holds, expected) in _NUMBERS.items():
        if name in values:
            value = values[name]
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not holds(value):  # false for NaN
                raise _fault(path, name, expected, value)
            found[name] = float(value)
    if "top_k" in values:
        value = values["top_k"]
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= _MOST:
            raise _fault(path, "top_k", f"an integer from -1 to {_MOST}", value)
        found["top_k"] = max(value, 0)
    if "do_sample" in values:
        if not isinstance(values["do_sample"], bool):
            raise _fault(path, "do_sample", "true or false", values["do_sample"])
        if not values["do_sample"]:
            found["temperature"] = 0.0
    return SamplingDefaults(**found)


def _fault(path: Path, name: str, expected: str, value: object) -> LoadError:
    shown = repr(value)
    return LoadError(
        f"{path}: {name} must be {expected}, got {shown if len(shown) <= 60 else shown[:57] + '...'}: correct the file, or "
        "start with --generation-config none"
    )
