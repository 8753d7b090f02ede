"""`windlass rope picture`: options in, one file out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.parsing import parse_json
from windlass.server.options.spelling import option

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
    from windlass.server.cli.rope.pictures import require_matplotlib

    require_matplotlib()
    from windlass.server.cli.rope.gallery.kinds import Extras, draw
    from windlass.server.cli.rope.gallery.style import check_suffix, save_figure
    from windlass.server.cli.rope.gallery.subject import LLAMA_2, base_from_parameters, make_subject
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
