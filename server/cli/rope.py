"""`windlass rope`: inspect a rotary scaling, sweep scalings, draw pictures, check another server's positions.

Options only; the work is done in windlass.lab, which is imported inside the functions, so that a serving process never loads it.
Imports neither torch, numpy nor matplotlib at module level.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer_injector import Depends, InjectingTyper

from windlass.clients.terminal.errors import CommandError
from windlass.clients.terminal.outputs import check_outputs
from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.interface.config import parse_cache_dtype
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate
from windlass.server.options.spelling import ModelArgument, ModelOption, option, read_dtype, read_memory
from windlass.server.startup.choice import choose_model


def parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(
            f'the scaling is not valid JSON ({error}): write it like \'{{"rope_type": "yarn", "factor": 4}}\''
        ) from None


@dataclass(slots=True, kw_only=True)
class SharedSweepOptions:
    """What every sweep takes: what is read, under which scalings, where it is computed and what is written."""

    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The report, one HTML file.")]
    text: Annotated[
        list[Path] | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text the model was not trained on, or a directory of *.txt. Several: give it again. With --tasks: what "
            "the documents are cut from. Default there: generated prose.",
        ),
    ] = None
    trained_len: Annotated[
        int | None,
        typer.Option("--trained-len", min=2, help="Where config.json gives a longer length than was trained on."),
    ] = None
    scaling: Annotated[
        list[str] | None,
        option(
            "--scaling",
            metavar="JSON",
            help="Read under this scaling, and no scaling, alone. Several: give it again. Default: a choice of "
            "linear, ntk, dynamic, yarn and the model's own.",
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        option(
            "--policy",
            help="With --scaling: the rope_update of those that follow the length, frozen, recompute or rotate. Several: give "
            "it again. Default: all three.",
        ),
    ] = None
    cut: Annotated[
        bool,
        typer.Option("--cut/--no-cut", help="Also read the text cut to the trained length, for how far each holds."),
    ] = True
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="FILE",
            help="Append the losses of each pass to this file when it is done, and do not repeat those it has: an "
            "interrupted sweep goes on.",
        ),
    ] = None
    as_json: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write every number as JSON.")] = (
        None
    )
    png: Annotated[Path | None, typer.Option("--png", metavar="FILE", help="Also draw the plot as a picture.")] = None
    markdown: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Also write the report as Markdown.")
    ] = None
    device: Annotated[str, option("--device", help="cpu, cuda, cuda:1 or auto.")] = "auto"
    dtype: Annotated[str, option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[str, option("--kv-cache-dtype", help="The same for cached keys and values, or int8.")] = (
        "auto"
    )
    attention_window: Annotated[
        int | None,
        option(
            "--attention-window",
            help="Also read where each token sees the last so many only, unscaled.",
        ),
    ] = None
    attention_sinks: Annotated[
        int | None,
        option(
            "--attention-sinks",
            help="With --attention-window: leading tokens that are seen besides. Default: 4.",
        ),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `SweepOptions` and `TaskOptions`; raises LoadError, one line."""
        if self.policy and not self.scaling:
            raise LoadError("--policy says how a --scaling is read: give --scaling too, or leave --policy out")
        if self.attention_sinks is not None and self.attention_window is None:
            raise LoadError("--attention-sinks are seen beside an --attention-window: give one too, or leave them out")
        given = {"attention_window": self.attention_window, "attention_sinks": self.attention_sinks}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "texts": tuple(self.text or ()),
            "trained_len": self.trained_len,
            "scalings": tuple(_parse_object(one) for one in self.scaling or ()),
            "policies": tuple(_parse_policy(one) for one in self.policy or ()),
            "cut": self.cut,
            "device": self.device,
            "dtype": self.dtype,
            "kv_cache_dtype": read_dtype("--kv-cache-dtype", self.kv_cache_dtype, parse_cache_dtype),
            "keep": self.keep,
            "html": self.out,
            "json": self.as_json,
            "png": self.png,
            "markdown": self.markdown,
        }


@dataclass(slots=True, kw_only=True)
class PerplexityOptions:
    """What a sweep takes that reads perplexity. What is left out has its default in `SweepOptions`."""

    max_len: Annotated[
        int | None, typer.Option("--max-len", help="Longest context measured, in tokens. Default: 4096.")
    ] = None
    target_len: Annotated[
        int | None, typer.Option("--target-len", help="Length to recommend a scaling for. Default: --max-len.")
    ] = None
    windows: Annotated[
        int | None,
        typer.Option("--windows", min=1, help="Stretches of --max-len tokens read, spread over each text. Default: 8."),
    ] = None
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples",
            min=0,
            help="Positions per window at which dynamic is recomputed for the exact length. Default: 16.",
        ),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `SweepOptions`."""
        return _given(self)

    def reject_if_given(self) -> None:
        """Raise LoadError where any is given."""
        for name in _given(self):
            raise LoadError(
                f"{_option_name(name)} reads perplexity and says nothing to --tasks, which take --lengths and --documents"
            )


@dataclass(slots=True, kw_only=True)
class RetrievalOptions:
    """What a sweep takes that asks for what stands far back. What is left out has its default in `TaskOptions`."""

    tasks: Annotated[
        list[str] | None,
        option(
            "--tasks",
            metavar="NAMES",
            help="Ask for what stands far back instead of reading perplexity: passkey, needle, recall, multihop, key-tokens, "
            "with commas between, or all.",
        ),
    ] = None
    lengths: Annotated[
        list[str] | None,
        option(
            "--lengths",
            metavar="NUMBERS",
            help="With --tasks: tokens of the documents, such as 4096,8192. Default: the trained length and twice that.",
        ),
    ] = None
    documents: Annotated[
        int | None, typer.Option("--documents", help="With --tasks: documents of each length. Default: 4.")
    ] = None
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --tasks: what the documents are drawn from. Default: 1.")
    ] = None
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            help="With --tasks and --keep: read nothing, and report on the documents that an interrupted run has whole.",
        ),
    ] = False
    kv_cache_memory: Annotated[
        str | None,
        option(
            "--kv-cache-memory",
            metavar="SIZE",
            help="With --tasks: memory for cached keys and values, 4GiB. More lets more scalings run side by side.",
        ),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `TaskOptions`; raises LoadError, one line."""
        from windlass.lab.retrieval_sweep import parse_lengths, parse_tasks

        given = _given(self)
        given["tasks"] = parse_tasks(self.tasks or ())
        if self.lengths:
            given["lengths"] = parse_lengths(self.lengths)
        if self.kv_cache_memory is not None:
            given["kv_cache_memory"] = read_memory("--kv-cache-memory", self.kv_cache_memory)
        return given

    def reject_if_given(self) -> None:
        """Raise LoadError where any is given."""
        for name in _given(self):
            raise LoadError(f"{_option_name(name)} is for --tasks: name some, such as --tasks all, or leave it out")


def _given(options: PerplexityOptions | RetrievalOptions) -> dict[str, Any]:
    """The fields that were given."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


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


def sweep(
    shared: Annotated[SharedSweepOptions, Depends(SharedSweepOptions)],
    perplexity: Annotated[PerplexityOptions, Depends(PerplexityOptions)],
    retrieval: Annotated[RetrievalOptions, Depends(RetrievalOptions)],
    model: ModelArgument = None,
) -> None:
    """Perplexity by position under every scaling, or answers about what stands far back, as a report with a recommendation."""
    from windlass.lab.plotting import require_matplotlib

    require_matplotlib()
    if retrieval.tasks:
        perplexity.reject_if_given()
        common, given = shared.checked(), retrieval.checked()
        from windlass.lab.retrieval_sweep import TaskOptions, run_tasks
        from windlass.server.text.tokenizer import Tokenizer

        name, path = choose_model(model)
        run_tasks(
            TaskOptions(
                model=path, model_name=model or name, load_tokenizer=Tokenizer.from_directory, **common, **given
            )
        )
        return
    retrieval.reject_if_given()
    if not shared.text:
        raise LoadError("--text is missing: give a text to read, or --tasks, which make their own")
    common, given = shared.checked(), perplexity.checked()
    from windlass.lab.perplexity_sweep import SweepOptions, run_sweep
    from windlass.server.text.tokenizer import Tokenizer

    name, path = choose_model(model)
    run_sweep(
        SweepOptions(model=path, model_name=model or name, load_tokenizer=Tokenizer.from_directory, **common, **given)
    )


# Options know no kinds, whose module brings numpy: a test compares this list with them.
PICTURE_KINDS = (
    "rotation",
    "angles",
    "cos-sin",
    "invariance",
    "encodings",
    "decay",
    "extrapolation",
    "scalings",
    "attention",
)


def picture(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(PICTURE_KINDS)}.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="A .png or .svg file to write.")],
    model: Annotated[
        str | None,
        option("--model", help="A model as `windlass serve` takes it. Default: Llama 2's numbers; attention: smollm2."),
    ] = None,
    theta: Annotated[float | None, typer.Option("--theta", help="Instead of a model: the base.")] = None,
    dim: Annotated[int | None, typer.Option("--dim", help="Instead of a model: rotated dimensions of a head.")] = None,
    trained_len: Annotated[
        int | None, typer.Option("--trained-len", help="Instead of a model: the trained length in tokens.")
    ] = None,
    scaling: Annotated[
        list[str] | None,
        typer.Option(
            "--scaling",
            metavar="JSON",
            help="What the picture is drawn under; repeatable for scalings and extrapolation, which lay several side by side.",
        ),
    ] = None,
    length: Annotated[
        int | None,
        typer.Option(
            "--length", help="How far to look, in tokens. Default: 24 times the trained length, at most 10 million."
        ),
    ] = None,
    learned: Annotated[
        Path | None,
        typer.Option(
            "--learned", metavar="PATH", help="encodings: a checkpoint with learned positions, such as GPT-2."
        ),
    ] = None,
    layer: Annotated[int, typer.Option("--layer", help="attention: which layer.")] = 0,
    head: Annotated[
        list[int] | None, typer.Option("--head", help="attention: which heads; repeatable. Default: three that differ.")
    ] = None,
    text: Annotated[str | None, typer.Option("--text", help="attention: what is read.")] = None,
) -> None:
    """Draw one of the pictures by which rotary embeddings are explained, of any model or parameters."""
    if kind not in PICTURE_KINDS:
        raise LoadError(f"there is no picture {kind!r}{did_you_mean(kind, PICTURE_KINDS)}: {', '.join(PICTURE_KINDS)}")
    from windlass.clients.terminal.outputs import check_outputs
    from windlass.lab.plotting import require_matplotlib

    require_matplotlib()
    from windlass.lab.gallery import Extras, draw
    from windlass.lab.gallery_subject import LLAMA_2, base_from_parameters, make_subject
    from windlass.lab.plotting import check_suffix, save_figure
    from windlass.server.startup.choice import choose_model
    from windlass.server.startup.tokenizer_directory import with_tokenizer
    from windlass.server.text.tokenizer import Tokenizer

    check_suffix(out)
    check_outputs({"--out": out})
    scalings = [RopeScaling.from_dict(parse_json(one), param="--scaling") for one in scaling or []]
    given = [
        name
        for name, value in (("--theta", theta), ("--dim", dim), ("--trained-len", trained_len))
        if value is not None
    ]
    if given and (model is not None or kind == "attention"):
        raise LoadError(f"{given[0]} and a model both say what rotates: leave one of them out")
    name, directory = choose_model(model) if model is not None or kind == "attention" else ("", None)
    base = None
    if given:
        base = base_from_parameters(
            theta if theta is not None else LLAMA_2.rope_theta,
            dim if dim is not None else LLAMA_2.rotary_dim,
            trained_len if trained_len is not None else LLAMA_2.trained_len,
        )
        name = f"θ {base.rope_theta:,g}, {base.rotary_dim} dimensions"
    subject = make_subject(directory, base, scalings, length, name or "Llama 2")
    extras = Extras(
        load_tokenizer=lambda path: Tokenizer.from_directory(with_tokenizer(path)),
        model=directory,
        learned=learned,
        layer=layer,
        heads=tuple(head or ()),
        text=text,
        scaling=scalings[0] if scalings else None,
    )
    save_figure(draw(kind, subject, extras), out)


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
    from windlass.lab.conformance import CHECKS, ConformanceSuite, exit_status, to_json, to_lines, to_markdown
    from windlass.lab.conformance_client import CheckUnavailableError, ConformanceClient

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
    from windlass.lab.scaling_inspection import inspect_scaling

    if png is not None:
        from windlass.clients.terminal.outputs import check_outputs
        from windlass.lab.plotting import require_matplotlib

        require_matplotlib()
        check_outputs({"--png": png})
    wanted = _parse_scaling(scaling)  # what is at fault there is told before anything is looked up or downloaded
    name, path = choose_model(model)
    result = inspect_scaling(path, wanted, length, model or name)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        from windlass.lab.scaling_inspection import print_tables

        print_tables(result)
    if png is not None:
        from windlass.lab.plotting import save_png
        from windlass.lab.sweep_plots import draw_inspection

        save_png(draw_inspection(result), png)


def _parse_scaling(text: str) -> RopeScaling | None:
    value = parse_json(text)
    return None if value is None else RopeScaling.from_dict(value)
