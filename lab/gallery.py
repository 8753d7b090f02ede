"""Gallery: pictures that explain rotary embeddings (rotation, distances and scalings, position encodings, attention maps).

Only the attention map loads a model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.errors import LoadError, reason_of
from windlass.engine.rotary import curves
from windlass.engine.rotary.rope_scaling import RopeScaling
from windlass.lab import encoding_formulas
from windlass.lab.encoding_formulas import Numbers
from windlass.lab.gallery_subject import Subject
from windlass.lab.plotting import (
    BEYOND,
    COLOURS,
    DASHES,
    HIGHEST,
    TRAINED,
    literal,
    mark_position,
    new_figure,
    style_axes,
    thousands,
)
from windlass.lab.sweep_texts import Encoder

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_POSITIONS = 8

_MIN_LABEL_ANGLE = 0.22  # smallest angle between two labels, in radians


def draw_rotation(subject: Subject) -> Figure:
    """One unit vector in up to four of the planes, at positions 0 to 7."""
    figure = new_figure((10, 3.35), f"Each pair of numbers is an arrow that rotates with the position ({subject.name})")
    frequencies = subject.frequencies()
    chosen = sorted({min(subject.pairs - 1, subject.pairs * step // 16) for step in (0, 2, 4, 8)})
    for axes, pair in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        _arrows(axes, float(frequencies[pair]), pair)
    return figure


def _arrows(axes: Axes, frequency: float, pair: int) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Circle

    colours = colormaps["viridis"](np.linspace(0.0, 0.85, _POSITIONS))
    axes.add_patch(Circle((0, 0), 1.0, fill=False, color="#bbbbbb", linewidth=1))
    labels = _labels(frequency)
    for position in range(_POSITIONS):
        x, y = encoding_formulas.rotated(np.array([1.0, 0.0]), position, np.array([frequency]))
        axes.annotate(
            "", (x, y), (0, 0), arrowprops={"arrowstyle": "-|>", "color": colours[position], "lw": 1.6, "shrinkB": 0}
        )
        if position in labels:
            text = labels[position]
            axes.text(1.2 * x, 1.2 * y, text, ha="center", va="center", fontsize=9, color=colours[position])
    axes.set_xlim(-1.4, 1.4)
    axes.set_ylim(-1.3, 1.3)
    axes.set_aspect("equal")
    axes.axis("off")
    turn = f"a turn in {2 * math.pi / frequency:,.1f} tokens" if frequency else "never turns"
    axes.set_title(f"pair {pair}: {math.degrees(frequency):.3g}° a token,\n{turn}", fontsize=10)


def _labels(frequency: float) -> dict[int, str]:
    """Labels by position, without those that would overlap."""
    last = _POSITIONS - 1
    if last * frequency < _MIN_LABEL_ANGLE:
        return {0: f"0–{last}"}
    labelled = [last]
    for position in range(last):
        if all(
            abs(math.remainder((position - other) * frequency, 2 * math.pi)) > _MIN_LABEL_ANGLE for other in labelled
        ):
            labelled.append(position)
    return {position: str(position) for position in labelled}


def draw_angles(subject: Subject) -> Figure:
    """Angle by pair for positions 1 to 7, on a plain scale and on a logarithmic one."""
    from matplotlib import colormaps

    figure = new_figure((10, 4), f"Angle by pair at positions 1 to 7 ({subject.name})")
    left, right = figure.subplots(1, 2)
    frequencies = subject.frequencies()
    pairs = np.arange(subject.pairs)
    turning = curves.angles(np.arange(1.0, 8.0), frequencies)
    for position, row in enumerate(turning, 1):
        colour = colormaps["viridis"]((position - 1) / 7)
        for axes in (left, right):
            axes.plot(pairs, row, color=colour, linewidth=1.4, label=str(position))
    style_axes(left, x="pair", y="angle in radians", title="linear: only the first pairs seem to move")
    style_axes(
        right, x="pair", y="angle in radians (logarithmic)", title="logarithmic: straight lines at equal distances"
    )
    right.set_yscale("log")
    for turns in range(1, int(7 / (2 * math.pi)) + 1):
        left.axhline(2 * math.pi * turns, color="#999999", linewidth=0.8, linestyle=":")
        left.annotate("one full turn", (subject.pairs - 1, 2 * math.pi * turns), ha="right", va="bottom", fontsize=8)
    left.legend(title="position", ncols=2, fontsize=8, frameon=False)
    return figure


def draw_cos_sin(subject: Subject) -> Figure:
    """Heat maps of cos and sin, positions down, pairs across."""
    figure = new_figure((10, 4.4), f"cos and sin of every position and pair ({subject.name})")
    rows = min(256, subject.length)
    turning = curves.angles(np.arange(float(rows)), subject.frequencies())
    panels = figure.subplots(1, 2, sharey=True)
    for axes, values, name in zip(panels, (np.cos(turning), np.sin(turning)), ("cos", "sin"), strict=True):
        image = axes.imshow(values, cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_xlabel("pair (fast on the left, slow on the right)")
        axes.set_title(f"{name}(position × frequency)", fontsize=10)
    panels[0].set_ylabel("position")
    figure.colorbar(image, ax=list(panels), fraction=0.03, pad=0.02)
    return figure


def draw_invariance(subject: Subject) -> Figure:
    """Scores of one query and one key at all pairs of positions, and the error of a score at high positions."""
    figure = new_figure((10, 4.2), f"Scores depend on distance only ({subject.name})")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1, 1.35]})
    frequencies = subject.frequencies()
    q, k = np.random.default_rng(5).standard_normal((2, 2 * subject.pairs))
    positions = range(48)
    rotated = [np.stack([encoding_formulas.rotated(x, float(at), frequencies) for at in positions]) for x in (q, k)]
    matrix = rotated[0] @ rotated[1].T / (np.linalg.norm(q) * np.linalg.norm(k))
    largest = float(np.abs(matrix).max())
    image = left.imshow(matrix, cmap="PuOr", vmin=-largest, vmax=largest, interpolation="nearest")
    left.set(xlabel="position of the key", ylabel="position of the query")
    left.set_title("one query and one key, all positions:\nequal along every diagonal", fontsize=10)
    figure.colorbar(image, ax=left, fraction=0.046, label="cosine of query and key")
    starts = np.unique(np.geomspace(1, subject.length, 400).round())
    errors = encoding_formulas.invariance_errors(q, k, 5, starts, frequencies)
    names = {
        "float64": "float64 angles, as in Windlass",
        "float32": "float32 angles",
        "bfloat16": "bfloat16 tables of cos and sin",
    }
    for index, (precision, values) in enumerate(errors.items()):
        style = {"color": COLOURS[index + 1], "linewidth": 1.1}
        right.plot(starts, np.maximum(values, 1e-17), label=names[precision], **style)
    right.set_xscale("log")
    right.set_yscale("log")
    right.set_ylim(1e-17, 20)
    thousands(right)
    style_axes(
        right,
        x="position of the key (query 5 tokens later)",
        y="change of the score / |q||k|",
        title="same distance at higher positions",
    )
    right.legend(fontsize=8, frameon=False, loc="upper left")
    return figure


def draw_decay(subject: Subject) -> Figure:
    """Scores by distance, and their bound."""
    figure = new_figure((10, 4.2), f"Scores by distance ({subject.name})")
    left, right = figure.subplots(1, 2)
    frequencies = subject.frequencies()
    near = np.arange(0.0, min(513, subject.length))
    rng = np.random.default_rng(7)
    for index in range(6):
        q = rng.standard_normal(2 * subject.pairs)
        k = q + rng.standard_normal(2 * subject.pairs)
        drawn = encoding_formulas.scores(q, k, near, frequencies) / (np.linalg.norm(q) * np.linalg.norm(k))
        left.plot(
            near,
            drawn,
            color="#8a8a8a",
            linewidth=0.7,
            label="six random pairs of similar vectors" if index == 0 else None,
        )
    left.plot(near, curves.mean_cosine(near, frequencies), color=COLOURS[1], label="equal vectors of ones")
    left.plot(
        near,
        _bound_shape(near, frequencies),
        color=COLOURS[2],
        dashes=DASHES[1],
        label="shape of the bound, scaled to 1",
    )
    style_axes(
        left, x="distance in tokens", y="score / largest score", title="near: scores, and the shape of the bound"
    )
    left.axhline(0, color="#999999", linewidth=0.6)
    left.legend(fontsize=8, frameon=False)
    far = np.unique(np.geomspace(1, subject.length, 1500).round())
    right.plot(far, curves.mean_cosine(far, frequencies), color=COLOURS[1], linewidth=0.8)
    right.plot(far, _bound_shape(far, frequencies), color=COLOURS[2], dashes=DASHES[1])
    mark_position(right, subject.base.trained_len, "trained length", TRAINED, linewidth=1, linestyle="--")
    right.set_xscale("log")
    right.axhline(0, color="#999999", linewidth=0.6)
    thousands(right)
    style_axes(right, x="distance in tokens (logarithmic)", title="far: scores do not vanish")
    return figure


def draw_scalings(subject: Subject) -> Figure:
    """Wavelengths by pair, and scores by distance, under each scaling."""
    title = f"{subject.base.trained_len:,} trained, {subject.length:,} needed: effect of each scaling ({subject.name})"
    figure = new_figure((10, 4.8), title)
    left, right = figure.subplots(1, 2)
    far = np.geomspace(1, subject.length, 160)
    for index, (label, scaling) in enumerate(subject.compared):
        style = _style(index)
        frequencies = subject.frequencies(scaling)
        turning = frequencies >= 2 * math.pi / HIGHEST
        left.plot(np.arange(subject.pairs)[turning], 2 * math.pi / frequencies[turning], label=label, **style)
        right.plot(far, _smoothed(far, frequencies), **style)
    left.set_yscale("log")
    for length, text, colour in (
        (subject.base.trained_len, "trained length", TRAINED),
        (subject.length, "needed length", BEYOND),
    ):
        left.axhline(length, color=colour, linewidth=1)
        left.annotate(text, (0, length), xytext=(2, 3), textcoords="offset points", fontsize=8, color=colour)
    thousands(left, "y")
    style_axes(left, x="pair", y="tokens per turn (logarithmic)", title="pairs that rotate more slowly")
    right.set_xscale("log")
    thousands(right)
    mark_position(right, subject.base.trained_len, "trained length", TRAINED, linewidth=1, linestyle="--")
    style_axes(
        right,
        x="distance in tokens (logarithmic)",
        y="score of equal vectors, smoothed",
        title="apparent distance of tokens",
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def draw_extrapolation(subject: Subject) -> Figure:
    """Angles seen in training, and those that a longer text needs."""
    title = f"Trained on {subject.base.trained_len:,} tokens, read to {subject.length:,} ({subject.name})"
    figure = new_figure((10, 4.8), title)
    left, right = figure.subplots(1, 2)
    own = subject.frequencies(subject.compared[0][1])
    pairs = np.arange(subject.pairs)
    seen = np.maximum(subject.base.trained_len * own / (2 * math.pi), 1e-9)
    needed = np.maximum(subject.length * own / (2 * math.pi), 1e-9)
    known, reached = np.minimum(seen, 1.0), np.minimum(needed, 1.0)
    trained = {"color": TRAINED, "alpha": 0.35, "label": "angles seen in training"}
    left.fill_between(pairs, 1e-9, known, linewidth=0, **trained)
    new = {"color": BEYOND, "alpha": 0.45, "hatch": "//", "label": "angles never seen"}
    left.fill_between(pairs, known, reached, linewidth=0, **new)
    left.set_ylim(0, 1)
    left.set_xlim(0, subject.pairs - 1)
    style_axes(left, x="pair", y="share of the circle", title="unscaled: slow pairs reach new angles")
    left.legend(fontsize=9, loc="lower left")
    for index, (label, scaling) in enumerate(subject.compared):
        reach = subject.length * subject.frequencies(scaling) / (subject.base.trained_len * own)
        right.plot(pairs, reach, label=label, **_style(index))
    right.axhline(1, color=TRAINED, linewidth=1, linestyle=":")
    right.axvspan(0, int((seen >= 1).sum()) - 0.5, color=TRAINED, alpha=0.2, linewidth=0)
    right.annotate("entire circle trained:\nany angle is known", (0.03, 0.06), xycoords="axes fraction", fontsize=9)
    right.set_xlim(0, subject.pairs - 1)
    right.set_yscale("log")
    thousands(right, "y")
    style_axes(
        right, x="pair", y="largest angle / largest trained angle", title="scaled: on the right, 1 or less was trained"
    )
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    return figure


def _style(index: int) -> dict[str, object]:
    style: dict[str, object] = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.6}
    if DASHES[index % len(DASHES)]:
        style["dashes"] = DASHES[index % len(DASHES)]
    return style


def _bound_shape(distances: Numbers, frequencies: Numbers) -> Numbers:
    """The bound divided by its value at distance 0, as it is usually plotted."""
    return curves.decay_bound(distances, frequencies) / ((len(frequencies) + 1) / 2)


def _smoothed(places: Numbers, frequencies: Numbers) -> Numbers:
    """Mean score over half an octave around each distance: scores oscillate too much to compare six curves."""
    near = places[:, None] * 2 ** np.linspace(-0.25, 0.25, 41)[None]
    return np.stack([curves.mean_cosine(around, frequencies).mean() for around in near])


ROWS = 48

_TABLES = ("wpe.weight", "transformer.wpe.weight", "model.embed_positions.weight")


def draw_encodings(subject: Subject, learned: Numbers | None) -> Figure:
    """Upper row: the data of a model; lower row: its effect on two positions. learned: a table [P, dim], else random."""
    figure = new_figure((11, 5), f"Five position encodings ({subject.name})")
    panels = figure.subplots(2, 5)
    rng = np.random.default_rng(3)
    rows, dim = np.arange(float(ROWS)), 2 * subject.pairs
    frequencies = subject.frequencies()
    table = rng.standard_normal((ROWS, dim)) if learned is None else learned[:ROWS]
    sines = encoding_formulas.sinusoids(rows, dim)
    biases = rng.standard_normal(32)
    buckets = encoding_formulas.t5_buckets(rows)
    slopes = encoding_formulas.alibi_slopes(8)

    _map(panels[0, 0], np.cos(curves.angles(rows, frequencies)), "RoPE", "pair", "position")
    _map(panels[0, 1], sines, "sinusoidal", "dimension", "")
    _map(
        panels[0, 2],
        table[:, :ROWS] / np.abs(table).max(),
        "learned" + (" (random here)" if learned is None else ""),
        "dimension",
        "",
    )
    panels[0, 3].step(rows, buckets, color=COLOURS[1], where="mid")
    panels[0, 3].set(xlabel="distance", title="T5 bias: buckets")
    for index, slope in enumerate(slopes[:4]):
        style = {"dashes": DASHES[index]} if DASHES[index] else {}
        panels[0, 4].plot(rows, -slope * rows, color=COLOURS[index], label=f"head {index + 1}", **style)
    panels[0, 4].set(xlabel="distance", title="ALiBi: four of 8 heads")
    panels[0, 4].legend(fontsize=7, frameon=False)

    _map(
        panels[1, 0],
        encoding_formulas.relative(ROWS, curves.mean_cosine(rows, frequencies)),
        "equal vectors rotated",
        "key",
        "query",
    )
    _map(panels[1, 1], encoding_formulas.products(sines), "row · row", "key", "")
    _map(panels[1, 2], encoding_formulas.products(table), "row · row", "key", "")
    bias = biases[buckets.astype(int)]
    _map(panels[1, 3], encoding_formulas.relative(ROWS, bias / np.abs(bias).max()), "added (random here)", "key", "")
    _map(
        panels[1, 4],
        encoding_formulas.relative(ROWS, -slopes[1] * rows / (slopes[1] * ROWS)),
        "added, second head",
        "key",
        "",
    )
    for axes in panels.flat:
        axes.title.set_fontsize(10)
        axes.tick_params(labelsize=8)
    return figure


def _map(axes: Axes, values: Numbers, title: str, x: str, y: str) -> None:
    axes.imshow(values, cmap="PuOr", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)


def read_learned(path: Path) -> Numbers:
    """Learned positions of a checkpoint such as GPT-2's, float64 [P, dim]. path: a safetensors file or its folder."""
    import safetensors

    file = path / "model.safetensors" if path.is_dir() else path
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            names = set(tensors.keys())
            for name in _TABLES:
                if name in names:
                    table = np.asarray(tensors.get_tensor(name), dtype=np.float64)
                    if table.ndim == 2 and len(table) >= ROWS:
                        return table
    except (OSError, safetensors.SafetensorError, TypeError) as error:
        raise LoadError(f"cannot read --learned {path}: {reason_of(error)}") from None
    raise LoadError(f"--learned {path} has no table of at least {ROWS} learned positions ({', '.join(_TABLES)})")


TEXT = "The cat sat on the mat. The dog sat on the rug. The cat sat on the"

_MAX_TEXT_TOKENS = 512

_MAX_LABELLED_TOKENS = 40  # longer texts have no token labels


def read_pattern(
    directory: Path, text: str, layer: int, scaling: RopeScaling | None, load_tokenizer: Callable[[Path], Encoder]
) -> tuple[list[str], Numbers]:
    """Tokens of a text and their attention weights [heads, T, T]. Raises LoadError and RequestError."""
    from windlass.engine.execution.attention_maps import attention_weights
    from windlass.lab.scoring import Scorer

    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(text, add_special_tokens=True)
    if not 2 <= len(ids) <= _MAX_TEXT_TOKENS:
        raise LoadError(f"--text has {len(ids)} tokens: between 2 and {_MAX_TEXT_TOKENS} can be shown")
    weights = attention_weights(Scorer.load(directory), ids, layer, scaling)
    names = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    return [name.replace("\n", "⏎").strip() or "␣" for name in names], weights.double().numpy()


def choose_heads(weights: Numbers, count: int) -> list[int]:
    """Heads spread over their mean attention distance, from the nearest to the farthest."""
    positions = np.arange(weights.shape[1])
    mean_distance = (weights * (positions[:, None] - positions[None])).sum(axis=(1, 2))
    order = np.argsort(mean_distance, kind="stable")
    picked = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [int(order[index]) for index in picked]


def draw_attention(name: str, layer: int, tokens: list[str], weights: Numbers, heads: list[int]) -> Figure:
    """A heat map per head, and their mean weight by distance."""
    figure = new_figure((12, 4.3), f"Layer {layer} of {name}: what heads attend to")
    panels = figure.subplots(1, len(heads) + 1, squeeze=False, width_ratios=[*[1] * len(heads), 0.9])[0]
    for axes, head in zip(panels, heads, strict=False):
        image = axes.imshow(np.sqrt(weights[head]), cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(f"head {head}", fontsize=10)
        axes.set_xlabel("key")
        if len(tokens) <= _MAX_LABELLED_TOKENS:
            names = [literal(token) for token in tokens]
            axes.set_xticks(range(len(tokens)), names, rotation=90, fontsize=7)
            axes.set_yticks(range(len(tokens)), names if head == heads[0] else [""] * len(tokens), fontsize=7)
    panels[0].set_ylabel("query")
    bar = figure.colorbar(image, ax=list(panels[:-1]), orientation="horizontal", fraction=0.04, pad=0.02, aspect=60)
    bar.set_ticks([0, 0.5**0.5, 1], labels=["0", "½", "weight 1"])
    for index, head in enumerate(heads):
        by_distance = [float(np.diagonal(weights[head], -back).mean()) for back in range(max(2, len(tokens) - 4))]
        panels[-1].plot(by_distance, color=COLOURS[index + 1], label=f"head {head}", marker=".", linewidth=1)
    style_axes(panels[-1], x="distance in tokens", title="mean weight by distance")
    panels[-1].legend(fontsize=8, frameon=False, loc="upper center")
    return figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """Parameters of single kinds. learned: a checkpoint, for `encodings`. The others are for `attention`.

    text None: a default text. load_tokenizer: from the model's directory.
    """

    load_tokenizer: Callable[[Path], Encoder]
    model: Path | None = None
    learned: Path | None = None
    layer: int = 0
    heads: tuple[int, ...] = ()
    text: str | None = None
    scaling: RopeScaling | None = None


# None: the attention map, which needs a model.
KINDS: dict[str, Callable[[Subject], Figure] | None] = {
    "rotation": draw_rotation,
    "angles": draw_angles,
    "cos-sin": draw_cos_sin,
    "invariance": draw_invariance,
    "encodings": lambda subject: draw_encodings(subject, None),
    "decay": draw_decay,
    "extrapolation": draw_extrapolation,
    "scalings": draw_scalings,
    "attention": None,
}


def draw(kind: str, subject: Subject, extras: Extras) -> Figure:
    """Draw one picture of `KINDS`. Raises LoadError and RequestError."""
    if kind == "encodings" and extras.learned is not None:
        return draw_encodings(subject, read_learned(extras.learned))
    figure_of = KINDS[kind]
    return _draw_attention(subject, extras) if figure_of is None else figure_of(subject)


def _draw_attention(subject: Subject, extras: Extras) -> Figure:
    if extras.model is None:
        raise LoadError("the attention picture needs a model: give --model")
    text = extras.text or TEXT
    tokens, weights = read_pattern(extras.model, text, extras.layer, extras.scaling, extras.load_tokenizer)
    heads = list(dict.fromkeys(extras.heads)) or choose_heads(weights, 3)
    if len(heads) > 5 or not all(0 <= head < len(weights) for head in heads):
        raise LoadError(f"--head: up to 5 of the heads 0 to {len(weights) - 1} of this layer")
    return draw_attention(subject.name, extras.layer, tokens, weights, heads)
