"""Options as dataclasses, written once and taken by every command that names them; and --version. Knows no other option."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints

import typer


def version_option(line: str) -> Any:
    """The option --version, short -V: prints the line and ends the program."""

    def tell(asked: bool) -> None:
        if asked:
            print(line)
            raise typer.Exit

    return typer.Option("--version", "-V", is_eager=True, callback=tell, help="Print the version.")


def expands_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command so that each parameter annotated with an options dataclass becomes that dataclass's options."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group = groups[parameter.name]
        group_hints = get_type_hints(group, include_extras=True)
        for item in fields(group):
            default = item.default_factory() if callable(item.default_factory) else item.default
            if default is MISSING:
                default = inspect.Parameter.empty
            parameters.append(
                inspect.Parameter(
                    item.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=group_hints[item.name]
                )
            )

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        return function(**values)

    # typer reads the signature, and the annotations of what it believes to be the function.
    del command.__wrapped__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
