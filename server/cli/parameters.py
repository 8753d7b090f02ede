"""Parameters of commands: options as typer parameters, the configuration file, a YAML file of options, and help pages."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml  # type: ignore[import-untyped]  # its stubs are a separate package
from typer.core import TyperCommand
from typer_injector import Depends

from windlass.clients.terminal import option
from windlass.engine.errors import LoadError, did_you_mean, reason_of
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import foreign_option_hint, moved_option_hint
from windlass.server.config.option import SWITCH, Option, OptionError, options_of
from windlass.server.config.server_options import (
    LOG_LEVEL,
    OPTIONS,
    ClusterOptions,
    ConnectionOptions,
    ReplicaOptions,
    SamplingOptions,
    ServerOptions,
)

if TYPE_CHECKING:
    from windlass.clients import APIError

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


def variable_option(flag: str, help: str, *, panel: str | None = None, metavar: str | None = None) -> Any:
    """A typer option that also reads the environment variable of its name."""
    variable = "WINDLASS_" + flag.removeprefix("--").replace("-", "_").upper()
    return typer.Option(flag, help=help, envvar=variable, rich_help_panel=panel, metavar=metavar)


def dependency(options: type[Any]) -> Depends:
    """A class of options as a dependency of a command, which then has a parameter for each option."""

    def make(**values: Any) -> Any:
        return options(**values)

    make.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=_annotation(each)
            )
            for each in options_of(options).values()
        ]
    )
    return Depends(make)


def _annotation(option: Option) -> Any:
    is_switch = option.kind is SWITCH
    parameter = typer.Option(
        f"{option.flag}/--no-{option.key}" if is_switch else option.flag,
        help=option.help,
        envvar=option.variable,
        rich_help_panel=option.panel,
        metavar=None if is_switch else option.kind.metavar,
        hidden=option.scope != "flag",
    )
    return Annotated[option.kind.parameter if option.default is not None else option.kind.parameter | None, parameter]


Engine = Annotated[EngineOptions, dependency(EngineOptions)]
Sampling = Annotated[SamplingOptions, dependency(SamplingOptions)]
Server = Annotated[ServerOptions, dependency(ServerOptions)]
Connections = Annotated[ConnectionOptions, dependency(ConnectionOptions)]
Replicas = Annotated[ReplicaOptions, dependency(ReplicaOptions)]
Cluster = Annotated[ClusterOptions, dependency(ClusterOptions)]

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="A name that `windlass models` lists, a model directory, a GGUF file, or a hub id such as Qwen/Qwen3-0.6B. "
        "Default: qwen2.5-coder-1.5b, or a smaller one where that does not fit.",
        envvar="WINDLASS_MODEL",
        show_default=False,
    ),
]

ModelOption = Annotated[
    str | None,
    variable_option(
        "--model",
        help="A known name, a directory, a GGUF file or a hub id. Default: qwen2.5-coder-1.5b, or a smaller model.",
    ),
]

LogLevel = _annotation(LOG_LEVEL)


def config_option() -> Any:
    """The option --config; eager, because the file provides defaults of the other options."""
    made = variable_option(
        "--config",
        metavar="FILE",
        help='A YAML file of options, such as "port: 8001"; the command line and the environment take precedence.',
    )
    made.is_eager, made.expose_value, made.callback = True, False, load_config_file
    return made


ServerKey = Annotated[str | None, variable_option("--api-key", help="API key of the server at --url.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")]
Config = Annotated[Path | None, config_option()]


@dataclass(slots=True, kw_only=True)
class GenerateOptions:
    """Options of `windlass generate`. temperature, top_p: None for those of the model or of the server."""

    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads standard input.")]
    max_tokens: Annotated[int, option("Longest continuation, in tokens.")] = 128
    temperature: Annotated[
        float | None, option("0: always the most likely token. Default: the model's own sampling.")
    ] = None
    top_p: Annotated[
        float | None,
        option("Sample from the most likely tokens with this total probability. Default: the model's own sampling."),
    ] = None
    seed: Annotated[int | None, option("Seed that makes sampling repeatable.")] = None
    stop: Annotated[list[str] | None, option("End before this text; repeatable.")] = None
    chat: Annotated[bool, option("The prompt is a message to a chat model.", "--chat")] = False
    stats: Annotated[bool, option("Print the speed on standard error.", "--stats")] = False


# Parameters of the short help page in addition to a command's own options.
COMMON_OPTIONS = tuple(name for name, option in OPTIONS.items() if option.main)

_HELP_ALL = "windlass.help_all"


class BriefHelp(TyperCommand):
    """A command with a short `--help`, and with configuration keys and expert variables as parameters without a flag."""

    def make_parser(self, ctx: Any) -> Any:
        """The parser of the command line, which knows no parameter without a flag."""
        params = self.params
        self.params = [each for each in params if not getattr(each, "hidden", False)]
        try:
            return super().make_parser(ctx)
        finally:
            self.params = params

    def format_help(self, ctx: Any, formatter: Any) -> None:
        without_flag = [each for each in self.params if getattr(each, "hidden", False)]
        rare, named, epilog = [], [], self.epilog
        if ctx.meta.get(_HELP_ALL):
            variables = ", ".join(str(each.envvar) for each in without_flag)
            self.epilog = (
                f"Environment variables without an option: {variables}. docs/reference/options.md describes them."
            )
        else:
            panels = [
                each for each in self.params if getattr(each, "rich_help_panel", None) and each not in without_flag
            ]
            rare = [each for each in panels if each.name not in COMMON_OPTIONS]
            named = [each for each in self.params if getattr(each, "show_envvar", False)]
            self.epilog = (
                f"--help-all shows {len(rare)} more, and the environment variable of each, such as WINDLASS_DTYPE."
            )
        try:
            for parameter in rare:
                parameter.hidden = True  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = False  # type: ignore[attr-defined]
            super().format_help(ctx, formatter)
        finally:
            self.epilog = epilog
            for parameter in rare:
                parameter.hidden = False  # type: ignore[attr-defined]
            for parameter in named:
                parameter.show_envvar = True  # type: ignore[attr-defined]


def help_all_option() -> Any:
    """The option --help-all of a `BriefHelp` command."""

    def show(ctx: typer.Context, asked: bool) -> None:
        if asked:
            ctx.meta[_HELP_ALL] = True
            print(ctx.get_help(), end="")
            raise typer.Exit

    return typer.Option(
        "--help-all", is_eager=True, callback=show, help="Show all options, with their environment variables, and exit."
    )


def with_key_hint(error: APIError) -> str:
    """The message of an error on one line, with the option to use if the key was refused."""
    hint = ": give one with --api-key" if error.status == 401 else ""
    return " ".join(error.message.split()) + hint
