"""Parameters of commands: options as typer parameters, the model, the log level, and the configuration file."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from typer_injector import Depends

from windlass.server.config.config_file import load_config_file
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option import SWITCH, Option, options_of
from windlass.server.config.server_options import (
    LOG_LEVEL,
    ClusterOptions,
    ConnectionOptions,
    ReplicaOptions,
    SamplingOptions,
    ServerOptions,
)


def variable_option(flag: str, *, help: str, panel: str | None = None, metavar: str | None = None) -> Any:
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
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Longest continuation, in tokens.")] = 128
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", help="0: always the most likely token. Default: the model's own sampling."),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            "--top-p",
            help="Sample from the most likely tokens with this total probability. Default: the model's own sampling.",
        ),
    ] = None
    seed: Annotated[int | None, typer.Option("--seed", help="Seed that makes sampling repeatable.")] = None
    stop: Annotated[list[str] | None, typer.Option("--stop", help="End before this text; repeatable.")] = None
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message to a chat model.")] = False
    stats: Annotated[bool, typer.Option("--stats", help="Print the speed on standard error.")] = False
