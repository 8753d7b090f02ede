"""What an operator sets for requests that leave it out: sampling, and variables of the chat template. Knows no model's files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.options.panels import ANSWERS
from windlass.server.options.spelling import option

GENERATION_CONFIG = "--generation-config"
OVERRIDE = "--override-generation-config"
TEMPLATE_KWARGS = "--default-chat-template-kwargs"
FILE = "generation_config.json"
NONE = ("none", "vllm")  # the second is vLLM's word

GenerationConfig = Annotated[
    str,
    option(
        GENERATION_CONFIG,
        panel=ANSWERS,
        metavar="auto|none|PATH",
        help="What holds for requests that leave sampling "
        "out: auto (the model's generation_config.json, and for a known model what its authors recommend), none, or "
        "another such file or its folder.",
    ),
]
OverrideGenerationConfig = Annotated[
    str | None,
    option(
        OVERRIDE,
        panel=ANSWERS,
        metavar="JSON",
        help="Sampling in place of what that file says, such as '{\"temperature\": 0.7}'.",
    ),
]

_SAMPLING_EXAMPLE = '{"temperature": 0.7, "top_p": 0.9}'
_KWARGS_EXAMPLE = '{"enable_thinking": false}'
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
_FIELDS = (*_NUMBERS, "top_k", "do_sample")


@dataclass(slots=True, kw_only=True)
class SamplingOptions:
    """What a command takes that is no server; `ServerOptions` has the same among its own."""

    generation_config: GenerationConfig = "auto"
    override_generation_config: OverrideGenerationConfig = None

    def check(self) -> None:
        """Raise LoadError for what cannot be meant."""
        sampling_file(self.generation_config)
        read_override(self.override_generation_config)


def read_sampling(values: Mapping[str, Any], place: str, advice: str) -> dict[str, Any]:
    """The fields of a request that these values of a generation_config.json set; what is null sets nothing.

    `do_sample: false` means temperature 0, as in transformers. Other keys are passed over. place, advice: with what an error
    begins and ends. Raises LoadError, one line, for values that no request could set either.
    """
    found: dict[str, Any] = {}
    for name, (holds, expected) in _NUMBERS.items():
        if (value := values.get(name)) is not None:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not holds(value):  # false for NaN
                raise _fault(place, name, expected, value, advice)
            found[name] = float(value)
    if (value := values.get("top_k")) is not None:
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value <= _MOST:
            raise _fault(place, "top_k", f"an integer from -1 to {_MOST}", value, advice)
        found["top_k"] = max(value, 0)
    if (value := values.get("do_sample")) is not None:
        if not isinstance(value, bool):
            raise _fault(place, "do_sample", "true or false", value, advice)
        if not value:
            found["temperature"] = 0.0
    return found


def read_override(text: str | None) -> dict[str, Any]:
    """What --override-generation-config says, as it stands there; raises LoadError, one line, for what no request could set."""
    values = _object(OVERRIDE, text, _SAMPLING_EXAMPLE)
    for name in values:
        if name == "max_new_tokens":
            raise LoadError(f"{OVERRIDE}: {name} is --default-max-tokens here")
        if name not in _FIELDS:
            known = f"it may set {', '.join(_FIELDS)}"
            raise LoadError(f"{OVERRIDE}: there is no {name[:64]!r} in it{did_you_mean(name[:64], _FIELDS)}: {known}")
    read_sampling(values, OVERRIDE, f"write it like '{_SAMPLING_EXAMPLE}'")
    return values


def sampling_file(given: str) -> Path | None:
    """The file that --generation-config names; None for the model's own or none. Raises LoadError where it is not there."""
    if given in ("auto", *NONE):
        return None
    path, folder = Path(given).expanduser(), False
    try:
        folder = bool(given) and path.is_dir()
        file = path / FILE if folder else path
        if file.is_file():
            return file
    except (OSError, ValueError):
        pass  # that is no name of a file
    raise LoadError(
        f"{GENERATION_CONFIG} {given}: this folder holds no {FILE}"
        if folder
        else f"{GENERATION_CONFIG} must be auto, none, or a {FILE} or its folder, and {given[:200]!r} is none that is there"
        f"{did_you_mean(given, ('auto', *NONE))}"
    )


def read_template_kwargs(text: str | None) -> dict[str, Any]:
    """What --default-chat-template-kwargs says; raises LoadError, one line."""
    return _object(TEMPLATE_KWARGS, text, _KWARGS_EXAMPLE)


def _object(option: str, text: str | None, example: str) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{option} is not valid JSON ({error}): write it like '{example}'") from None
    if not isinstance(value, dict):
        raise LoadError(f"{option} must be a JSON object: write it like '{example}'")
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"JSON has no {name}")


def _fault(place: str, name: str, expected: str, value: object, advice: str) -> LoadError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return LoadError(f"{place}: {name} must be {expected}, got {shown}: {advice}")
