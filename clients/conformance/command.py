"""`windlass rope conform`: options in, the checks run, the report out. Knows no check by name."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Annotated

import typer

from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.outputs import check_outputs


def conform(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option("--model", help="Its name there. Default: the first listed.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="WINDLASS_API_KEY", show_envvar=False, help="The server's key.")
    ] = None,
    trained_len: Annotated[
        int | None,
        typer.Option(
            "--trained-len", min=64, help="Positions the model was trained on. Default: what /v1/models tells."
        ),
    ] = None,
    max_len: Annotated[
        int | None, typer.Option("--max-len", min=128, help="Longest context. Default: what /v1/models tells.")
    ] = None,
    far_len: Annotated[
        int, typer.Option("--far-len", min=256, help="Tokens of the texts with which the precision of angles is asked.")
    ] = 100_000,
    tolerance: Annotated[float, typer.Option("--tolerance", min=0, help="Nats that count as rounding.")] = 0.05,
    timeout: Annotated[float, typer.Option("--timeout", min=1, help="Seconds for one request.")] = 300,
    time_limit: Annotated[
        float, typer.Option("--time-limit", min=1, help="Seconds for all; what is not asked by then is told.")
    ] = 1800,
    seed: Annotated[
        int | None,
        typer.Option("--seed", help="Of the texts. Default: another for each run, so that none is kept yet."),
    ] = None,
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", metavar="FILE", help="Also write Markdown.")] = None,
) -> None:
    """Check a server's rotary positions from outside. Exit status 0: all shown holds, 1: something differs, 2: error."""
    from windlass.clients.conformance.answers import CheckUnavailableError
    from windlass.clients.conformance.asking import ConformanceClient
    from windlass.clients.conformance.checks import CHECKS
    from windlass.clients.conformance.report import exit_status, to_json, to_lines, to_markdown
    from windlass.clients.conformance.suite import ConformanceSuite

    check_outputs({"--json": as_json, "--markdown": markdown})
    chosen = secrets.randbits(32) if seed is None else seed
    asker = ConformanceClient(url, model, api_key, timeout, time_limit=time_limit)
    try:
        trained = trained_len or asker.trained()
        suite = ConformanceSuite(asker, trained, max_len or asker.context(), tolerance, chosen, far_len)
        results = suite.run(CHECKS, lambda name: typer.echo(f"asking: {name}", err=True))
    except CheckUnavailableError as error:
        raise CommandError(f"{url} cannot be checked: {error}") from None
    finally:
        asker.close()
    for line in to_lines(results):
        typer.echo(line)
    if as_json is not None:
        _write_file(as_json, json.dumps(to_json(url, asker.model, results, chosen), indent=1) + "\n")
    if markdown is not None:
        _write_file(markdown, to_markdown(url, asker.model, results))
    if suite.lost is not None:
        raise CommandError(suite.lost)
    raise typer.Exit(exit_status(results))


def _write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from error
