"""The options of `windlass rope sweep` as dataclasses, and what is read out of them. Imports neither torch nor matplotlib."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.engine.api.config import parse_cache_dtype
from windlass.engine.errors import LoadError
from windlass.engine.rotary.policy import ROPE_UPDATES, RopeUpdate
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.parsing import parse_json
from windlass.server.options.spelling import option, read_dtype, read_memory


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
        from windlass.server.cli.rope.tasks.run import parse_lengths, parse_tasks

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
