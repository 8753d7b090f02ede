"""The engine asks its backend and knows none by name: nothing of it imports what runs on one kind of device."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ENGINE = Path(__file__).parents[2] / "engine"
# What is open to everybody; all else under windlass.kernels is a backend's or chooses one.
OPEN = {"", "attention_call", "backend", "draws", "layouts"}


def imports(file: Path) -> Iterator[str]:
    """Every module, or name of a module, that a file imports anywhere."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where they lead"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def test_the_engine_imports_no_backend() -> None:
    files = sorted(ENGINE.rglob("*.py"))
    found = {(file.relative_to(ENGINE).as_posix(), name) for file in files for name in imports(file)}
    of_kernels = {(file, name) for file, name in found if f"{name}.".startswith("windlass.kernels.")}
    assert len(files) > 60 and len(of_kernels) > 10
    public = {name for name in dir(__import__("windlass.kernels", fromlist=["x"])) if name[0] != "_"}
    modules = {path.stem for path in (ENGINE.parent / "kernels").iterdir()}

    def part(name: str) -> str:
        """The module of windlass.kernels that a name leads to, "" where it is one of its public names."""
        first = name.removeprefix("windlass.kernels").lstrip(".").split(".")[0]
        return "" if first in public - modules else first

    assert {(file, name) for file, name in of_kernels if part(name) not in OPEN} == set()
    assert part("windlass.kernels.cpu") == "cpu" and part("windlass.kernels.bind") == ""
