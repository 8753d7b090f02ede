"""`windlass rope`: inspect a rotary scaling, sweep scalings, draw pictures, check the rotary positions of any server.

This module defines the options. The work is done in windlass.lab, which is imported inside the functions, so that no serving
process loads it. Imports neither torch, numpy nor matplotlib at module level.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from typer_injector import Depends, InjectingTyper

from windlass.clients.terminal import CommandError, check_outputs, option, write_output
from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.rotary.rotary_policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling_text import parse_scaling
from windlass.server.cli.parameters import ModelArgument, ModelOption, variable_option
from windlass.server.config.server_options import OPTIONS
from windlass.server.startup.model_files import choose_model


@dataclass(slots=True, kw_only=True)
class SharedSweepOptions:
    """Options of every sweep: texts, scalings, device and output files."""

    out: Annotated[Path, option("The report, one HTML file.", metavar="FILE")]
    text: Annotated[
        list[Path] | None,
        option(
            "UTF-8 text the model was not trained on, or a directory of *.txt and *.py; repeatable. With --tasks: "
            "documents are cut from it, those of code from *.py; by default from generated prose and code.",
            metavar="FILE",
        ),
    ] = None
    trained_len: Annotated[
        int | None, option("Trained length in tokens, if config.json gives a longer one.", min=2)
    ] = None
    scaling: Annotated[
        list[str] | None,
        variable_option(
            "--scaling",
            "Measure only this scaling and no scaling; repeatable. Default: a selection of linear, ntk, dynamic, yarn and "
            "the model's own.",
            metavar="SCALING",
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        variable_option(
            "--policy",
            "With --scaling: the rope_update of scalings that depend on the length: frozen, recompute or rotate; "
            "repeatable. Default: all three.",
        ),
    ] = None
    cut: Annotated[bool, option("Also measure the text cut to the trained length, as a reference.")] = True
    keep: Annotated[
        Path | None,
        option(
            "Result log: append each finished pass to this file, and skip those it contains, so that an interrupted sweep "
            "resumes.",
            metavar="FILE",
        ),
    ] = None
    as_json: Annotated[Path | None, option("Also write all figures as JSON.", "--json", metavar="FILE")] = None
    png: Annotated[Path | None, option("Also write the plot as a picture.", metavar="FILE")] = None
    markdown: Annotated[Path | None, option("Also write the report as Markdown.", metavar="FILE")] = None
    device: Annotated[str, variable_option("--device", "Device: cpu, cuda, cuda:1 or auto.")] = "auto"
    dtype: Annotated[str, variable_option("--dtype", "auto, float32, bfloat16 or float16.")] = "auto"
    kv_cache_dtype: Annotated[
        str, variable_option("--kv-cache-dtype", "Type of cached keys and values: as --dtype, or int8.")
    ] = "auto"
    attention_window: Annotated[
        int | None,
        variable_option(
            "--attention-window", "Also measure without scaling, where each token sees only this many previous tokens."
        ),
    ] = None
    attention_sinks: Annotated[
        int | None,
        variable_option("--attention-sinks", "With --attention-window: leading tokens that stay visible. Default: 4."),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `CommonSweepOptions`. Raises LoadError."""
        if self.policy and not self.scaling:
            raise LoadError("--policy applies to a --scaling: give --scaling too, or omit --policy")
        if self.attention_sinks is not None and self.attention_window is None:
            raise LoadError("--attention-sinks needs an --attention-window: give one too, or omit it")
        given = {"attention_window": self.attention_window, "attention_sinks": self.attention_sinks}
        return {
            **{name: value for name, value in given.items() if value is not None},
            "texts": tuple(self.text or ()),
            "trained_len": self.trained_len,
            "scalings": tuple(parse_scaling(one, param="--scaling").to_dict() for one in self.scaling or ()),
            "policies": tuple(_parse_policy(one) for one in self.policy or ()),
            "cut": self.cut,
            "device": self.device,
            "dtype": self.dtype,
            "kv_cache_dtype": OPTIONS["kv_cache_dtype"].read(self.kv_cache_dtype),
            "keep": self.keep,
            "html": self.out,
            "json": self.as_json,
            "png": self.png,
            "markdown": self.markdown,
        }


@dataclass(slots=True, kw_only=True)
class PerplexityOptions:
    """Options of a perplexity sweep. Those not given have their default in `SweepOptions`."""

    max_len: Annotated[int | None, option("Longest context measured, in tokens. Default: 4096.")] = None
    target_len: Annotated[int | None, option("Length to recommend a scaling for. Default: --max-len.")] = None
    windows: Annotated[
        int | None, option("Windows of --max-len tokens per text, spread evenly. Default: 8.", min=1)
    ] = None
    samples: Annotated[
        int | None,
        option("Positions per window at which dynamic is recomputed for the exact length. Default: 16.", min=0),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `SweepOptions`."""
        return _given(self)

    def reject_if_given(self) -> None:
        """Raise LoadError if any is given."""
        for name in _given(self):
            raise LoadError(
                f"{_option_name(name)} applies to perplexity, not to --tasks: use --lengths and --documents there"
            )


@dataclass(slots=True, kw_only=True)
class RetrievalOptions:
    """Options of a retrieval sweep. Those not given have their default in `TaskOptions`."""

    tasks: Annotated[
        list[str] | None,
        variable_option(
            "--tasks",
            "Ask for distant facts instead of measuring perplexity: passkey, needle, recall, multihop, tally, "
            "function, calls, key-tokens, separated by commas, or all.",
            metavar="NAMES",
        ),
    ] = None
    lengths: Annotated[
        list[str] | None,
        variable_option(
            "--lengths",
            "With --tasks: tokens per document, such as 4096,8192. Default: the trained length and twice that.",
            metavar="NUMBERS",
        ),
    ] = None
    documents: Annotated[
        int | None, option("With --tasks: documents per length and kind (prose, code). Default: 4.")
    ] = None
    seed: Annotated[int | None, option("With --tasks: random seed of the documents. Default: 1.")] = None
    report_only: Annotated[
        bool,
        option(
            "With --tasks and --keep: compute nothing, and report on the complete documents of an interrupted run.",
            "--report-only",
        ),
    ] = False
    kv_cache_memory: Annotated[
        str | None,
        variable_option(
            "--kv-cache-memory",
            "With --tasks: memory for cached keys and values, such as 4GiB. More memory runs more scalings concurrently.",
            metavar="SIZE",
        ),
    ] = None

    def checked(self) -> dict[str, Any]:
        """Fields of `TaskOptions`. Raises LoadError."""
        from windlass.lab.retrieval_sweep import parse_lengths, parse_tasks

        given = _given(self)
        given["tasks"] = parse_tasks(self.tasks or ())
        if self.lengths:
            given["lengths"] = parse_lengths(self.lengths)
        if self.kv_cache_memory is not None:
            given["kv_cache_memory"] = OPTIONS["kv_cache_memory"].read(self.kv_cache_memory)
        return given

    def reject_if_given(self) -> None:
        """Raise LoadError if any is given."""
        for name in _given(self):
            raise LoadError(f"{_option_name(name)} is for --tasks: give some, such as --tasks all, or omit it")


def _given(options: PerplexityOptions | RetrievalOptions) -> dict[str, Any]:
    """Fields that were given."""
    values = {field.name: getattr(options, field.name) for field in fields(options)}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def _option_name(name: str) -> str:
    return "--" + name.replace("_", "-")


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
    """Measure perplexity by position, or answers about distant facts, under several scalings, and recommend one."""
    from windlass.lab.plotting import require_matplotlib

    require_matplotlib()
    if retrieval.tasks:
        perplexity.reject_if_given()
        given = shared.checked() | retrieval.checked()
    else:
        retrieval.reject_if_given()
        if not shared.text:
            raise LoadError("--text is missing: give a text to read, or --tasks, which can generate its own")
        given = shared.checked() | perplexity.checked()
    from windlass.lab.perplexity_sweep import SweepOptions, run_sweep
    from windlass.lab.retrieval_sweep import TaskOptions, run_tasks
    from windlass.server.text.tokenizer import Tokenizer

    name, path = choose_model(model)
    given |= {"model": path, "model_name": model or name, "load_tokenizer": Tokenizer.from_directory}
    if retrieval.tasks:
        run_tasks(TaskOptions(**given))
    else:
        run_sweep(SweepOptions(**given))


# A copy of the keys of `lab.gallery.KINDS`, whose module imports numpy. A test compares them.
PICTURE_KINDS = (
    *("rotation", "angles", "cos-sin", "invariance", "encodings"),
    *("decay", "extrapolation", "scalings", "attention"),
)


def picture(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(PICTURE_KINDS)}.")],
    out: Annotated[Path, option("A .png or .svg file to write.", metavar="FILE")],
    model: Annotated[
        str | None,
        variable_option(
            "--model",
            "A model as for `windlass serve`. Default: Llama 2's parameters; for attention: the default model.",
        ),
    ] = None,
    theta: Annotated[float | None, option("Instead of a model: the base (theta).")] = None,
    dim: Annotated[int | None, option("Instead of a model: rotated dimensions of a head.")] = None,
    trained_len: Annotated[int | None, option("Instead of a model: the trained length in tokens.")] = None,
    scaling: Annotated[
        list[str] | None,
        option(
            "Scaling of the picture; repeatable for scalings and extrapolation, which compare several.",
            metavar="SCALING",
        ),
    ] = None,
    length: Annotated[
        int | None, option("Longest distance, in tokens. Default: 24 times the trained length, at most 10 million.")
    ] = None,
    learned: Annotated[
        Path | None, option("For encodings: a checkpoint with learned positions, such as GPT-2.", metavar="PATH")
    ] = None,
    layer: Annotated[int, option("For attention: index of the layer.")] = 0,
    head: Annotated[
        list[int] | None, option("For attention: index of a head; repeatable. Default: three that differ.")
    ] = None,
    text: Annotated[str | None, option("For attention: the text.")] = None,
) -> None:
    """Draw a picture that explains rotary embeddings, of any model or parameters."""
    if kind not in PICTURE_KINDS:
        raise LoadError(f"unknown picture {kind!r}{did_you_mean(kind, PICTURE_KINDS)}: {', '.join(PICTURE_KINDS)}")
    from windlass.lab.plotting import require_matplotlib

    require_matplotlib()
    from windlass.lab.gallery import Extras, draw
    from windlass.lab.gallery_subject import LLAMA_2, base_from_parameters, make_subject
    from windlass.lab.plotting import check_suffix, save_figure
    from windlass.server.startup.derived_files import ensure_tokenizer
    from windlass.server.text.tokenizer import Tokenizer

    check_suffix(out)
    check_outputs({"--out": out})
    scalings = [parse_scaling(one, param="--scaling") for one in scaling or []]
    given = [
        name
        for name, value in (("--theta", theta), ("--dim", dim), ("--trained-len", trained_len))
        if value is not None
    ]
    if given and (model is not None or kind == "attention"):
        raise LoadError(f"{given[0]} and a model both define the rotation: omit one of them")
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
        load_tokenizer=lambda path: Tokenizer.from_directory(ensure_tokenizer(path)),
        model=directory,
        learned=learned,
        layer=layer,
        heads=tuple(head or ()),
        text=text,
        scaling=scalings[0] if scalings else None,
    )
    save_figure(draw(kind, subject, extras), out)


def conform(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, option("Name of the model. Default: the first listed.")] = None,
    api_key: Annotated[str | None, option("The server's key.", envvar="WINDLASS_API_KEY", show_envvar=False)] = None,
    trained_len: Annotated[int | None, option("Trained length in tokens. Default: from /v1/models.", min=64)] = None,
    max_len: Annotated[int | None, option("Longest context in tokens. Default: from /v1/models.", min=128)] = None,
    far_len: Annotated[
        int, option("Length in tokens of the texts that check the precision of angles.", min=256)
    ] = 100_000,
    tolerance: Annotated[float, option("Largest difference, in nats, that counts as rounding.", min=0)] = 0.05,
    timeout: Annotated[float, option("Timeout of one request, in seconds.", min=1)] = 300,
    time_limit: Annotated[
        float, option("Time limit of all checks, in seconds; checks not completed by then are reported.", min=1)
    ] = 1800,
    seed: Annotated[
        int | None, option("Random seed of the texts. Default: a new one for each run, so that no text is cached.")
    ] = None,
    as_json: Annotated[Path | None, option("Also write JSON.", "--json", metavar="FILE")] = None,
    markdown: Annotated[Path | None, option("Also write Markdown.", metavar="FILE")] = None,
) -> None:
    """Check the rotary positions of any server. Exit status 0: all results hold, 1: something differs, 2: error."""
    from windlass.lab.conformance import CHECKS, ConformanceSuite, exit_status, to_json, to_lines, to_markdown
    from windlass.lab.conformance_client import CheckUnavailableError, ConformanceClient

    check_outputs({"--json": as_json, "--markdown": markdown})
    chosen = secrets.randbits(32) if seed is None else seed
    client = ConformanceClient(url, model, api_key, timeout, time_limit=time_limit)
    try:
        trained = trained_len or client.trained()
        suite = ConformanceSuite(client, trained, max_len or client.context(), tolerance, chosen, far_len)
        results = suite.run(CHECKS, lambda name: typer.echo(f"checking: {name}", err=True))
    except CheckUnavailableError as error:
        raise CommandError(f"{url} cannot be checked: {error}") from None
    finally:
        client.close()
    for line in to_lines(results):
        typer.echo(line)
    if as_json is not None:
        write_output(as_json, json.dumps(to_json(url, client.model, results, chosen), indent=1) + "\n")
    if markdown is not None:
        write_output(markdown, to_markdown(url, client.model, results))
    if suite.lost is not None:
        raise CommandError(suite.lost)
    raise typer.Exit(exit_status(results))


app = InjectingTyper(help="Inspect and measure rotary scalings of a model.", no_args_is_help=True)

app.command("conform")(conform)

app.command("sweep")(sweep)

app.command("picture")(picture)


@app.command("inspect")
def inspect(
    scaling: Annotated[
        str,
        typer.Argument(metavar="SCALING", help="Such as 'yarn 4', a JSON object in Hugging Face's format, or null."),
    ],
    model: ModelOption = None,
    length: Annotated[
        int | None, option("Tokens of the request, for kinds that depend on it. Default: the trained length.")
    ] = None,
    png: Annotated[Path | None, option("Also write a plot of the wavelengths.", metavar="FILE")] = None,
    as_json: Annotated[bool, option("Write one JSON object and nothing else.", "--json")] = False,
) -> None:
    """Show frequencies, wavelengths and factors of a scaling on a model, next to the model's own. Loads no weights."""
    from windlass.lab.scaling_inspection import inspect_scaling

    if png is not None:
        from windlass.lab.plotting import require_matplotlib

        require_matplotlib()
        check_outputs({"--png": png})
    wanted = (
        None if scaling.strip() == "null" else parse_scaling(scaling)
    )  # reports errors before a model is downloaded
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
