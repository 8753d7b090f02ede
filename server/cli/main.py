"""The `windlass` command: parses options and calls the commands. User errors are one line, with exit code 2."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer_injector import Depends, InjectingTyper

from windlass._version import __version__
from windlass.clients.loadtest.commands import add_commands
from windlass.clients.terminal import option, print_status, run_app, version_option
from windlass.engine.errors import EngineError
from windlass.engine.process_setup import gc_paused_imports
from windlass.server.cli.parameters import (
    AsJson,
    BriefHelp,
    Config,
    Connections,
    Engine,
    GenerateOptions,
    LogLevel,
    ModelArgument,
    ModelOption,
    Replicas,
    Sampling,
    Server,
    ServerKey,
    help_all_option,
    variable_option,
)
from windlass.server.cli.ray_commands import app as ray
from windlass.server.cli.rope import app as rope
from windlass.server.config.migration_hints import check_variables, foreign_option_hint, misspelled_variables
from windlass.server.config.option import MEMORY, read_value
from windlass.server.config.option_names import to_flat, with_option_names
from windlass.server.config.server_options import check_log_level

app = InjectingTyper(
    name="windlass",
    help="An inference server for language models with rotary attention.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench = InjectingTyper(help="Measure speed.", no_args_is_help=True)
add_commands(bench)
app.add_typer(bench, name="bench")
app.add_typer(rope, name="rope")
app.add_typer(ray, name="ray")


HelpAll = Annotated[bool, help_all_option()]


@app.callback()
def program(
    context: typer.Context, version: Annotated[bool, version_option(f"windlass {__version__}")] = False
) -> None:
    """Check the environment before any command runs."""
    if context.invoked_subcommand != "rope":  # its sweeps have an option that other commands lost
        check_variables(os.environ)
    for name, near in misspelled_variables(context.command, os.environ):
        print_status(f"warning: the environment variable {name} has no effect: did you mean {near}?")


@app.command(cls=BriefHelp)
def serve(
    engine: Engine,
    server: Server,
    connections: Connections,
    replicas: Replicas,
    model: ModelArgument = None,
    log_level: LogLevel = "info",
    config: Config = None,
    help_all: HelpAll = False,
) -> int:
    """Serve a model over an OpenAI-compatible HTTP API."""
    from windlass.server.startup.early_signals import exit_on_sigterm

    with exit_on_sigterm():
        with gc_paused_imports():
            from windlass.server.startup.launch import serve as launch
        return launch(model, engine, server, connections, log_level, replicas.replicas)


@app.command(cls=BriefHelp)
def generate(
    engine: Engine,
    sampling: Sampling,
    request: Annotated[GenerateOptions, Depends(GenerateOptions)],
    model: ModelOption = None,
    url: Annotated[
        str | None,
        variable_option(
            "--url",
            "URL of a running server to use instead of loading a model, such as http://127.0.0.1:8000. --model is then a "
            "model of that server, and of the engine's options only --rope-scaling (a scaling, a profile of that server, or "
            "auto) and --rope-update apply.",
        ),
    ] = None,
    api_key: ServerKey = None,
    log_level: LogLevel = "warning",
    help_all: HelpAll = False,
) -> None:
    """Continue one prompt on the terminal."""
    from windlass.server.cli.generate import check_request, generate_locally, generate_remote

    check_request(request)
    if request.prompt == "-":
        request.prompt = sys.stdin.read()
    if url is None:
        generate_locally(request, model, engine, sampling, check_log_level(log_level))
    else:
        generate_remote(request, model, engine, url, api_key)


@bench.command("engine", cls=BriefHelp)
def bench_engine(
    engine: Engine,
    model: ModelArgument = None,
    batch_size: Annotated[int, option("Requests at once.", min=1)] = 8,
    input_len: Annotated[
        int | None, option("Tokens per prompt. Default: 512, or what the context leaves.", min=1)
    ] = None,
    output_len: Annotated[int, option("Tokens per answer.", min=0)] = 32,
    as_json: AsJson = False,
    verbose: Annotated[bool, option("Print all measurements and settings.", "--verbose")] = False,
    help_all: HelpAll = False,
) -> None:
    """Run the engine alone, without HTTP, and report tokens per second."""
    from windlass.clients.terminal import LoadingDisplay
    from windlass.engine.host_resources import apply_thread_settings, processor_name
    from windlass.server.startup.display import count
    from windlass.server.startup.launch import check_model
    from windlass.server.startup.model_files import choose_model, with_draft_model

    engine.to_config(Path())  # report bad options before anything is downloaded
    name, path = choose_model(model)
    engine = with_draft_model(engine)
    check_model(engine, path)
    config = engine.to_config(path)
    apply_thread_settings(config.compute.cores)
    from windlass.engine.engine_benchmark import run_engine_benchmark

    display = LoadingDisplay()
    single = None  # decode speed of one stream
    try:
        result = run_engine_benchmark(
            config, batch_size=batch_size, input_len=input_len, output_len=output_len, progress=display
        )
        if batch_size > 1 and output_len > 1 and not as_json:
            alone = run_engine_benchmark(
                config, batch_size=1, input_len=input_len, output_len=output_len, progress=display
            )
            single = alone["decode_tokens_per_second"]
    finally:
        display.stop()
    result["settings"] |= {name: value for name, value in to_flat(config).items() if name not in result["settings"]}
    if as_json:
        print(json.dumps(result))
        return
    settings = result["settings"]
    parameters, device = settings.get("num_parameters"), settings.get("resolved_device")
    described = f"{name} ({count(parameters)} parameters)" if parameters else name
    stored = settings.get("resolved_quantization") or settings.get("resolved_dtype")
    print(f"{described}, {stored}, on {processor_name() if device in (None, 'cpu') else device}")
    speeds = [
        ("decode, 1 stream", single),
        (f"decode, {batch_size} {'stream' if batch_size == 1 else 'streams'}", result.get("decode_tokens_per_second")),
        (f"prompts of {settings['input_len']:,} tokens", result.get("prefill_tokens_per_second")),
    ]
    for label, speed in speeds:
        if speed is not None:
            print(f"  {label:24} {speed:>10,.1f} tokens/s")
    if not verbose:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("measure", "value")
    settings = result.pop("settings")
    for measure, value in (result | settings).items():
        table.add_row(measure.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


@app.command(cls=BriefHelp)
def chat(
    engine: Engine,
    sampling: Sampling,
    model: ModelArgument = None,
    system: Annotated[str | None, option("System message.")] = None,
    url: Annotated[
        str | None,
        variable_option(
            "--url",
            "URL of a running server to use instead of starting one, such as http://127.0.0.1:8000. MODEL is then a model "
            "of that server, and the engine's options do not apply.",
        ),
    ] = None,
    api_key: ServerKey = None,
    help_all: HelpAll = False,
) -> int:
    """Chat with a model on the terminal. /help lists commands."""
    from windlass.server.cli.chat import chat_locally, chat_remote

    if url is None:
        return chat_locally(model, engine, sampling, system)
    return chat_remote(url, api_key, model, system)


@app.command(cls=BriefHelp)
def replay(
    engine: Engine,
    sampling: Sampling,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file that `windlass serve --record` wrote.")],
    model: ModelArgument = None,
    url: Annotated[
        str | None,
        variable_option(
            "--url",
            "URL of a running server to use instead of starting one, such as http://127.0.0.1:8000. MODEL and the engine's "
            "options then do not apply.",
        ),
    ] = None,
    api_key: ServerKey = None,
    speed: Annotated[float, option("Speed factor; 2 repeats the workload in half the time.")] = 1.0,
    as_fast_as_possible: Annotated[
        bool, option("Send without waiting for the recorded times.", "--as-fast-as-possible")
    ] = False,
    concurrency: Annotated[int, option("Largest number of requests in flight.", min=1, max=65536)] = 256,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> int:
    """Repeat a recorded workload. With recorded text, answers are compared token by token; exit code 1 if one differs."""
    from windlass.server.cli.replay import read_pace, replay_locally, replay_remote

    pace = read_pace(speed, as_fast_as_possible, concurrency)
    if url is None:
        return replay_locally(file, model, engine, sampling, pace, as_json)
    return replay_remote(file, url, api_key, pace, as_json)


@app.command()
def top(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="A running server, with or without /v1.", envvar="WINDLASS_BASE_URL"),
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        variable_option("--api-key", "API key of the server; if its keys are named, an administrator's key."),
    ] = None,
    interval: Annotated[
        float, option("Time between two updates, in seconds.", metavar="SECONDS", min=0.1, max=3600)
    ] = 2.0,
    once: Annotated[bool, option("Show one interval as plain text, then exit.", "--once")] = False,
    as_json: Annotated[bool, option("Write one JSON object for each interval, and nothing else.", "--json")] = False,
) -> int:
    """Watch a running server: tokens, requests, cache, latencies, rotary scalings. Press q or ctrl-C to exit."""
    from windlass.server.cli.top import watch

    return watch(url, api_key, interval, once=once, as_json=as_json)


@app.command("size", cls=BriefHelp)
def size_command(
    engine: Engine,
    replicas: Replicas,
    model: ModelArgument = None,
    free: Annotated[
        str | None, option("Available memory, such as 16GiB. Default: the memory that is free now.", metavar="SIZE")
    ] = None,
    as_json: AsJson = False,
    help_all: HelpAll = False,
) -> None:
    """Show the memory that a model needs: weights, cache per token, and how many tokens and streams fit.

    Loads no weights. Of a hub model that is not on this machine only config.json is downloaded; a known name or a GGUF file is
    downloaded completely.
    """
    from windlass.server.cli.size import print_size

    print_size(model, engine, replicas.replicas, None if free is None else read_value("--free", MEMORY, free), as_json)


@app.command()
def pull(name: Annotated[str, typer.Argument(metavar="NAME", help="A name that `windlass models` lists.")]) -> None:
    """Download a model with a short name, so that starts need no network."""
    from windlass.server.cli.models import pull_named

    pull_named(name)


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the models with a short name, and those on this machine."""
    from windlass.server.cli.models import list_models

    list_models(as_json)


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit code; errors are one line on standard error."""
    return run_app(
        app,
        "windlass",
        arguments,
        errors=(EngineError,),
        translate=with_option_names,
        find_replacement=foreign_option_hint,
    )


def main() -> None:
    """Run the command of the process's arguments, then exit."""
    sys.exit(run())


if __name__ == "__main__":
    main()
