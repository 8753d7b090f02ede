"""One description per option: name, kind, default, help text, and the engine field that it sets.

The command line, environment variables, the configuration file, `LLM(...)` and Ray Serve configurations all read values with
`Option.read`. Messages name an option, or the engine field that it sets, in backquotes, with a value if there is one:
"`cache.memory`", "`rope_policy=off`". `windlass.server.config.option_names` spells these names for the reader.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform

from windlass.engine.errors import LoadError, did_you_mean, reason_of
from windlass.engine.interface.config import parse_dtype, parse_size

# How an option is set, apart from its environment variable: on the command line and in the configuration file, in the
# configuration file only, or not at all (a variable for experts).
Scope = Literal["flag", "key", "variable"]

MAX_SECONDS = 1e9  # the clocks of operating systems do not reach much further
MAX_TEMPLATE_BYTES = 1024 * 1024
SCALING_EXAMPLE = '{"rope_type": "yarn", "factor": 4}'
_MIN_BARE_BYTES = 1 << 20
_MAX_SHOWN = 80  # characters of a value in a message
_TOKEN_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SWITCH_WORDS = {
    **dict.fromkeys(("1", "true", "t", "yes", "y", "on"), True),
    **dict.fromkeys(("0", "false", "f", "no", "n", "off"), False),
}

T = TypeVar("T")


class Panel(StrEnum):
    """Groups of options on help pages and in the documentation."""

    MODEL = "Model and weights"
    CONTEXT = "Context and cache"
    BATCHING = "Batching and processors"
    ROTARY = "Rotary scaling"
    ADAPTERS = "LoRA adapters"
    SPECULATION = "Speculative decoding"
    NETWORK = "Network"
    ACCESS = "Access"
    ANSWERS = "Requests and answers"
    OPERATION = "Operation"
    CONNECTIONS = "Connections"
    CLUSTER = "Cluster"

    def option(self, kind: Kind, *, default: Any = None, **description: Any) -> Any:
        """A field of a class decorated with `options`. The parameters are the fields of `Option`. default: None for absent."""
        description.setdefault("in_llm", "sets" in description or "reported" in description)
        return field(
            default=default, metadata={"option": Option(kind=kind, default=default, panel=self, **description)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a value is written.

    form: completes "must be …" in an error. read: makes the value of a text or of a Python object, and of what it returned
    before; raises ValueError, or UnusableValue with a message of its own. metavar: placeholder on help pages.
    parameter: type that the command line's parser is given.
    """

    form: str
    read: Callable[[Any], Any]
    metavar: str
    parameter: Any = str


@dataclass(slots=True, kw_only=True)
class Option:
    """An option of a command.

    sets: path of the engine field that gets its value. convert: makes the field's value of the option's. main: shown by
    `--help`; the others by `--help-all`. reported: shown at start if it is not at its default. in_llm, in_ray: whether `LLM`
    and `windlass ray deploy` accept it; `LLM` accepts those that set an engine field or are reported.
    """

    name: str = ""
    kind: Kind
    default: Any
    help: str
    panel: Panel
    scope: Scope = "flag"
    sets: str | None = None
    convert: Callable[[Any], Any] | None = None
    main: bool = False
    reported: bool = False
    in_llm: bool = False
    in_ray: bool = True

    @property
    def key(self) -> str:
        """The key in the configuration file: `kv-cache-memory`."""
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def variable(self) -> str:
        return f"WINDLASS_{self.name.upper()}"

    def spell(self, value: object = None, *, keyword: bool = False) -> str:
        """The name as the reader writes it, with a value if there is one. keyword: for `LLM(...)`, not for a command."""
        if self.scope == "variable":
            return self.variable if value is None else f"{self.variable}={value}"
        command_name = self.flag if self.scope == "flag" else f"configuration key {self.key}"
        name = self.name if keyword else command_name
        return name if value is None else f"{name} {value}"

    def read(self, value: Any) -> Any:
        """The value of this option. Raises OptionError."""
        if value is None and self.default is None:
            return None
        if type(value).__module__ == "numpy" and hasattr(value, "item"):
            value = value.item()
        try:
            if value is None or (isinstance(value, bool) and self.kind is not SWITCH):
                raise ValueError
            return self.kind.read(value)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise OptionError(self, _problem(self.kind, value, error)) from None

    def to_text(self, value: Any) -> str:
        """A value as the command line has it, for another process and for people."""
        if isinstance(value, bool):
            return str(value).lower()
        return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else f"{value}"


class UnusableValue(ValueError):
    """A value of an option cannot be used. The message follows the name of the option."""


class OptionError(LoadError):
    """The value of an option cannot be used."""

    def __init__(self, option: Option, problem: str) -> None:
        super().__init__(f"`{option.name}` {problem}")
        self.option, self.problem = option, problem

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadError, (str(self),)  # an option has functions, which cannot be sent to another process


def read_value(flag: str, kind: Kind, value: str) -> Any:
    """The value of an option that one command has. Raises LoadError."""
    try:
        return kind.read(value)
    except ValueError as error:
        raise LoadError(f"{flag} {_problem(kind, value, error)}") from None


def _problem(kind: Kind, value: object, error: Exception) -> str:
    return str(error) if isinstance(error, UnusableValue) else f"must be {kind.form}, got {excerpt(value)}"


@dataclass_transform(kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """Make a dataclass of options: each is named after its field, and its value is read when an object is made."""

    def read_all(self: Any) -> None:
        for each in options_of(made).values():
            setattr(self, each.name, each.read(getattr(self, each.name)))

    cls.__post_init__ = read_all  # type: ignore[attr-defined]
    made = dataclass(slots=True, kw_only=True)(cls)
    for each in fields(made):  # type: ignore[arg-type]
        each.metadata["option"].name = each.name
    return made


def options_of(cls: Any) -> dict[str, Option]:
    """The options of a class, or of an object of it, by name."""
    return {each.name: each.metadata["option"] for each in fields(cls)}


def excerpt(value: object) -> str:
    """The start of a value for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def _alternatives(known: Sequence[object]) -> str:
    *others, last = map(str, known)
    return f"{', '.join(others)} or {last}" if others else last


def _integer(value: Any) -> int:
    if isinstance(value, float):
        raise ValueError
    return int(value)


def integer(low: int | None = None, high: int | None = None) -> Kind:
    """A whole number. Bounds that the engine checks are not repeated here."""
    if high is not None:
        form = f"a whole number between {low} and {high}"
    else:
        form = "a whole number" if low is None else f"a whole number of at least {low}"

    def read(value: Any) -> int:
        number = _integer(value)
        if (low is not None and number < low) or (high is not None and number > high):
            raise ValueError
        return number

    return Kind(form=form, read=read, metavar="N")


def non_negative_number(form: str, metavar: str) -> Kind:
    """A finite number of at least 0."""

    def read(value: Any) -> float:
        found = float(value)
        if not 0 <= found < math.inf:
            raise ValueError
        return found

    return Kind(form=form, read=read, metavar=metavar)


def seconds(*, allow_zero: bool = True, allow_infinite: bool = False) -> Kind:
    """A duration in seconds that a clock can count; `inf` is math.inf."""
    least, most = "0 or more" if allow_zero else "more than 0", " or inf" if allow_infinite else ""

    def read(value: Any) -> float:
        found = float(value)
        if allow_infinite and found == math.inf:
            return found
        if not (0 <= found <= MAX_SECONDS and (allow_zero or found > 0)):
            raise ValueError
        return found

    return Kind(form=f"{least} seconds, at most {MAX_SECONDS:g}{most}", read=read, metavar="SECONDS")


def choice(*names: str) -> Kind:
    """One of several words."""

    def read(value: Any) -> str:
        if value not in names:
            raise UnusableValue(f"must be {_alternatives(names)}, got {excerpt(value)}{did_you_mean(value, names)}")
        return str(value)

    return Kind(form=_alternatives(names), read=read, metavar="|".join(names))


def read_tokens(value: Any) -> int:
    """A number of tokens: 8192, 8k and 8K are the same. Raises ValueError."""
    if isinstance(value, float):
        raise ValueError
    match = re.fullmatch(r"\s*(-?\d{1,18}(?:\.\d{1,18})?)([kmg]?)\s*", str(value), re.ASCII | re.IGNORECASE)
    if match is None or ("." in match[1] and not match[2]):
        raise ValueError
    found = Decimal(match[1]) * _TOKEN_UNITS[match[2].lower()]
    if found != int(found):
        raise ValueError
    return int(found)


_TOKENS_FORM = "a whole number of tokens such as 8192 or 8k (the same: k is 1,024, m 1,024k, g 1,024m)"
TOKENS = Kind(form=_TOKENS_FORM, read=read_tokens, metavar="TOKENS")

TOKENS_OR_AUTO = Kind(
    form=f"auto or {_TOKENS_FORM}",
    read=lambda value: None if str(value).strip().lower() == "auto" else read_tokens(value),
    metavar="TOKENS",
)


def _read_size(value: Any) -> int:
    if isinstance(value, float):
        raise ValueError
    try:
        return parse_size(str(value))
    except LoadError:
        raise ValueError from None


def read_memory(value: Any) -> int:
    """A size of memory in bytes. A bare number below 1 MiB is refused: a unit is missing. Raises ValueError."""
    size = _read_size(value)
    if size < _MIN_BARE_BYTES and (number := str(value).strip()).isdecimal():
        raise UnusableValue(f"is {number} bytes: write {number}{'GiB' if size < 1024 else 'MiB'}")
    return size


_SIZE_FORM = "a size such as 4GiB, 500MB or a number of bytes"
SIZE_OR_ZERO = Kind(form=f"0 or {_SIZE_FORM}", read=lambda v: 0 if v in (0, "0") else _read_size(v), metavar="SIZE")
MEMORY = Kind(form=_SIZE_FORM, read=read_memory, metavar="SIZE")


def _read_switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if (known := _SWITCH_WORDS.get(str(value).strip().lower())) is None:
        raise ValueError
    return known


SWITCH = Kind(form="true or false", read=_read_switch, metavar="", parameter=bool)


def _read_text(value: Any) -> str:
    if not isinstance(value, str | os.PathLike):
        raise ValueError
    return os.fspath(value)


def text(form: str = "a text", metavar: str = "TEXT") -> Kind:
    """A text, or the path of a file where words and paths are both possible."""
    return Kind(form=form, read=_read_text, metavar=metavar)


def path(metavar: str) -> Kind:
    """The path of a file or folder."""
    return Kind(form="a path", read=lambda value: Path(_read_text(value)), metavar=metavar, parameter=Path)


def folder(words: str, *allowed: str, aliases: Mapping[str, str] | None = None) -> Kind:
    """An absolute folder, which need not exist, or one of the allowed words. words: completes "give …" in errors."""

    def read(value: Any) -> str:
        given = _read_text(value)
        given = (aliases or {}).get(given, given)
        if given in allowed:
            return given
        if not given:
            raise UnusableValue(f"is empty: give {words}")
        try:
            found = Path(given).expanduser().absolute()
            is_other = found.exists() and not found.is_dir()
        except (OSError, RuntimeError) as error:
            raise UnusableValue(f"{given!r} cannot be used ({reason_of(error)}): give {words}") from None
        if is_other:
            raise UnusableValue(f"{given!r} is a file: give {words}")
        return str(found)

    return Kind(form=words, read=read, metavar="DIR")


def number_type(parse: Callable[[str], str] = parse_dtype) -> Kind:
    """A name of a number type."""

    def read(value: Any) -> str:
        if not isinstance(value, str):
            raise ValueError
        try:
            return parse(value)
        except LoadError as error:
            raise UnusableValue(f"names an {error}") from None

    return Kind(form="the name of a number type", read=read, metavar="DTYPE")


def json_text(value: Mapping[str, Any], example: str) -> str:
    """An object as JSON. Raises ValueError."""
    try:
        return json.dumps(dict(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableValue(f"cannot be written as JSON ({error}): give a mapping such as {example}") from None


def json_object(example: str, form: str = "") -> Kind:
    """A JSON object, held as text. A mapping is written as JSON. form: of kinds that accept other texts too."""

    def read(value: Any) -> str:
        if isinstance(value, Mapping):
            return json_text(value, example)
        if not isinstance(value, str):
            raise ValueError
        return value

    return Kind(form=form or f"a mapping such as {example}", read=read, metavar="JSON")


def _read_list(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable):
        raise ValueError
    return [_read_text(each) for each in value]


def texts(metavar: str) -> Kind:
    """A list of texts, on the command line by repeating the option."""
    return Kind(form="a text or a list of texts", read=_read_list, metavar=metavar, parameter=list[str])


def split(values: list[str] | None) -> list[str]:
    """The parts of repeated options and of comma-separated lists."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def read_template_file(name: str, path: Path) -> str:
    """The text of a template file. Raises LoadError for one that is unreadable or too large."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise LoadError(f"`{name}={path}` is larger than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read `{name}={path}`: {reason_of(error)}") from None


def to_arguments(given: Any) -> list[str]:
    """The command line that gives another process the same options: those that are not at their default."""
    arguments: list[str] = []
    for each in options_of(given).values():
        value = getattr(given, each.name)
        if value == each.default or each.scope != "flag":
            continue
        if isinstance(value, bool):
            arguments.append(each.flag if value else f"--no-{each.key}")
        elif isinstance(value, list):
            arguments += [f"{each.flag}={item}" for item in value]
        else:
            arguments.append(f"{each.flag}={each.to_text(value)}")
    return arguments
