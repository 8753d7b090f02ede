"""Adapters as an operator writes them: NAME=DIR. Reads the notation; what the files hold is for the engine to say."""

from __future__ import annotations

import re
from pathlib import Path

from windlass.engine.errors import LoadError
from windlass.engine.interface.model_info import AdapterSource
from windlass.server.options.spelling import split

OPTION = "--lora"
NAME_RULE = "1 to 128 letters, digits, dots, hyphens, underscores and slashes, a letter or digit first"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")


def is_adapter_name(name: str) -> bool:
    """Whether an adapter may have this name."""
    return _NAME.fullmatch(name) is not None


def parse_adapters(values: list[str] | None) -> tuple[AdapterSource, ...]:
    """Adapters from any number of NAME=DIR, numbered from 1 on; raises LoadError naming one."""
    found: dict[str, AdapterSource] = {}
    for value in split(values):
        name, equals, path = value.partition("=")
        if not equals or not path:
            raise LoadError(f"{OPTION} must be NAME=DIR such as poet=adapters/poet, got {value[:80]!r}")
        if not is_adapter_name(name):
            raise LoadError(f"{OPTION} {name[:80]!r}: a name has {NAME_RULE}")
        if name in found:
            raise LoadError(f"{OPTION} {name} is given twice: keep one")
        try:
            directory = Path(path).expanduser().absolute()
            is_directory = directory.is_dir()
        except (OSError, RuntimeError, ValueError) as error:
            raise LoadError(f"{OPTION} {name}: {error}: give a directory") from None
        if not is_directory:
            raise LoadError(f"{OPTION} {name}: {path} is no directory: give one as PEFT writes it")
        found[name] = AdapterSource(len(found) + 1, name, str(directory))
    return tuple(found.values())
