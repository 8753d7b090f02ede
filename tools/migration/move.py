"""Move and merge modules by a table, and rewrite every import of them.

    python tools/migration/move.py [TABLE.json] [--dry-run]

The table maps a new file to {"doc": docstring, "from": [old files]}. An old file contributes all of its definitions that no
entry names by itself as "path.py::Name,Name". Definitions keep their order, except that what is needed at import time comes
first. Imports in product, tests, benchmarks and documentation follow, also dotted and slashed names in text. Old files that no
longer exist are left out, so the table can be applied again.
"""

from __future__ import annotations

import ast
import builtins
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(Path(__file__).parent))
from rename import tracked  # noqa: E402

PACKAGES = ("server", "engine", "kernels", "clients", "lab", "models")


def dotted(path: str) -> str:
    return ("windlass." + path.removesuffix(".py").replace("/", ".")).removesuffix(".__init__")


@dataclass
class Segment:
    """A statement at the top of a module with the comments before it."""

    module: str
    text: str
    node: ast.stmt
    names: tuple[str, ...]


@dataclass
class Binding:
    """One imported name. name None: `import module`."""

    module: str
    name: str | None
    local: str
    typing_only: bool


@dataclass
class Source:
    path: str
    doc: str | None
    doc_text: str
    imports: list[Binding] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)


def bound_names(node: ast.stmt) -> tuple[str, ...]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return (node.name,)
    found: list[str] = []

    def visit(child: ast.AST) -> None:
        if isinstance(child, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)):
            return  # what it binds is its own
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            found.append(child.id)
        elif isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            found.append(child.name)
            return
        elif isinstance(child, ast.alias) and not isinstance(node, (ast.Import, ast.ImportFrom)):
            found.append(child.asname or child.name.split(".")[0])
        for part in ast.iter_child_nodes(child):
            visit(part)

    visit(node)
    return tuple(dict.fromkeys(found))


def is_type_checking(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
        and not node.orelse
        and all(isinstance(child, (ast.Import, ast.ImportFrom)) for child in node.body)
    )


def bindings_of(node: ast.Import | ast.ImportFrom, typing_only: bool) -> list[Binding]:
    if isinstance(node, ast.Import):
        return [Binding(a.name, None, a.asname or a.name, typing_only) for a in node.names]
    assert node.level == 0 and node.module
    return [Binding(node.module, a.name, a.asname or a.name, typing_only) for a in node.names]


def read(path: str) -> Source:
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    tree = ast.parse(text)
    source = Source(path, ast.get_docstring(tree, clean=False), "")
    position = 0  # lines already used
    for index, node in enumerate(tree.body):
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))]) - 1
        last = node.end_lineno or node.lineno
        block = "".join(lines[position:last])
        position = last
        if index == 0 and source.doc is not None:
            source.doc_text = "".join(lines[first:last])
        elif isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            source.imports += bindings_of(node, False)
        elif is_type_checking(node):
            for child in node.body:  # type: ignore[attr-defined]
                source.imports += bindings_of(child, True)
        else:
            source.segments.append(Segment(path, block.strip("\n") + "\n", node, bound_names(node)))
    rest = "".join(lines[position:]).strip("\n")
    if rest and source.segments:
        source.segments[-1].text += "\n" + rest + "\n"
    return source


def loaded_at_import(node: ast.AST, deep: bool, annotations: bool = False) -> set[str]:
    """Names that a top-level statement looks up when the module is imported. annotations: they are evaluated too."""
    found: set[str] = set()

    def visit(child: ast.AST, inside: bool) -> None:
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for part in [*child.decorator_list, *child.args.defaults, *filter(None, child.args.kw_defaults)]:
                visit(part, inside)
            if annotations:
                every = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
                for part in filter(None, [child.returns, *(arg.annotation for arg in every)]):
                    visit(part, inside)
            if deep:
                for part in child.body:
                    visit(part, inside)
            return
        if isinstance(child, ast.AnnAssign):
            for part in filter(None, [child.value, child.annotation if annotations else None]):
                visit(part, inside)
            return
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load):
            found.add(child.id)
        for part in ast.iter_child_nodes(child):
            visit(part, inside)

    visit(node, False)
    return found


def used_names(node: ast.AST) -> set[str]:
    found = set()
    for child in ast.walk(node):
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            found |= set(re.findall(r"\w+", child.value)) if len(child.value) < 400 else set()
    return found


def in_order(segments: list[Segment], annotations: bool = False) -> list[Segment]:
    """As given, but what is needed at import time before what needs it."""
    defined: dict[str, list[Segment]] = defaultdict(list)
    for segment in segments:
        for name in segment.names:
            defined[name].append(segment)
    done: list[Segment] = []
    marks: set[int] = set()

    def needs(segment: Segment) -> list[Segment]:
        is_definition = isinstance(segment.node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        seen: set[str] = set()
        todo = list(loaded_at_import(segment.node, deep=False, annotations=annotations))
        result = []
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            for other in defined.get(name, ()):
                if other is segment:
                    continue
                result.append(other)
                if not is_definition or segment.node.__class__ is ast.ClassDef:
                    # What is called now runs its body now.
                    todo += list(loaded_at_import(other.node, deep=not is_definition))
        order = {id(s): i for i, s in enumerate(segments)}
        return sorted({id(s): s for s in result}.values(), key=lambda s: order[id(s)])

    def emit(segment: Segment) -> None:
        if id(segment) in marks:
            return
        marks.add(id(segment))
        for other in needs(segment):
            emit(other)
        done.append(segment)

    for segment in segments:
        emit(segment)
    return done


class Plan:
    def __init__(self, table: dict[str, dict]) -> None:
        self.table: dict[str, dict] = {}
        self.named: dict[tuple[str, str], str] = {}  # (old path, name) -> new path
        self.whole: dict[str, str] = {}  # old path -> new path
        self.problems: list[str] = []
        for new, entry in table.items():
            olds = [one for one in entry["from"] if (ROOT / one.split("::")[0]).is_file()]
            if not olds:
                continue
            self.table[new] = {**entry, "from": olds}
            for one in olds:
                path, _, names = one.partition("::")
                if names:
                    for name in names.split(","):
                        if (path, name.strip()) in self.named:
                            self.problems.append(f"{path}::{name} is taken twice")
                        self.named[path, name.strip()] = new
                elif path in self.whole:
                    self.problems.append(f"{path} is taken twice")
                else:
                    self.whole[path] = new
        self.old_paths = set(self.whole) | {path for path, _ in self.named}
        self.sources = {path: read(path) for path in sorted(self.old_paths)}
        self.old_modules = {dotted(path): path for path in self.old_paths}
        for path, source in self.sources.items():
            own = {name for segment in source.segments for name in segment.names}
            for old, name in self.named:
                if old == path and name not in own:
                    self.problems.append(f"{path} defines no {name}")
            if path not in self.whole:
                lost = {n for s in source.segments for n in s.names if (path, n) not in self.named}
                if lost:
                    self.problems.append(f"{path}: {sorted(lost)} go nowhere")
        # Every module of the product, for telling modules from names.
        self.modules = set()
        for file in tracked():
            name = file.relative_to(ROOT).as_posix()
            if name.endswith(".py") and name.split("/")[0] in PACKAGES:
                self.modules.add(dotted(name))

    def new_path(self, old: str, name: str | None) -> str:
        """Where a top-level name of an old file is now; the file's own place if it is not split off."""
        if name is not None and (old, name) in self.named:
            return self.named[old, name]
        if old in self.whole:
            return self.whole[old]
        return next(new for (path, _), new in self.named.items() if path == old)

    def resolve(self, binding: Binding) -> tuple[str, str | None, str]:
        """(module, name, what kind) of an import now: "name", "module" or "same"."""
        if binding.name is not None:
            full = f"{binding.module}.{binding.name}"
            if full in self.old_modules:
                return full, None, "module"
            if binding.module in self.old_modules:
                old = self.old_modules[binding.module]
                source = self.sources[old]
                if not old.endswith("__init__.py") and not any(binding.name in s.names for s in source.segments):
                    for other in source.imports:  # a name that the old module itself imported
                        if other.local == binding.name and other.name is not None:
                            module, name, kind = self.resolve(other)
                            return module, name, "name" if kind == "same" else kind
                return dotted(self.new_path(old, binding.name)), binding.name, "name"
        elif binding.module in self.old_modules:
            return binding.module, None, "module"
        return binding.module, binding.name, "same"


def names_bound_anywhere(tree: ast.AST) -> set[str]:
    """Names that a file binds other than by importing them."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            found.add(node.id)
        elif isinstance(node, ast.arg):
            found.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
    return found


def replace_tokens(text: str, change) -> str:  # type: ignore[no-untyped-def]
    """Replace tokens in `text`: `change(tokens, index)` returns (number of tokens, new text) or None."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    edits = []
    index = 0
    while index < len(tokens):
        made = change(tokens, index)
        if made is None:
            index += 1
            continue
        count, new = made
        first, last = tokens[index], tokens[index + count - 1]
        edits.append((starts[first.start[0] - 1] + first.start[1], starts[last.end[0] - 1] + last.end[1], new))
        index += count
    for begin, end, new in reversed(edits):
        text = text[:begin] + new + text[end:]
    return text


def rewrite_module_object(
    text: str, local: str, attributes: dict[str, str], new_local: str | None, problems: list[str], where: str
) -> str:
    """`local.name` for a module object `local` becomes `new_local.name`, or `name` where new_local is None (same file)."""

    def change(tokens, i):  # type: ignore[no-untyped-def]
        token = tokens[i]
        if token.type == tokenize.STRING and re.match(r"^[rRbB]*[fF]", token.string):
            pattern = rf"(?<![\w.]){re.escape(local)}\.(?=\w)"
            new = re.sub(pattern, f"{new_local}." if new_local else "", token.string)
            return (1, new) if new != token.string else None
        if token.type != tokenize.NAME or token.string != local:
            return None
        if i and tokens[i - 1].string == ".":
            return None
        following = tokens[i + 1].string if i + 1 < len(tokens) else ""
        if new_local is None:
            if following == ".":
                return 2, ""
            problems.append(
                f"{where}: module object {local} is used bare in a file it was merged into (line {token.start[0]})"
            )
            return None
        if following == "=" and tokens[i - 1].string in ("(", ","):
            return None  # a keyword argument
        return 1, new_local

    return replace_tokens(text, change)


def import_lines(bindings: list[Binding]) -> tuple[str, str]:
    """The import statements, at run time and for types alone."""
    out = {False: [], True: []}
    real = {(b.module, b.name, b.local) for b in bindings if not b.typing_only}
    grouped: dict[tuple[bool, str], list[str]] = defaultdict(list)
    for b in bindings:
        if b.typing_only and (b.module, b.name, b.local) in real:
            continue
        if b.name is None:
            line = f"import {b.module}" + (f" as {b.local}" if b.local != b.module else "")
            if line not in out[b.typing_only]:
                out[b.typing_only].append(line)
        else:
            item = b.name + (f" as {b.local}" if b.local != b.name else "")
            if item not in grouped[b.typing_only, b.module]:
                grouped[b.typing_only, b.module].append(item)
    for (typing_only, module), items in grouped.items():
        out[typing_only].append(
            f"from {module} import ({', '.join(items)})" if len(items) > 1 else f"from {module} import {items[0]}"
        )
    return "\n".join(out[False]), "\n".join("    " + line for line in out[True])


class Mover:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.problems = plan.problems

    # -- a binding of a module object -------------------------------------------------------------------------

    def place_module_object(
        self, text: str, binding: Binding, here: str | None, where: str, own: frozenset[str] = frozenset()
    ) -> tuple[str, list[Binding]]:
        """Rewrite the uses of an imported module object in `text`; the imports that take its place."""
        plan = self.plan
        full = binding.module if binding.name is None else f"{binding.module}.{binding.name}"
        old = plan.old_modules[full]
        local = binding.local
        pattern = re.compile(
            rf"(?<![\w.]){re.escape(local)}\.(\w+)|\b(?:setattr|getattr|delattr|hasattr|object)\(\s*{re.escape(local)},\s*[\"'](\w+)"
        )
        attributes = {a or b for a, b in pattern.findall(text)}
        homes = {plan.new_path(old, name) for name in attributes} or {plan.new_path(old, None)}
        own_names = {n for s in plan.sources[old].segments for n in s.names}
        for name in attributes:
            if name not in own_names:
                # Something the old module imported: found where the module went, if that still imports it.
                pass
        if len(homes) > 1:
            new_text = text
            bindings = []
            for home in sorted(homes):
                base = dotted(home).rsplit(".", 1)[1]
                mine = {name for name in attributes if plan.new_path(old, name) == home}
                alias = base if home != here else None
                for name in mine:
                    new_text = re.sub(
                        rf"(?<![\w.]){re.escape(local)}\.{name}\b", f"{alias}.{name}" if alias else name, new_text
                    )
                    new_text = re.sub(
                        rf"(\b(?:setattr|getattr|delattr|hasattr|object)\(\s*){re.escape(local)}(,\s*[\"']{name}[\"'])",
                        rf"\g<1>{alias}\g<2>",
                        new_text,
                    )
                if alias:
                    parent, name = dotted(home).rsplit(".", 1)
                    bindings.append(Binding(parent, name, alias, binding.typing_only))
            self.problems.append(f"note: {where}: {full} was split over {sorted(homes)}; check the uses of {local}")
            return new_text, bindings
        home = homes.pop()
        if home == here:
            return rewrite_module_object(text, local, {}, None, self.problems, where), []
        new_module = dotted(home)
        if new_module == full:
            return text, [binding]
        if binding.name is None:  # import windlass.a.b [as x]
            if local == full:
                return text.replace(full + ".", new_module + "."), [
                    Binding(new_module, None, new_module, binding.typing_only)
                ]
            return text, [Binding(new_module, None, local, binding.typing_only)]
        parent, name = new_module.rsplit(".", 1)
        if local != binding.name:  # an alias of its own stays
            return text, [Binding(parent, name, local, binding.typing_only)]
        if name == local:
            return text, [Binding(parent, name, name, binding.typing_only)]
        tree = ast.parse(text)
        taken = names_bound_anywhere(tree) | set(dir(builtins)) | own
        imported = {
            a.asname or a.name
            for n in ast.walk(tree)
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
            if (getattr(n, "module", None), a.name, a.asname) != (parent, name, None)
        }
        if local in names_bound_anywhere(tree) or name in taken or name in imported:
            return text, [Binding(parent, name, local, binding.typing_only)]
        return rewrite_module_object(text, local, {}, name, self.problems, where), [
            Binding(parent, name, name, binding.typing_only)
        ]

    # -- imports anywhere in a file ---------------------------------------------------------------------------

    def rewrite_imports(self, text: str, here: str | None, where: str) -> str:
        """Every import statement in `text` that names an old module, with the uses of module objects.

        Statements are rewritten once each, from the last to the first: a new module may have the name of an old one.
        """
        tree = ast.parse(text)
        nodes = [
            n for n in ast.walk(tree) if isinstance(n, ast.Import) or (isinstance(n, ast.ImportFrom) and n.level == 0)
        ]
        for node in sorted(nodes, key=lambda n: -n.lineno):
            bindings = bindings_of(node, False)
            resolved = [(b, *self.plan.resolve(b)) for b in bindings]
            if all(kind == "same" for *_, kind in resolved):
                continue
            lines = text.splitlines(keepends=True)
            first, last = node.lineno - 1, node.end_lineno or node.lineno
            indent = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
            # Blank lines keep the numbers of the lines above and below.
            marker = "__imports_go_here__"
            text = "".join(lines[:first]) + indent + marker + "\n" * (last - first) + "".join(lines[last:])
            new: list[Binding] = []
            for b, module, name, kind in resolved:
                if kind == "module":
                    text, made = self.place_module_object(text, b, here, where)
                    new += made
                elif here is not None and module == dotted(here) and kind == "name":
                    if b.local != b.name:
                        self.problems.append(f"{where}: {b.name} as {b.local} is imported from the file itself")
                else:
                    new.append(Binding(module, name, b.local, False))
            body, _ = import_lines(new)
            if body:
                stated = ("\n" + indent).join(body.splitlines())
            else:
                parent = next(
                    p for p in ast.walk(tree) if node in getattr(p, "body", []) or node in getattr(p, "orelse", [])
                )
                block = parent.body if node in parent.body else parent.orelse  # type: ignore[attr-defined]
                stated = "pass" if len(block) == 1 else ""
            text = text.replace(marker, stated, 1)
        return text

    # -- new files ---------------------------------------------------------------------------------------------

    def compose(self, new: str) -> str:
        plan = self.plan
        entry = plan.table[new]
        segments: list[Segment] = []
        paths: list[str] = []
        for one in entry["from"]:
            path, _, names = one.partition("::")
            source = plan.sources[path]
            if path not in paths:
                paths.append(path)
            wanted = {name.strip() for name in names.split(",")} if names else None
            for segment in source.segments:
                homes = {plan.named[path, n] for n in segment.names if (path, n) in plan.named}
                if wanted is None:
                    if not homes:
                        segments.append(segment)
                elif wanted & set(segment.names):
                    if len(homes) > 1:
                        self.problems.append(f"{path}: {segment.names} is one statement but goes to {sorted(homes)}")
                    segments.append(segment)
        # The same text twice (a logger, a type variable) once.
        seen: dict[str, str] = {}
        unique = []
        for segment in segments:
            code = ast.unparse(segment.node)
            if segment.names and not isinstance(segment.node, (ast.ClassDef, ast.FunctionDef)) and code in seen:
                continue
            if (
                isinstance(segment.node, (ast.FunctionDef, ast.ClassDef))
                and code in seen
                and seen[code] != segment.module
            ):
                self.problems.append(f"note: {new}: {segment.names} stands twice word for word; one is left out")
                continue
            seen[code] = segment.module
            unique.append(segment)
        homes_of: dict[str, set[str]] = defaultdict(set)
        for segment in unique:
            for name in segment.names:
                homes_of[name].add(segment.module)
        for name, where in homes_of.items():
            if len(where) > 1:
                self.problems.append(f"{new}: {name} is defined in {sorted(where)}")
        future = entry.get("future_annotations", True)
        ordered = in_order(unique, annotations=not future)
        # Imports of the old files that these segments use.
        own = set(homes_of)
        bindings: list[Binding] = []
        by_path: dict[str, list[Segment]] = defaultdict(list)
        for segment in ordered:
            by_path[segment.module].append(segment)
        texts: dict[int, str] = {
            id(s): self.rewrite_imports(self.rewrite_text(s.text, code=True), new, f"{new} ({s.module})")
            for s in ordered
        }
        local_to: dict[str, tuple] = {}
        for path in paths:
            source = plan.sources[path]
            whole = {s.module for s in ordered}
            if path not in whole:
                continue
            used = set().union(*(used_names(s.node) for s in by_path[path]))
            # What the old file defined and now is in another file.
            for name in sorted({name for s in source.segments for name in s.names} & used - own):
                bindings.append(Binding(dotted(plan.new_path(path, name)), name, name, False))
            for b in source.imports:
                root = b.local.split(".")[0]
                if root not in used and not path.endswith("__init__.py"):
                    continue
                module, name, kind = plan.resolve(b)
                if kind == "module":
                    for s in by_path[path]:
                        text, made = self.place_module_object(texts[id(s)], b, new, f"{new} ({path})", frozenset(own))
                        if root in used_names(s.node):
                            texts[id(s)] = text
                            bindings += made
                    continue
                if kind == "name" and module == dotted(new):
                    if b.local != b.name:
                        for s in by_path[path]:
                            texts[id(s)] = replace_tokens(
                                texts[id(s)],
                                lambda t, i, b=b: (
                                    (1, b.name)
                                    if t[i].type == tokenize.NAME
                                    and t[i].string == b.local
                                    and (i == 0 or t[i - 1].string != ".")
                                    else None
                                ),
                            )
                    continue
                made_binding = Binding(module, name, b.local, b.typing_only)
                if b.local in own:
                    if b.module == "collections.abc":
                        for s in by_path[path]:
                            texts[id(s)] = replace_tokens(
                                texts[id(s)],
                                lambda t, i, b=b: (
                                    (1, f"abc.{b.name}")
                                    if t[i].type == tokenize.NAME
                                    and t[i].string == b.local
                                    and (i == 0 or t[i - 1].string != ".")
                                    else None
                                ),
                            )
                        bindings.append(Binding("collections", "abc", "abc", b.typing_only))
                        continue
                    self.problems.append(f"{new}: {b.local} is imported by {path} from {b.module} and defined here")
                known = local_to.setdefault(b.local, (module, name, path))
                if known[:2] != (module, name):
                    self.problems.append(
                        f"{new}: {b.local} is {known[0]}.{known[1]} in {known[2]} and {module}.{name} in {path}"
                    )
                bindings.append(made_binding)
        for module_use in ("abc",):
            if any(b.local == module_use and b.module == "collections" for b in bindings) and module_use in own:
                self.problems.append(f"{new}: abc is taken")
        doc = entry.get("doc")
        if doc is None:
            doc_text = plan.sources[paths[0]].doc_text
        else:
            doc_text = f'"""{doc.strip()}\n"""\n' if "\n" in doc.strip() else f'"""{doc.strip()}"""\n'
        if not future:
            bindings = [Binding(b.module, b.name, b.local, False) for b in bindings]
        runtime, typing = import_lines(bindings)
        if typing and "TYPE_CHECKING" not in {b.local for b in bindings}:
            runtime += "\nfrom typing import TYPE_CHECKING"
        head = doc_text + ("\nfrom __future__ import annotations\n\n" if future else "\n") + runtime + "\n\n"
        if typing:
            head += "if TYPE_CHECKING:\n" + typing + "\n\n"
        body = ""
        for s in ordered:
            text = texts[id(s)]
            gap = "\n\n" if isinstance(s.node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) else "\n"
            body += gap + text
        return head + body

    # -- text --------------------------------------------------------------------------------------------------

    def rewrite_text(self, text: str, *, code: bool = False) -> str:
        """Dotted and slashed names of old modules in strings, comments and documentation. code: imports are left alone."""
        plan = self.plan

        def one_dotted(match: re.Match[str]) -> str:
            parts = match.group(0).split(".")
            for count in range(len(parts), 1, -1):
                full = ".".join(parts[:count])
                if full in plan.old_modules:
                    old = plan.old_modules[full]
                    name = parts[count] if count < len(parts) else None
                    return ".".join([dotted(plan.new_path(old, name)), *parts[count:]])
                if full in plan.modules and not any(m.startswith(full + ".") for m in plan.old_modules):
                    return match.group(0)
            return match.group(0)

        def one_path(match: re.Match[str]) -> str:
            path = match.group(0)
            return plan.new_path(path, None) if path in plan.old_paths else path

        if code:
            lines = text.splitlines(keepends=True)
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, (ast.Import, ast.ImportFrom)):
                    for index in range(node.lineno - 1, node.end_lineno or node.lineno):
                        lines[index] = lines[index].replace("windlass.", "windlass\0.")
            text = self.rewrite_text("".join(lines))
            return text.replace("windlass\0.", "windlass.")
        text = re.sub(r"\bwindlass(?:\.\w+)+", one_dotted, text)
        return re.sub(r"\b(?:server|engine|kernels|clients)/[\w/]+\.py\b", one_path, text)

    # -- all of it ---------------------------------------------------------------------------------------------

    def run(self, dry: bool) -> None:
        plan = self.plan
        made = {new: self.compose(new) for new in plan.table}
        for new, text in made.items():
            try:
                compile(text, new, "exec")
            except SyntaxError as error:
                self.problems.append(f"{new}: {error}")
        others: dict[Path, str] = {}
        for file in tracked():
            name = file.relative_to(ROOT).as_posix()
            if (
                name in plan.old_paths
                or file.suffix
                not in (".py", ".md", ".toml", ".yml", ".yaml", ".json", ".sh", ".mjs", ".j2", ".h", ".cpp", ".in", "")
                or file.stat().st_size > 2_000_000
            ):
                continue
            try:
                text = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue
            new_text = text
            if "results/" not in name and file.suffix != ".json":
                new_text = self.rewrite_text(text, code=file.suffix == ".py")
            if file.suffix == ".py" and "windlass" in text:
                new_text = self.rewrite_imports(new_text, None, name)
            if new_text != text:
                others[file] = new_text
        hard = [p for p in self.problems if not p.startswith("note:")]
        for problem in self.problems:
            print("PROBLEM" if problem in hard else "", problem)
        print(
            f"{len(plan.old_paths)} files become {len(plan.table)}; {len(others)} others change; {len(hard)} problems"
        )
        if dry or (hard and "--force" not in sys.argv):
            return
        for old in plan.old_paths:
            if old not in made:
                (ROOT / old).unlink()
        for new, text in made.items():
            target = ROOT / new
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            folder = target.parent
            while folder != ROOT and folder.relative_to(ROOT).parts[0] in PACKAGES:
                init = folder / "__init__.py"
                if not init.exists():
                    init.write_text(f'"""{folder.name.replace("_", " ").capitalize()}."""\n', encoding="utf-8")
                folder = folder.parent
        for file, text in others.items():
            file.write_text(text, encoding="utf-8")
        # Folders that hold nothing but an __init__.py go.
        for old in sorted({str(Path(path).parent) for path in plan.old_paths}, key=lambda p: -p.count("/")):
            folder = ROOT / old
            rest = (
                [p for p in folder.iterdir() if p.name not in ("__pycache__", "__init__.py")] if folder.is_dir() else []
            )
            init = folder / "__init__.py"
            if (
                folder.is_dir()
                and not rest
                and "/" in old
                and init.is_file()
                and len(init.read_text().splitlines()) <= 5
            ):
                init.unlink()
        subprocess.run(["git", "-C", str(ROOT), "add", "-A"], check=True)


def main() -> None:
    args = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    path = Path(args[0]) if args else ROOT / "tools" / "migration" / "modules.json"
    Mover(Plan(json.loads(path.read_text(encoding="utf-8")))).run("--dry-run" in sys.argv)


if __name__ == "__main__":
    main()
