"""`--config FILE`: options of a command from a YAML file whose keys are their names. Knows typer; no option by its name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
import yaml  # type: ignore[import-untyped]  # stubs are a package of their own

from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.options.elsewhere import hint
from windlass.server.options.spelling import option

MAX_BYTES = 1024 * 1024

_Value = str | list[str]
_EMPTY = ("", "~", "null", "Null", "NULL")
# Older typers use click's exceptions, newer ones their own copy of them.
_BadParameter: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """In objects `1e6` is a number, as in JSON and YAML 1.2: to YAML 1.1 it is a word unless it is spelt `1.0e+6`."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"), list("-+.0123456789")
)


def use_config_file(context: typer.Context, path: Path | None) -> None:
    """Let the file stand for what neither the command line nor the environment says; raises LoadError, one line."""
    if path is None or context.resilient_parsing:
        return
    parameters = {name: found for found in context.command.params if (name := found.name) and name != "config"}
    values: dict[str, _Value] = {}
    for line, key, node in _entries(path):
        where = f"{path}, line {line}"
        parameter: Any = parameters.get(key.replace("-", "_"))
        if parameter is None:
            known = [name.replace("_", "-") for name in parameters]
            ours = hint(context, "--" + key.replace("_", "-"))
            meant = did_you_mean(key[:64], known) if ours is None else f": {ours}"
            raise LoadError(f"{where}: {key[:64]!r} is no option of {context.command_path}{meant}")
        if parameter.name in values:
            raise LoadError(f"{where}: {key} is there twice")
        value = _spelt(where, key, node, repeatable=bool(getattr(parameter, "multiple", False)))
        if value is not None:
            try:
                parameter.process_value(context, value)
            except _BadParameter as error:
                raise LoadError(f"{where}: {key}: {error.message}") from None
            values[parameter.name] = value
    context.default_map = {**(context.default_map or {}), **values}


def config_option() -> Any:
    """The option; eager, since defaults are looked up as the others are read."""
    made = option(
        "--config",
        metavar="FILE",
        help='A YAML file of options, such as "port: 8001"; the command line and the environment win over it.',
    )
    made.is_eager, made.expose_value, made.callback = True, False, use_config_file
    return made


def _entries(path: Path) -> Iterator[tuple[int, str, Any]]:
    """Line, key and node of each entry. Nodes are not yet values: `off` and `1e3` are kept as they are written."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise LoadError(f"--config {path} is larger than {MAX_BYTES} bytes")
        root = yaml.compose(path.read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        raise LoadError(f"cannot read --config {path}: {error}") from None
    except yaml.YAMLError as error:
        raise LoadError(f"{_place(path, error)}: this is no YAML ({_reason(error)})") from None
    except RecursionError:
        raise LoadError(f"--config {path} is nested too deeply") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise LoadError(f"--config {path} must hold options as NAME: VALUE")
    for key, node in root.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise LoadError(f"{path}, line {line}: the name of an option must be a word")
        yield line, key.value, node


def _spelt(where: str, key: str, node: Any, repeatable: bool) -> _Value | None:
    """A value as the command line would have it; None where the file leaves it empty."""
    if isinstance(node, yaml.ScalarNode):
        if node.style is None and node.value in _EMPTY:
            return None
        return [node.value] if repeatable else str(node.value)
    if not repeatable and isinstance(node, yaml.MappingNode):
        return _json(where, node)
    if not repeatable:
        raise LoadError(f"{where}: {key} takes one value, not a list")
    if isinstance(node, yaml.MappingNode):  # of an option that is spelt NAME=VALUE
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


def _place(path: Path, error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    return str(path) if mark is None else f"{path}, line {mark.line + 1}"


def _reason(error: Exception) -> str:
    return str(getattr(error, "problem", None) or error)
