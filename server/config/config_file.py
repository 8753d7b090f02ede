"""The configuration file (`--config FILE`): a YAML file of options."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml  # type: ignore[import-untyped]  # its stubs are a separate package

from windlass.engine.errors import LoadError, did_you_mean, reason_of
from windlass.server.config.migration_hints import foreign_option_hint, moved_option_hint
from windlass.server.config.option import OptionError
from windlass.server.config.server_options import OPTIONS

MAX_BYTES = 1024 * 1024

_EMPTY = ("", "~", "null", "Null", "NULL")

# Older typers use click's exceptions, newer ones their own copy of them.
_BadParameter: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads `1e6` in objects as a number, as JSON and YAML 1.2 do; YAML 1.1 requires `1.0e+6`."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def load_config_file(context: typer.Context, path: Path | None) -> None:
    """Use the file's values for options that neither the command line nor the environment sets. Raises LoadError."""
    if path is None or context.resilient_parsing:
        return
    parameters = {name: found for found in context.command.params if (name := found.name) and name != "config"}
    values: dict[str, str | list[str]] = {}
    for line, key, node in _entries(path):
        where, name = f"{path}, line {line}", key.replace("-", "_")
        parameter: Any = parameters.get(name)
        option = OPTIONS.get(name)
        if parameter is None or (option is not None and option.scope == "variable"):
            known = [known.replace("_", "-") for known in parameters]
            ours = moved_option_hint(context, name, in_file=True) or foreign_option_hint(
                context, f"--{key.replace('_', '-')}"
            )
            meant = did_you_mean(key[:64], known) if ours is None else f": {ours}"
            raise LoadError(f"{where}: {key[:64]!r} is not an option of {context.command_path}{meant}")
        if name in values:
            raise LoadError(f"{where}: {key} is set twice")
        value = _to_argument(where, key, node, repeatable=bool(getattr(parameter, "multiple", False)))
        if value is not None:
            try:
                parameter.process_value(context, value)
                if option is not None:
                    option.read(value)
            except _BadParameter as error:
                raise LoadError(f"{where}: {key}: {error.message}") from None
            except OptionError as error:
                raise LoadError(f"{where}: {key} {error.problem}") from None
            values[name] = value
    context.default_map = {**(context.default_map or {}), **values}


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Line, key and YAML node of each entry. Nodes are not converted, so that `off` and `1e3` remain as written."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LoadError(f"--config {path} is larger than {MAX_BYTES} bytes")
        root = yaml.compose(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read --config {path}: {reason_of(error)}") from None
    except yaml.YAMLError as error:
        raise LoadError(f"{_location(path, error)}: this is not valid YAML ({_reason(error)})") from None
    except RecursionError:
        raise LoadError(f"--config {path} is nested too deeply") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise LoadError(f"--config {path} must contain options as NAME: VALUE")
    for key, node in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise LoadError(f"{path}, line {line}: the name of an option must be a word")
        yield line, key.value, node


def _to_argument(where: str, key: str, node: Any, repeatable: bool) -> str | list[str] | None:
    """A value as the command line has it; None if the file leaves it empty."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in _EMPTY:
            return None
        return [node.value] if repeatable else str(node.value)
    if not repeatable and isinstance(node, yaml.MappingNode):
        return _json(where, node)
    if not repeatable:
        raise LoadError(f"{where}: {key} takes one value, not a list")
    if isinstance(node, yaml.MappingNode):  # of an option that is written NAME=VALUE
        return [f"{name.value}={_text(where, value)}" for name, value in node.value]
    return [_text(where, value) for value in node.value]


def _text(where: str, node: Any) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else _json(where, node)


def _json(where: str, node: Any) -> str:
    loader = _Loader("")
    try:
        return json.dumps(loader.construct_document(node))
    except (yaml.YAMLError, TypeError, ValueError, RecursionError) as error:
        raise LoadError(f"{where}: this cannot be written as JSON ({_reason(error)})") from None
    finally:
        loader.dispose()


def _location(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return str(path) if mark is None else f"{path}, line {mark.line + 1}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error)
