"""Draw docs/internals/pictures/walk.svg: a vector plus a sinusoid, and the same vector rotated, position by position.

python tools/docs/make_walk.py

SVG animation without scripts also runs in an <img>. Without animation the picture shows position 0 and all tips.
"""

from __future__ import annotations

import math
from pathlib import Path

OUT = Path(__file__).resolve().parents[2] / "docs" / "internals" / "pictures" / "walk.svg"
X = (0.9, 0.4)
PLACES = 13  # two turns of a pair of speed 1, a little more than once in 6.3 places
SECONDS_A_PLACE = 0.9
SCALE, CENTRE, SIDE = 84.0, ((112.0, 205.0), (175.0, 205.0)), 340.0
INK, GREY, BLUE, RED = "#222222", "#9a9a9a", "#0072B2", "#D55E00"


def added(place: int) -> tuple[float, float]:
    return X[0] + math.sin(place), X[1] + math.cos(place)


def turned(place: int) -> tuple[float, float]:
    cos, sin = math.cos(place), math.sin(place)
    return cos * X[0] - sin * X[1], sin * X[0] + cos * X[1]


def at(point: tuple[float, float], panel: int) -> tuple[str, str]:
    """On the page, whose y goes down."""
    x, y = CENTRE[panel]
    return f"{x + panel * SIDE + SCALE * point[0]:.1f}", f"{y - SCALE * point[1]:.1f}"


def animate(attribute: str, values: list[str]) -> str:
    seconds = SECONDS_A_PLACE * PLACES
    return (
        f'<animate attributeName="{attribute}" values="{";".join(values)}" dur="{seconds:g}s" '
        'calcMode="discrete" repeatCount="indefinite"/>'
    )


Point = tuple[float, float]


def panel(number: int, title: str, note: str, walk: list[Point], circle: tuple[Point, float], colour: str) -> str:
    """circle: where its tips lie, as middle and radius."""
    (middle, radius), origin = circle, at((0, 0), number)
    column = f"{number * SIDE + 172:g}"
    tips = [at(point, number) for point in walk]
    lengths = [f"{math.hypot(*point):.3f}" for point in walk]
    x, y = at(middle, number)
    parts = [
        f'<text x="{column}" y="26" class="title">{title}</text>',
        f'<text x="{column}" y="46" class="note">{note}</text>',
        f'<circle cx="{x}" cy="{y}" r="{SCALE * radius:.1f}" class="path"/>',
        f'<line x1="{origin[0]}" y1="{origin[1]}" x2="{at(X, number)[0]}" y2="{at(X, number)[1]}" class="x"/>',
        *(f'<circle cx="{a}" cy="{b}" r="2.5" fill="{colour}" opacity="0.45"/>' for a, b in tips),
        f'<line x1="{origin[0]}" y1="{origin[1]}" x2="{tips[0][0]}" y2="{tips[0][1]}" stroke="{colour}" class="arrow">',
        animate("x2", [a for a, _ in tips]) + animate("y2", [b for _, b in tips]) + "</line>",
        f'<circle cx="{tips[0][0]}" cy="{tips[0][1]}" r="5" fill="{colour}">',
        animate("cx", [a for a, _ in tips]) + animate("cy", [b for _, b in tips]) + "</circle>",
        f'<circle cx="{origin[0]}" cy="{origin[1]}" r="3" fill="{INK}"/>',
    ]
    # Text cannot be animated: one line for each place, shown in its turn.
    for place, length in enumerate(lengths):
        shown = ["visible" if other == place else "hidden" for other in range(PLACES)]
        parts.append(
            f'<text x="{column}" y="345" class="count" visibility="{shown[0]}">place {place}, length {length}'
            + animate("visibility", shown)
            + "</text>"
        )
    return "\n".join(parts)


def picture() -> str:
    sums = [added(place) for place in range(PLACES)]
    turns = [turned(place) for place in range(PLACES)]
    about_origin = (0.0, 0.0), math.hypot(*X)
    style = (
        f"text{{font-family:sans-serif;fill:{INK};text-anchor:middle}}.title{{font-size:16px;font-weight:bold}}"
        f".note{{font-size:12px}}.count{{font-size:14px}}.path{{fill:none;stroke:{GREY};stroke-dasharray:3 3}}"
        f".x{{stroke:{GREY};stroke-width:2}}.arrow{{stroke-width:3}}"
    )
    width, height = 2 * SIDE - 10, 360
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}">',
            "<title>A vector with a sinusoid added, and the same vector rotated</title>",
            f"<style>{style}</style>",
            f'<rect width="{width:g}" height="{height}" fill="#ffffff"/>',
            panel(0, "Sinusoidal: added", "the tip goes round x (grey), the length changes", sums, (X, 1.0), RED),
            panel(1, "Rotary: turned", "the tip goes round the origin, the length stays", turns, about_origin, BLUE),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    OUT.write_text(picture(), encoding="utf-8")
