"""`windlass rope sweep`: options in, one of two calls out. Imports neither torch nor matplotlib until it needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.engine.api.config import parse_cache_dtype
from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.parsing import parse_json
from windlass.server.options.spelling import ModelArgument, option, read_dtype, read_memory
from windlass.server.startup.choice import choose_model


def sweep(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The report, one HTML file.")],
    model: ModelArgument = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text the model was not trained on, or a directory of *.txt. Several: give it again. With --tasks: what "
            "the documents are cut from. Default there: generated prose.",
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        option(
            "--tasks",
            metavar="NAMES",
            help="Ask for what stands far back instead of reading perplexity: passkey, needle, recall, multihop, key-tokens, "
            "with commas between, or all.",
        ),
    ] = None,
    lengths: Annotated[
        list[str] | None,
        option(
            "--lengths",
            metavar="NUMBERS",
            help="With --tasks: tokens of the documents, such as 4096,8192. Default: the trained length and twice that.",
        ),
    ] = None,
    documents: Annotated[
        int | None, typer.Option("--documents", help="With --tasks: documents of each length. Default: 4.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --tasks: what the documents are drawn from. Default: 1.")
    ] = None,
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="With --tasks and --keep: read nothing, and report on the documents that an interrupted run has whole.",
        ),
    ] = False,
    max_len: Annotated[
        int | None, typer.Option("--max-len", help="Longest context measured, in tokens. Default: 4096.")
    ] = None,
    target_len: Annotated[
        int | None, typer.Option("--target-len", help="Length to recommend a scaling for. Default: --max-len.")
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option("--windows", min=1, help="Stretches of --max-len tokens read, spread over each text. Default: 8."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=0,
            help="Positions per window at which dynamic is recomputed for the exact length. Default: 16.",
        ),
    ] = None,
    trained_len: Annotated[
        int | None,
        typer.Option("--trained-len", min=2, help="Where config.json gives a longer length than was trained on."),
    ] = None,
    scaling: Annotated[
        list[str] | None,
        option(
            "--scaling",
            metavar="JSON",
            help="Read under this scaling, and no scaling, alone. Several: give it again. Default: a choice of "
            "linear, ntk, dynamic, yarn and the model's own.",
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
    kv_cache_memory: Annotated[
        str | None,
        option(
            "--kv-cache-memory",
            metavar="SIZE",
            help="With --tasks: memory for cached keys and values, 4GiB. More lets more scalings run side by side.",
        ),
    ] = None,
    attention_window: Annotated[
        int | None,
        option(
            "--attention-window",
            help="Also read where each token sees the last so many only, unscaled.",
        ),
    ] = None,
    attention_sinks: Annotated[
        int | None,
        option(
            "--attention-sinks",
            help="With --attention-window: leading tokens that are seen besides. Default: 4.",
        ),
    ] = None,
) -> None:
    """Perplexity by position under every scaling, or answers about what stands far back, as a report with a recommendation."""
    from windlass.server.cli.rope.pictures import require_matplotlib

    require_matplotlib()
    if policy and not scaling:
        raise LoadError("--policy says how a --scaling is read: give --scaling too, or leave --policy out")
    reading = {"--max-len": max_len, "--target-len": target_len, "--windows": windows, "--samples": samples}
    asking = {
        "--report-only": report_only or None,
        "--lengths": lengths,
        "--documents": documents,
        "--seed": seed,
        "--kv-cache-memory": kv_cache_memory,
    }
    if tasks:
        _refuse(reading, "reads perplexity and says nothing to --tasks, which take --lengths and --documents")
    else:
        _refuse(asking, "is for --tasks: name some, such as --tasks all, or leave it out")
        if not text:
            raise LoadError("--text is missing: give a text to read, or --tasks, which make their own")
    if attention_sinks is not None and attention_window is None:
        raise LoadError("--attention-sinks are seen beside an --attention-window: give one too, or leave them out")
    seen = _given(attention_window=attention_window, attention_sinks=attention_sinks)
    shared: dict[str, Any] = {
        **seen,
        "texts": tuple(text or ()),
        "trained_len": trained_len,
        "scalings": tuple(_parse_object(one) for one in scaling or ()),
        "policies": tuple(_parse_policy(one) for one in policy or ()),
        "cut": cut,
        "device": device,
        "dtype": dtype,
        "kv_cache_dtype": read_dtype("--kv-cache-dtype", kv_cache_dtype, parse_cache_dtype),
        "keep": keep,
        "html": out,
        "json": as_json,
        "png": png,
        "markdown": markdown,
    }
    if tasks:
        from windlass.server.cli.rope.tasks.run import TaskOptions, parse_lengths, parse_tasks, run_tasks

        names, numbers = parse_tasks(tasks), parse_lengths(lengths) if lengths else ()
        memory = None if kv_cache_memory is None else read_memory("--kv-cache-memory", kv_cache_memory)
        given = _given(documents=documents, seed=seed, kv_cache_memory=memory, report_only=report_only)
        name, path = choose_model(model)
        run_tasks(TaskOptions(model=path, model_name=model or name, tasks=names, lengths=numbers, **given, **shared))
        return
    from windlass.server.cli.rope.sweep import SweepOptions, run_sweep

    given = _given(max_len=max_len, target_len=target_len, windows=windows, samples=samples)
    name, path = choose_model(model)
    run_sweep(SweepOptions(model=path, model_name=model or name, **given, **shared))


def _given(**values: object) -> dict[str, Any]:
    """Those that were given; the others have their defaults elsewhere."""
    return {name: value for name, value in values.items() if value is not None}


def _refuse(given: dict[str, Any], reason: str) -> None:
    for name, value in given.items():
        if value is not None:
            raise LoadError(f"{name} {reason}")


def _parse_object(text: str) -> dict[str, Any]:
    value = parse_json(text)
    if not isinstance(value, dict):
        raise LoadError('--scaling must be an object: write it like \'{"rope_type": "yarn", "factor": 4}\'')
    RopeScaling.from_dict(value, param="--scaling")
    return value


def _parse_policy(text: str) -> RopeUpdate:
    for known in ROPE_UPDATES:
        if text == known:
            return known
    raise LoadError(f"--policy {text!r} is none of {', '.join(ROPE_UPDATES)}")
