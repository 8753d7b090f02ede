"""What the folders hold and what their files import, as numbers: read by docs/make_rooms_picture.py. Draws nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from graphlib import TopologicalSorter
from itertools import pairwise
from pathlib import Path

import grimp

FLOORS = ("server", "engine", "kernels", "clients")
MANY = 8  # as many files at the top of a floor are one room

Node = str  # "engine/cache", "kernels/backend.py", "clients/*.py"
Edges = dict[tuple[Node, Node], int]  # how many imports


def read_imports(tree: Path) -> set[tuple[str, str]]:
    """(importer, imported), modules of the four floors by their names without `windlass.`."""
    sys.path.insert(0, str(tree / "src"))
    graph = grimp.build_graph("windlass", cache_dir=None)
    found = set()
    for module in graph.modules:
        for other in graph.find_modules_directly_imported_by(module):
            names = [name.removeprefix("windlass.") for name in (module, other)]
            if all(name.split(".")[0] in FLOORS for name in names):
                found.add((names[0], names[1]))
    return found


def code_files(folder: Path, pattern: str = "*.py") -> list[Path]:
    """Those that do something: __init__.py counts where it is more than a docstring."""
    files = folder.rglob(pattern)
    return sorted(p for p in files if p.name != "__init__.py" or "import " in p.read_text(encoding="utf-8"))


def entries(folder: Path) -> list[Path]:
    """What a person sees in a folder."""
    hidden = ("_", ".") if folder.name != "clients" else ("__", ".")
    return sorted(p for p in folder.iterdir() if not p.name.startswith(hidden) and p.suffix not in (".so", ".egg-info"))


def rooms_of(tree: Path, imports: set[tuple[str, str]]) -> tuple[dict[Node, str], Edges]:
    """What is written in each box, and the arrows between them."""
    boxes: dict[Node, str] = {}
    for floor in FLOORS:
        files = [path for path in entries(tree / floor) if path.suffix == ".py" and path.name != "setup.py"]
        if len(files) >= MANY:
            boxes[f"{floor}/*.py"] = f"{len(files)} files"
        else:
            boxes |= {f"{floor}/{path.name}": "" for path in files}
        for folder in entries(tree / floor):
            if any(code_files(folder)):
                boxes[f"{floor}/{folder.name}"] = contents(folder)
        if f"{floor}/*.py" not in boxes and any(imported == floor for _, imported in imports):
            boxes[f"{floor}/__init__.py"] = "the public names"
    edges: Counter[tuple[Node, Node]] = Counter()
    for importer, imported in imports:
        a, b = node_of(importer, boxes), node_of(imported, boxes)
        if a != b and a in boxes and b in boxes:
            edges[a, b] += 1
    return boxes, dict(edges)


def contents(folder: Path) -> str:
    files, compiled = len(code_files(folder)), len(code_files(folder, "*.cpp")) + len(code_files(folder, "*.h"))
    inside = [path.name + "/" for path in entries(folder) if path.is_dir() and any(code_files(path))]
    if len(inside) > 2:
        inside = [f"{len(inside)} folders"]
    parts = [f"{files} file{'s' if files != 1 else ''}", *inside, *([f"{compiled} of C++"] if compiled else [])]
    return " · ".join(parts)


def node_of(module: str, boxes: Iterable[Node]) -> Node:
    floor, *rest = module.split(".")
    first = rest[0] if rest else "__init__"
    choices = (f"{floor}/{first}", f"{floor}/{first}.py", f"{floor}/*.py")
    return next((choice for choice in choices if choice in boxes), f"{floor}/{first}")


def without_circles(edges: Edges) -> tuple[Edges, Edges]:
    """The arrows without those of fewest imports in each circle, and these."""
    kept, against = dict(edges), {}
    while circle := find_circle(kept):
        weakest = min(circle, key=lambda edge: (kept[edge], edge))
        against[weakest] = kept.pop(weakest)
    return kept, against


def find_circle(edges: Edges) -> list[tuple[Node, Node]]:
    below: dict[Node, list[Node]] = {}
    for a, b in sorted(edges):
        below.setdefault(a, []).append(b)
    done: set[Node] = set()

    def walk(path: list[Node]) -> list[Node]:
        for other in below.get(path[-1], ()):
            if other in path:
                return [*path[path.index(other) :], other]
            if other not in done and (found := walk([*path, other])):
                return found
        done.add(path[-1])
        return []

    for start in sorted(below):
        if start not in done and (found := walk([start])):
            return list(pairwise(found))
    return []


def reduced(edges: Edges) -> Edges:
    """Without the arrows that follow from others."""
    below: dict[Node, set[Node]] = {}
    for a, b in edges:
        below.setdefault(a, set()).add(b)
    reach: dict[Node, set[Node]] = {}
    for node in TopologicalSorter(below).static_order():
        reach[node] = set().union(*({other} | reach[other] for other in below.get(node, ())))
    return {(a, b): n for (a, b), n in edges.items() if not any(b in reach[c] for c in below[a] if c != b)}


def chain_length(edges: Iterable[tuple[str, str]]) -> int:
    """How many stand in the longest chain of arrows; a circle counts as one step back."""
    kept, _ = without_circles(dict.fromkeys(edges, 1))
    below: dict[str, set[str]] = {}
    for a, b in kept:
        below.setdefault(a, set()).add(b)
    depth: dict[str, int] = {}
    for node in TopologicalSorter(below).static_order():
        depth[node] = 1 + max((depth[other] for other in below.get(node, ())), default=0)
    return max(depth.values(), default=0)


# ---- the table -------------------------------------------------------------------------------------------------------
def print_table(tree: Path, imports: set[tuple[str, str]]) -> None:
    """Two lines a floor: what stands at its top, and all its files."""
    print("floor                  number  arrows  levels  in circles  largest")
    for floor in FLOORS:
        inside = {(a, b) for a, b in imports if a.split(".")[0] == b.split(".")[0] == floor}
        at_top = {(entry_of(a), entry_of(b)) for a, b in inside if entry_of(a) != entry_of(b)}
        counts = dict(folder_counts(tree, floor))
        folder = max(counts, key=lambda name: counts[name])
        lines, file = max(
            (len(path.read_text(encoding="utf-8").splitlines()), path.name) for path in sources(tree / floor)
        )
        for what, number, arrows, largest in (
            ("entries", counts[floor], at_top, f"{folder}: {counts[folder]} entries"),
            ("files", len(code_files(tree / floor)), inside, f"{file}: {lines} lines"),
        ):
            levels, circles = chain_length(arrows), len(in_circles(arrows))
            print(f"{floor:<8}  {what:<10}  {number:>7}  {len(arrows):>6}  {levels:>6}  {circles:>10}  {largest}")
    print(
        "\nentries per folder: "
        + ", ".join(f"{name} {count}" for f in FLOORS for name, count in folder_counts(tree, f))
    )


def entry_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def sources(folder: Path) -> list[Path]:
    return [path for kind in ("*.py", "*.h", "*.cpp") for path in folder.rglob(kind)]


def folder_counts(tree: Path, floor: str) -> list[tuple[str, int]]:
    """How many entries each folder of a floor shows."""
    folders = [tree / floor, *sorted(path for path in (tree / floor).rglob("*") if path.is_dir())]
    return [(str(path.relative_to(tree)), len(entries(path))) for path in folders if sources(path)]


def in_circles(edges: set[tuple[str, str]]) -> set[str]:
    """Those that import themselves by way of others."""
    below: dict[str, set[str]] = {}
    for a, b in edges:
        below.setdefault(a, set()).add(b)

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = below.get(waiting.pop(), set()) - found
            found |= new
            waiting += new
        return found

    return {node for node in below if node in reached(node)}
