"""The `windlass rope` commands: options in, one call out. Imports neither torch nor matplotlib until a command needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from typer_injector import InjectingTyper

from windlass.clients.conformance.command import conform
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.gallery.command import picture
from windlass.server.cli.rope.parsing import parse_json
from windlass.server.cli.rope.sweep_command import sweep
from windlass.server.options.spelling import ModelOption
from windlass.server.startup.choice import choose_model

app = InjectingTyper(help="Show what a rotary scaling does to a model.", no_args_is_help=True)
app.command("conform")(conform)
app.command("sweep")(sweep)
app.command("picture")(picture)


@app.command("inspect")
def inspect(
    scaling: Annotated[
        str, typer.Argument(metavar="JSON", help='Such as \'{"rope_type": "yarn", "factor": 4}\', or null.')
    ],
    model: ModelOption = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", help="Tokens of the request, for kinds that depend on it. Default: the trained length."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Draw the wavelengths.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")] = False,
) -> None:
    """Frequencies, wavelengths and factors of a scaling on a model, beside the model's own. Loads no weights."""
    from windlass.server.cli.rope.inspection import inspect_scaling

    if png is not None:
        from windlass.clients.terminal.outputs import check_outputs
        from windlass.server.cli.rope.pictures import require_matplotlib

        require_matplotlib()
        check_outputs({"--png": png})
    wanted = _parse_scaling(scaling)  # what is at fault there is told before anything is looked up or downloaded
    name, path = choose_model(model)
    result = inspect_scaling(path, wanted, length, model or name)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        from windlass.server.cli.rope.inspection import print_tables

        print_tables(result)
    if png is not None:
        from windlass.server.cli.rope.pictures import draw_inspection, save_png

        save_png(draw_inspection(result), png)


def _parse_scaling(text: str) -> RopeScaling | None:
    value = parse_json(text)
    return None if value is None else RopeScaling.from_dict(value)
