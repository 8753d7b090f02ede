"""`windlass rope picture`: options in, one file out, and the same for a whole gallery."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.parsing import parse_json
from windlass.server.options.spelling import option

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from windlass.server.cli.rope.gallery.subject import Subject

# Options know no kinds, whose module brings numpy: a test compares this list with them.
NAMES = (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """What single kinds take. learned: of `encodings`. The others of `attention`; text None: one of its own."""

    model: Path | None = None
    learned: Path | None = None
    layer: int = 0
    heads: tuple[int, ...] = ()
    text: str | None = None
    scaling: RopeScaling | None = None


def picture(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(NAMES)}.")],
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
    if kind not in NAMES:
        raise LoadError(f"there is no picture {kind!r}{did_you_mean(kind, NAMES)}: {', '.join(NAMES)}")
    from windlass.clients.terminal.outputs import check_outputs
    from windlass.server.cli.rope.pictures import require_matplotlib

    require_matplotlib()
    from windlass.server.cli.rope.gallery.style import check_suffix, write
    from windlass.server.cli.rope.gallery.subject import LLAMA_2, make_subject, of_parameters
    from windlass.server.startup.choice import choose_model

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
        base = of_parameters(
            theta if theta is not None else LLAMA_2.rope_theta,
            dim if dim is not None else LLAMA_2.rotary_dim,
            trained_len if trained_len is not None else LLAMA_2.trained_len,
        )
        name = f"θ {base.rope_theta:,g}, {base.rotary_dim} dimensions"
    subject = make_subject(directory, base, scalings, length, name or "Llama 2")
    extras = Extras(
        model=directory,
        learned=learned,
        layer=layer,
        heads=tuple(head or ()),
        text=text,
        scaling=scalings[0] if scalings else None,
    )
    write(draw(kind, subject, extras), out)


def draw(kind: str, subject: Subject, extras: Extras) -> Figure:
    """One picture of `kinds.KINDS`; raises LoadError and RequestError, one line."""
    from windlass.server.cli.rope.gallery.encodings import draw_encodings, read_learned
    from windlass.server.cli.rope.gallery.kinds import KINDS

    if kind == "encodings" and extras.learned is not None:
        return draw_encodings(subject, read_learned(extras.learned))
    drawer = KINDS[kind].draw
    return drawer(subject) if drawer is not None else _draw_attention(subject, extras)


def _draw_attention(subject: Subject, extras: Extras) -> Figure:
    from windlass.server.cli.rope.gallery.attending import TEXT, choose_heads, draw_attention, read_pattern

    if extras.model is None:
        raise LoadError("the picture of attention needs a model: give --model")
    tokens, weights = read_pattern(extras.model, extras.text or TEXT, extras.layer, extras.scaling)
    heads = list(dict.fromkeys(extras.heads)) or choose_heads(weights, 3)
    if len(heads) > 5 or not all(0 <= head < len(weights) for head in heads):
        raise LoadError(f"--head: up to 5 of the heads 0 to {len(weights) - 1} of this layer")
    return draw_attention(subject.name, extras.layer, tokens, weights, heads)
