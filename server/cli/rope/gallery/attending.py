"""The picture of what heads of a real layer attend to. Loads the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from windlass.engine.errors import LoadError
from windlass.engine.rotary.scaling import RopeScaling
from windlass.server.cli.rope.gallery.style import COLOURS, new_figure, style_axes
from windlass.server.cli.rope.gallery.subject import Numbers
from windlass.server.cli.rope.pictures import literal
from windlass.server.cli.rope.texts import Encoder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TEXT = "The cat sat on the mat. The dog sat on the rug. The cat sat on the"
_MAX_TEXT_TOKENS = 512
_MAX_LABELLED_TOKENS = 40  # tokens that have room for their names


def read_pattern(
    directory: Path, text: str, layer: int, scaling: RopeScaling | None, load_tokenizer: Callable[[Path], Encoder]
) -> tuple[list[str], Numbers]:
    """The tokens of a text, and the weights [heads, T, T] with which each attends to those before it."""
    from windlass.engine.evaluation.attention import attention_weights  # it brings torch
    from windlass.engine.evaluation.scoring import Scorer

    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode(text, add_special_tokens=True)
    if not 2 <= len(ids) <= _MAX_TEXT_TOKENS:
        raise LoadError(f"--text has {len(ids)} tokens: between 2 and {_MAX_TEXT_TOKENS} can be shown")
    weights = attention_weights(Scorer.load(directory), ids, layer, scaling)
    names = [tokenizer.decode([one], skip_special_tokens=False) for one in ids]
    return [name.replace("\n", "⏎").strip() or "␣" for name in names], weights.double().numpy()


def choose_heads(weights: Numbers, count: int) -> list[int]:
    """Heads that differ most: by the mean distance at which they attend, from the nearest to the farthest."""
    index = np.arange(weights.shape[1])
    back = (weights * (index[:, None] - index[None])).sum(axis=(1, 2))
    order = np.argsort(back, kind="stable")
    picked = np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int)
    return [int(order[at]) for at in picked]


def draw_attention(name: str, layer: int, tokens: list[str], weights: Numbers, heads: list[int]) -> Figure:
    """A heat map for each head, and how their weight falls with distance."""
    figure = new_figure(f"Layer {layer} of {name}: what heads attend to", (12, 4.3))
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
