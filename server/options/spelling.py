"""How options are spelt and their values read: each one also an environment variable, and errors that name it.

Knows typer; knows nothing of what an option is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.interface.config import parse_dtype, parse_size

LOG_FORMATS = ("text", "json")
MAX_TEMPLATE_BYTES = 1024 * 1024
_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST_BARE_BYTES = 1 << 20
MOST_SECONDS = 1e9  # a system's clocks count a little further
_LOG_LEVELS = ("debug", "info", "warning", "error")

Choice = TypeVar("Choice", bound=str)


def option(
    *names: str,
    help: str,
    panel: str | None = None,
    metavar: str | None = None,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """A typer option that also reads WINDLASS_<FIRST NAME>. parser: makes its value of what is written."""
    variable = "WINDLASS_" + names[0].split("/")[0].removeprefix("--").replace("-", "_").upper()
    return typer.Option(*names, help=help, envvar=variable, rich_help_panel=panel, metavar=metavar, parser=parser)


def tokens_option(name: str, *, help: str, panel: str, auto: bool = False) -> Any:
    """An option that is a number of tokens. auto: it may be the word, too, for what holds without the option."""
    return option(name, help=help, panel=panel, metavar="TOKENS", parser=_read_tokens_or_auto if auto else _read_tokens)


ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `windlass models` lists, a directory of a Hugging Face model, a GGUF file, or a hub id such as "
        "Qwen/Qwen3-0.6B. Default: smollm2, downloaded the first time; where that cannot be had, the bundled model.",
        envvar="WINDLASS_MODEL",
        show_default=False,
    ),
]
ModelOption = Annotated[
    str | None,
    option(
        "--model", help="A known name, a directory, a GGUF file or a hub id. Default: smollm2, else the bundled model."
    ),
]


LogLevel = Annotated[str, option("--log-level", help=f"{', '.join(_LOG_LEVELS)}.")]


def check_log_level(level: str) -> str:
    """The level in lower case; raises LoadError for an unknown one."""
    return choose("--log-level", level.lower(), _LOG_LEVELS)


def choose(name: str, value: str, known: Sequence[Choice]) -> Choice:
    """The value, which is one of those known; raises LoadError."""
    for choice in known:
        if value == choice:
            return choice
    *others, last = known
    raise LoadError(f"{name} must be {', '.join(others)} or {last}, got {value!r}{did_you_mean(value, known)}")


def read_dtype(name: str, value: str, parse: Callable[[str], str] = parse_dtype) -> str:
    try:
        return parse(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def _read_tokens(text: str | int) -> int:
    """A number of tokens, as vLLM writes them too: 8192, 8k (8,000) or 8K (8,192)."""
    match = re.fullmatch(r"\s*(-?\d{1,18})(\.\d{1,18})?([kmgKMG]?)\s*", str(text))
    if match is None or (match[2] and match[3] not in ("k", "m", "g")):
        raise typer.BadParameter(
            f"cannot read {str(text)[:64]!r} as tokens: write for example 8192, 8k (8,000) or 8K (8,192)"
        )
    return int(Decimal(match[1] + (match[2] or "")) * _TOKENS[match[3]])


def _read_tokens_or_auto(text: str | int) -> int | None:
    """None for auto, which is what holds without the option."""
    return None if str(text).strip().lower() == "auto" else _read_tokens(text)


def read_size(name: str, value: str) -> int:
    try:
        return parse_size(value)
    except LoadError as error:
        raise LoadError(f"{name}: {error}") from error


def read_memory(name: str, value: str) -> int:
    """A size of memory: one that was meant in GiB is not taken for bytes. Raises LoadError."""
    size = read_size(name, value)
    if size < _LEAST_BARE_BYTES and (number := value.strip()).isdecimal():
        raise LoadError(f"{name}: {number} is {number} bytes: write {number}{'GiB' if size < 1024 else 'MiB'}")
    return size


def check_seconds(name: str, value: float | None, *, zero: bool = True, endless: bool = False) -> None:
    """LoadError for a length of time that is none, or that no clock counts. zero, endless: whether it may be 0, or inf."""
    if value is None or (endless and value == math.inf):
        return
    if not (0 <= value <= MOST_SECONDS and (zero or value > 0)):
        least, most = ("0 or more" if zero else "more than 0"), (" or inf" if endless else "")
        raise LoadError(f"{name} must be {least} seconds, at most {MOST_SECONDS:g}{most}, got {value:g}")


def read_template_file(name: str, path: Path) -> str:
    """The text of a file with a template; raises LoadError for one that cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise LoadError(f"{name} {path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read {name} {path}: {error}") from None


def split(values: list[str] | None) -> list[str]:
    """Repeated options and comma-separated lists alike."""
    return [part.strip() for value in values or [] for part in value.split(",") if part.strip()]


def to_arguments(options: Any) -> list[str]:
    """The command line that gives the same options to another process: those of a dataclass that are not at their default."""
    arguments: list[str] = []
    for field in fields(options):
        value, name = getattr(options, field.name), field.name.replace("_", "-")
        if value == field.default:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}={item}" for item in (value if isinstance(value, list) else [value])]
    return arguments
