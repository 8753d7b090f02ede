"""The `windlass rope` commands: options in, one call out. Imports neither torch nor matplotlib until a command needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.clients.conformance.command import conform
from windlass.engine.api.config import parse_cache_dtype
from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.options.spelling import ModelArgument, option, read_dtype
from windlass.server.startup.hub import resolve_model

app = typer.Typer(help="Show what a rotary scaling does to a model.", no_args_is_help=True)
app.command("conform")(conform)


@app.command("inspect")
def inspect(
    scaling: Annotated[
        str, typer.Argument(metavar="JSON", help='Such as \'{"rope_type": "yarn", "factor": 4}\', or null.')
    ],
    model: Annotated[str | None, option("--model", help="Directory or hub id. Default: the bundled model.")] = None,
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
    result = inspect_scaling(resolve_model(model), _parse(scaling), length)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        from windlass.server.cli.rope.inspection import print_tables

        print_tables(result)
    if png is not None:
        from windlass.server.cli.rope.pictures import draw_inspection, save

        save(draw_inspection(result), png)


@app.command("sweep")
def sweep(
    text: Annotated[
        list[Path],
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text the model was not trained on, or a directory of *.txt. Several: give it again.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The report, one HTML file.")],
    model: ModelArgument = None,
    max_len: Annotated[int, typer.Option("--max-len", help="Longest context measured, in tokens.")] = 4096,
    target_len: Annotated[
        int | None, typer.Option("--target-len", help="Length to recommend a scaling for. Default: --max-len.")
    ] = None,
    windows: Annotated[
        int, typer.Option("--windows", min=1, help="Stretches of --max-len tokens read, spread over each text.")
    ] = 8,
    samples: Annotated[
        int,
        typer.Option(
            "--samples", min=0, help="Positions per window at which dynamic is recomputed for the exact length."
        ),
    ] = 16,
    trained_len: Annotated[
        int | None,
        typer.Option("--trained-len", min=2, help="Where config.json gives a longer length than was trained on."),
    ] = None,
    scaling: Annotated[
        list[str] | None,
        option(
            "--scaling",
            metavar="JSON",
            help="Read under this scaling, and no scaling, alone. Several: give it again. Default: a choice of all kinds.",
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        option(
            "--policy",
            help="With --scaling: the rope_update of those that follow the length, frozen, recompute or rotate. Several: give "
            "it again. Default: all three.",
        ),
    ] = None,
    cut: Annotated[
        bool,
        typer.Option("--cut/--no-cut", help="Also read the text cut to the trained length, for how far each holds."),
    ] = True,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Append the losses of each pass to this file when it is done, and do not repeat those it has: an "
            "interrupted sweep goes on.",
        ),
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write every number as JSON.")
    ] = None,
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Also draw the plot as a picture.")] = None,
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the report as Markdown.")
    ] = None,
    device: Annotated[str, option("--device", help="cpu, cuda, cuda:1 or auto.")] = "auto",
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    kv_cache_dtype: Annotated[
        str, option("--kv-cache-dtype", help="The same for cached keys and values, or int8.")
    ] = "auto",
) -> None:
    """Perplexity by position under every scaling, as a report with a recommendation."""
    from windlass.server.cli.rope.pictures import require_matplotlib

    require_matplotlib()
    if policy and not scaling:
        raise LoadError("--policy says how a --scaling is read: give --scaling too, or leave --policy out")
    from windlass.server.cli.rope.sweep import SweepOptions, run_sweep

    run_sweep(
        SweepOptions(
            model=resolve_model(model),
            model_name=model,
            texts=tuple(text),
            max_len=max_len,
            target_len=target_len,
            windows=windows,
            samples=samples,
            trained_len=trained_len,
            scalings=tuple(_parse_object(one) for one in scaling or ()),
            policies=tuple(_parse_policy(one) for one in policy or ()),
            cut=cut,
            device=device,
            dtype=dtype,
            kv_cache_dtype=read_dtype("--kv-cache-dtype", kv_cache_dtype, parse_cache_dtype),
            keep=keep,
            html=out,
            json=as_json,
            png=png,
            markdown=markdown,
        )
    )


def _parse_object(text: str) -> dict[str, Any]:
    value = _parse_json(text)
    if not isinstance(value, dict):
        raise LoadError('--scaling must be an object: write it like \'{"rope_type": "yarn", "factor": 4}\'')
    RopeScaling.from_dict(value, param="--scaling")
    return value


def _parse_policy(text: str) -> RopeUpdate:
    for known in ROPE_UPDATES:
        if text == known:
            return known
    raise LoadError(f"--policy {text!r} is none of {', '.join(ROPE_UPDATES)}")


def _parse(text: str) -> RopeScaling | None:
    value = _parse_json(text)
    return None if value is None else RopeScaling.from_dict(value)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f'the scaling is not valid JSON ({error}): write it like \'{{"rope_type": "yarn", "factor": 4}}\''
        ) from None
