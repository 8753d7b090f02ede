"""Makes docs/rooms.svg from the imports of the code, and prints how the folders are cut.

.venv/bin/python docs/make_rooms_picture.py [--tree CHECKOUT] [--out FILE]

The picture: a band a floor, a box a room, an arrow where a room imports another; arrows that follow from others are left
out. Imports for types alone count. --tree: another checkout of the project, of which only the table is printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean

from rooms_imports import FLOORS, Edges, Node, print_table, read_imports, reduced, rooms_of, without_circles

ROOT = Path(__file__).parents[1]
WIDTH, LEFT, RIGHT, GAP = 900, 16, 884, 18
SIDE = 672  # where the clients' band begins
ROW, BOX, HEAD = 64, 42, 30
BACKGROUND = {"server": "#e8f1fb", "engine": "#eaf6ec", "kernels": "#fdf3e1", "clients": "#f3edfa"}
INK = {"server": "#1d4e89", "engine": "#1f6b3a", "kernels": "#8a5a00", "clients": "#5b3a8c"}
CIRCLE = "#c62828"

Place = dict[Node, float]
Spans = dict[str, tuple[int, int]]


# ---- where it stands -------------------------------------------------------------------------------------------------
def levels_of(floor: str, boxes: Iterable[Node], edges: Edges) -> dict[Node, int]:
    """The row of each room of a floor: below all that import it, near to those it stands with."""
    own = sorted(box for box in boxes if box.split("/")[0] == floor)
    inside = [edge for edge in edges if edge[0] in own and edge[1] in own]
    above: dict[Node, set[Node]] = {box: {a for a, b in inside if b == box} for box in own}
    below: dict[Node, set[Node]] = {box: {b for a, b in inside if a == box} for box in own}
    level: dict[Node, int] = {}
    for box in TopologicalSorter(above).static_order():
        level[box] = 1 + max((level[other] for other in above[box]), default=-1)
    last = max(level.values())
    for _ in own:
        for box in own:
            # Lower, where that shortens more arrows than it lengthens; what no room of the floor imports goes to its users.
            if len(below[box]) > len(above[box]) or not (above[box] or below[box]):
                level[box] = min((level[other] for other in below[box]), default=last + 1) - 1
    return level


def rows_of(boxes: dict[Node, str], edges: Edges) -> tuple[dict[Node, int], Spans]:
    """The row of each box, and the first and last row of each floor."""
    rows: dict[Node, int] = {}
    spans: Spans = {}
    first = 0
    for floor in FLOORS[:3]:
        level = levels_of(floor, boxes, edges)
        rows |= {box: first + number for box, number in level.items()}
        spans[floor] = (first, first + max(level.values()))
        first = spans[floor][1] + 1
    level = levels_of("clients", boxes, edges)
    begin = spans["engine"][0]
    spans["clients"] = (begin, begin + max(level.values()))
    return rows | {box: begin + number for box, number in level.items()}, spans


def ordered(rows: dict[Node, int], edges: Edges) -> tuple[list[list[Node]], set[tuple[Node, Node]]]:
    """Boxes and the places where arrows pass, row by row from left to right, and the pieces of arrows between rows."""
    table: list[list[Node]] = [[] for _ in range(max(rows.values()) + 1)]
    for node, row in sorted(rows.items()):
        table[row].append(node)
    pieces = set()
    for a, b in sorted(edges):
        chain = [a, *(f"{a}>{b}:{row}" for row in range(rows[a] + 1, rows[b])), b]
        for row, node in enumerate(chain[1:-1], rows[a] + 1):
            table[row].append(node)
        pieces |= set(pairwise(chain))
    near = neighbours(pieces)
    chance = Random(0)
    best: tuple[int, list[list[Node]]] | None = None
    for _ in range(60):
        trial = [sorted(row, key=lambda node: (beside(node), chance.random())) for row in table]
        for sweep in range(12):
            order = range(1, len(trial)) if sweep % 2 == 0 else range(len(trial) - 2, -1, -1)
            for row in order:
                place = {node: index for index, node in enumerate(trial[row - 1 if sweep % 2 == 0 else row + 1])}
                keys = {}
                for index, node in enumerate(trial[row]):
                    around = [place[other] for other in near.get(node, ()) if other in place]
                    keys[node] = (beside(node), sum(around) / len(around) if around else index)
                trial[row].sort(key=keys.__getitem__)
            score = crossings(trial, pieces)
            if best is None or score < best[0]:
                best = score, [list(row) for row in trial]
    assert best is not None
    return best[1], pieces


def neighbours(pieces: set[tuple[Node, Node]]) -> dict[Node, list[Node]]:
    near: dict[Node, list[Node]] = {}
    for a, b in sorted(pieces):
        near.setdefault(a, []).append(b)
        near.setdefault(b, []).append(a)
    return near


def beside(node: Node) -> bool:
    """Whether a box, or an arrow on its way, belongs to the clients' band."""
    return node.startswith("clients/") or ">clients/" in node


def crossings(table: list[list[Node]], pieces: set[tuple[Node, Node]]) -> int:
    place = {node: index for row in table for index, node in enumerate(row)}
    row_of = {node: number for number, row in enumerate(table) for node in row}
    count = 0
    for number in range(len(table) - 1):
        ends = [(place[a], place[b]) for a, b in pieces if row_of[a] == number]
        count += sum((a - c) * (b - d) < 0 for i, (a, b) in enumerate(ends) for c, d in ends[:i])
    return count


def columns(table: list[list[Node]], pieces: set[tuple[Node, Node]], wide: dict[Node, float], spans: Spans) -> Place:
    """The middle of each box and passing arrow: near to those it hangs together with, in order, without overlap."""
    near = neighbours(pieces)
    x: Place = {}
    for row in table:
        x |= {node: LEFT + (RIGHT - LEFT) * (index + 1) / (len(row) + 1) for index, node in enumerate(row)}
    for sweep in range(400):
        for number in range(len(table)) if sweep % 2 == 0 else range(len(table) - 1, -1, -1):
            row, low, high = table[number], LEFT + 12.0, RIGHT - 12.0
            parts = [(row, low, high)]
            if spans["engine"][0] <= number:
                parts = [([node for node in row if not beside(node)], low, SIDE - 24.0)]
                parts.append(([node for node in row if beside(node)], SIDE + 8.0, high))
            for part, low, high in parts:
                wanted = {}
                for node in part:
                    # Long arrows run straight: what passes holds on to what passes.
                    weights: list[tuple[float, float]]
                    weights = [(40 if ">" in node and ">" in o else 1, x[o]) for o in near.get(node, ())]
                    weights.append((0.02 if ">" in node else 0.4, (low + high) / 2))
                    wanted[node] = sum(w * place for w, place in weights) / sum(w for w, _ in weights)
                x |= spread(part, wanted, wide, low, high)
    return x


def spread(part: list[Node], wanted: Place, wide: dict[Node, float], low: float, high: float) -> Place:
    """Places in the given order, as near to the wanted ones as room for all allows (pool adjacent violators)."""
    offsets, at = [], 0.0
    for index, node in enumerate(part):
        at += 0 if index == 0 else (wide[part[index - 1]] + wide[node]) / 2 + GAP
        offsets.append(at)
    groups: list[list[float]] = []  # of neighbours that would overlap
    for node, offset in zip(part, offsets, strict=True):
        group = [wanted[node] - offset]
        while groups and fmean(groups[-1]) > fmean(group):
            group = groups.pop() + group
        groups.append(group)
    flat = [fmean(group) for group in groups for _ in group]
    if part:
        least, most = low + wide[part[0]] / 2, high - offsets[-1] - wide[part[-1]] / 2
        flat = [max(least, min(most, value)) for value in flat]
    return {node: value + offset for node, value, offset in zip(part, flat, offsets, strict=True)}


# ---- the picture -----------------------------------------------------------------------------------------------------
def draw(boxes: dict[Node, str], edges: Edges, against: Edges) -> str:
    shown = reduced(edges)
    rows, spans = rows_of(boxes, edges)
    table, pieces = ordered(rows, shown)
    wide = {node: 6.0 for row in table for node in row}
    wide |= {box: max(8.4 * len(name_of(box)), 6.2 * len(text)) + 24 for box, text in boxes.items()}
    x = columns(table, pieces, wide, spans)
    top, at = {}, 8
    for row in range(len(table)):
        at += HEAD if row in [spans[floor][0] for floor in FLOORS[:3]] else 0
        top[row] = at + (ROW - BOX) // 2
        at += ROW
    height = at + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f"font-family=\"-apple-system, 'Segoe UI', Helvetica, Arial, sans-serif\">",
        "<title>The rooms of Windlass and what they import</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0.8 L8 4 L0 7.2 Z" fill="#5f6b76"/></marker></defs>',
    ]
    for floor in FLOORS:
        parts += band(floor, top[spans[floor][0]], top[spans[floor][1]])
    for a, b in sorted(shown):
        chain = [a, *(f"{a}>{b}:{row}" for row in range(rows[a] + 1, rows[b])), b]
        points = [(x[a], top[rows[a]] + BOX)]
        points += [(x[n], top[row] + y) for row, n in enumerate(chain[1:-1], rows[a] + 1) for y in (0, BOX)]
        points.append((x[b], top[rows[b]] - 1))
        parts.append(
            f'<path d="{curve(points)}" fill="none" stroke="#5f6b76" stroke-width="1.3" marker-end="url(#tip)"/>'
        )
    for a, b in sorted(against):
        path = curve([(x[a], top[rows[a]]), (x[b], top[rows[b]] + BOX)])
        parts.append(f'<path d="{path}" fill="none" stroke="{CIRCLE}" stroke-width="1.6" stroke-dasharray="4 3"/>')
    for box, text in boxes.items():
        parts += drawn_box(box, text, x[box], top[rows[box]], wide[box])
    note = "Made from the imports by docs/make_rooms_picture.py. An arrow that follows from others is left out."
    parts.append(f'<text x="{LEFT}" y="{height - 12}" font-size="12.5" fill="#5f6b76">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def name_of(box: Node) -> str:
    name = box.split("/")[1]
    return "the SDK" if box == "clients/*.py" else name


def band(floor: str, first: int, last: int) -> list[str]:
    left, right = (SIDE - 8, RIGHT) if floor == "clients" else (LEFT, RIGHT if floor == "server" else SIDE - 20)
    y, height = first - (ROW - BOX) // 2 - HEAD + 6, last - first + ROW + HEAD - 10
    # On the side where no arrow comes down.
    place, end = (right - 12, "end") if floor == "clients" else (left + 12, "start")
    return [
        f'<rect x="{left}" y="{y}" width="{right - left}" height="{height}" rx="8" fill="{BACKGROUND[floor]}"/>',
        f'<text x="{place}" y="{y + 21}" font-size="16" font-weight="600" text-anchor="{end}" fill="{INK[floor]}">'
        f"{floor}/</text>",
    ]


def drawn_box(box: Node, text: str, x: float, y: int, wide: float) -> list[str]:
    ink = INK[box.split("/")[0]]
    middle = y + 26 if not text else y + 18
    found = [
        f'<rect x="{x - wide / 2:.0f}" y="{y}" width="{wide:.0f}" height="{BOX}" rx="5" fill="#fff" stroke="{ink}"/>',
        f'<text x="{x:.0f}" y="{middle}" font-size="14.5" font-weight="600" text-anchor="middle" fill="{ink}">'
        f"{escape(name_of(box))}</text>",
    ]
    if text:
        found.append(
            f'<text x="{x:.0f}" y="{y + 34}" font-size="12" text-anchor="middle" fill="#5f6b76">{escape(text)}</text>'
        )
    return found


def curve(points: list[tuple[float, int]]) -> str:
    """Through the points, upright at each."""
    path = f"M{points[0][0]:.0f} {points[0][1]}"
    for (a, top), (b, low) in pairwise(points):
        half = (low - top) / 2
        path += f" C{a:.0f} {top + half:.0f} {b:.0f} {low - half:.0f} {b:.0f} {low}"
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, default=None)
    chosen = parser.parse_args()
    imports = read_imports(chosen.tree.resolve())
    out = chosen.out or (ROOT / "docs" / "rooms.svg" if chosen.tree == ROOT else None)
    if out is not None:
        boxes, edges = rooms_of(chosen.tree, imports)
        kept, against = without_circles(edges)
        out.write_text(draw(boxes, kept, against), encoding="utf-8")
    print_table(chosen.tree, imports)


if __name__ == "__main__":
    main()
