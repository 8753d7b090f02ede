"""Rename identifiers across the repository.

    python tools/migration/rename.py [TABLE.json] [--dry-run]

The table is a list of {"old", "new", "scope"}: scope "global" covers every Python, C++ and Markdown file, a list covers the
named files and what imports these names from them; {"file", "pattern", "new"} is a regular expression for one file, applied
last. Python is rewritten token by token, also inside f-strings; strings where they are the old name and nothing else; comments,
docstrings and Markdown where the name cannot be an ordinary word. Running it again changes nothing.
"""

from __future__ import annotations

import ast
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FSTRING = re.compile(r"^[rRbB]*[fF][rRbB]*('''|\"\"\"|'|\")")
WORD = re.compile(r"[A-Za-z_]\w*")
# Names of modules stay: moving them is move.py's work.
PROSE = re.compile(r"\bwindlass(?:\.\w+)+|\b[\w./-]+/[\w./-]*|[A-Za-z_]\w*(?:\.(?:py|md|h|cpp|json|toml)\b)?")


def tracked() -> list[Path]:
    """The repository's own text files; links and migration tables are left out."""
    names = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    paths = [ROOT / name for name in names if not name.startswith("tools/migration/")]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def is_distinctive(name: str) -> bool:
    """Whether a name in prose can only be the identifier: snake_case, _private or CamelCase."""
    return "_" in name.strip("_") or name.startswith("_") or bool(re.search(r"[a-z][A-Z]", name))


def rename_words(text: str, table: dict[str, str]) -> str:
    return WORD.sub(lambda match: table.get(match.group(0), match.group(0)), text)


def module_length(parts: list[str]) -> int:
    """How many parts of a dotted name, from the first one on, name a module or package of the repository."""
    path = ROOT
    for count, part in enumerate(parts[1:], 1):
        path = path / part
        if not path.is_dir() and not path.with_suffix(".py").is_file():
            return count
    return len(parts)


def rename_prose(text: str, table: dict[str, str]) -> str:
    def one(match: re.Match[str]) -> str:
        old = match.group(0)
        if old.startswith("windlass."):
            parts = old.split(".")
            count = module_length(parts)
            return ".".join([*parts[:count], *(table.get(part, part) for part in parts[count:])])
        if "/" in old or "." in old:
            return old
        if old not in table:
            return old
        quoted = text[max(0, match.start() - 1) : match.start()] == "`" or text[match.end() : match.end() + 1] == "`"
        return table[old] if is_distinctive(old) or quoted else old

    return PROSE.sub(one, text)


def rename_fstring(token: str, table: dict[str, str]) -> str:
    """The expressions of an f-string, renamed; its text stays."""
    out, i, depth, start = [], 0, 0, 0
    opening = FSTRING.match(token)
    assert opening
    i = start = opening.end()
    out.append(token[:start])
    end = len(token) - len(opening.group(1))
    while i < end:
        if depth == 0 and token[i : i + 2] in ("{{", "}}"):
            out.append(token[i : i + 2])
            i += 2
        elif token[i] == "{":
            close = i + 1
            level, quote = 1, ""
            while close < end and level:
                char = token[close]
                if quote:
                    quote = "" if char == quote else quote
                elif char in "'\"":
                    quote = char
                else:
                    level += (char in "{[(") - (char in "}])")
                close += 1
            out.append("{" + rename_fragment(token[i + 1 : close - 1], table) + "}")
            i = close
        else:
            out.append(token[i])
            i += 1
    out.append(token[end:])
    return "".join(out)


def rename_fragment(source: str, table: dict[str, str]) -> str:
    """An expression within an f-string."""
    pieces = re.split(r"(\"[^\"]*\"|'[^']*')", source)
    return "".join(piece if piece[:1] in ("'", '"') else rename_words(piece, table) for piece in pieces)


def fits(only: str | None, before: str, after: str) -> bool:
    """Whether a token may be renamed under a restriction: an attribute or definition, a call or definition, no attribute."""
    if only == "attribute-or-def":
        return before in (".", "def", "class")
    if only == "call-or-def":
        return before == "def" or (before == "." and after == "(")
    if only == "not-attribute":
        return before != "."
    return True


def rename_code(
    source: str,
    table: dict[str, str],
    *,
    only: dict[str, str] | None = None,
    aliases: dict[str, dict[str, str]] | None = None,
) -> str:
    """Python source, renamed.

    only: restrictions by old name (see `fits`). aliases: for local names of module objects, the renames of what follows the dot.
    """
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    edits: list[tuple[int, int, str]] = []
    in_path = False  # between `from` and `import`
    begins = True  # a statement
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    only, aliases = only or {}, aliases or {}
    lists_names = False  # in a statement such as `__slots__ = ...`
    for index, token in enumerate(tokens):
        if begins:
            lists_names = token.string in ("__all__", "__slots__")
        before = tokens[index - 1].string if index else ""
        after = tokens[index + 1].string if index + 1 < len(tokens) else ""
        begin = starts[token.start[0] - 1] + token.start[1]
        finish = starts[token.end[0] - 1] + token.end[1]
        new = token.string
        if token.type == tokenize.NAME and begins and token.string in ("from", "import"):
            in_path = True
        elif token.type == tokenize.NAME and token.string in ("import", "as"):
            in_path = False
        if token.type == tokenize.NEWLINE:
            in_path = False
        if token.type == tokenize.NAME and not in_path:
            owner = (
                tokens[index - 2].string
                if before == "." and index > 1 and (index < 3 or tokens[index - 3].string != ".")
                else ""
            )
            if owner in aliases and token.string in aliases[owner]:
                new = aliases[owner][token.string]
            elif fits(only.get(token.string), before, after):
                new = table.get(token.string, token.string)
        elif token.type == tokenize.COMMENT:
            new = rename_prose(token.string, table)
        elif token.type == tokenize.STRING:
            content = re.sub(r"^[rRbBuU]*(['\"]{3}|['\"])|(['\"]{3}|['\"])$", "", token.string)
            if FSTRING.match(token.string):
                new = rename_fstring(token.string, table)
            elif content in table and (is_distinctive(content) or lists_names):
                new = token.string.replace(content, table[content])
            elif before == "(" and index > 1 and tokens[index - 2].string == "parametrize":
                new = rename_words(token.string, table)
            elif " " in content or "\n" in content:
                new = rename_prose(token.string, table)
        if new != token.string:
            edits.append((begin, finish, new))
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for begin, finish, new in reversed(edits):
        source = source[:begin] + new + source[finish:]
    return source


def module_objects(source: str) -> dict[str, str]:
    """Local names of imported modules of the repository: name -> old path."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "windlass":
            for alias in node.names:
                path = "/".join([*node.module.split(".")[1:], alias.name])
                if (ROOT / f"{path}.py").is_file():
                    found[alias.asname or alias.name] = f"{path}.py"
                elif (ROOT / path).is_dir():
                    found[alias.asname or alias.name] = f"{path}/__init__.py"
    return found


@functools.cache
def defined_in(name: str) -> frozenset[str]:
    """What a Python file defines at its top."""
    file = ROOT / name
    if file.suffix != ".py" or not file.is_file():
        return frozenset()
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names} if name.endswith("__init__.py") else set()
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return frozenset(found)


def imported_from(source: str) -> set[tuple[str, str]]:
    """(path, name) of what is imported by name."""

    def home(module: str) -> str:
        path = "/".join(module.split(".")[1:])
        return f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"

    return {
        (home(node.module), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "windlass"
        for alias in node.names
    }


def main() -> None:
    args = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    path = Path(args[0]) if args else ROOT / "tools" / "migration" / "renames.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    patterns = [e for e in entries if "pattern" in e]
    entries = [e for e in entries if "pattern" not in e]
    everywhere = {e["old"]: e["new"] for e in entries if e["scope"] == "global"}
    restricted = {e["old"]: e["only"] for e in entries if e["scope"] == "global" and "only" in e}
    local: dict[str, dict[str, str]] = {}
    local_only: dict[str, dict[str, str]] = {}
    qualified: dict[str, dict[str, str]] = {}  # defining file -> renames that uses elsewhere follow
    for entry in entries:
        for name in [*(entry["scope"] if entry["scope"] != "global" else ()), *entry.get("c", ())]:
            known = local.setdefault(name, {}).setdefault(entry["old"], entry["new"])
            if known != entry["new"]:
                print(f"CONFLICT {name}: {entry['old']} -> {known} and {entry['new']}")
            if "only" in entry:
                local_only.setdefault(name, {})[entry["old"]] = entry["only"]
            if entry["old"] in defined_in(name):
                qualified.setdefault(name, {})[entry["old"]] = entry["new"]
    missing = sorted(name for name in local if not (ROOT / name).is_file())
    if missing:
        print("no such file:", *missing)
    changed = 0
    for file in tracked():
        name = file.relative_to(ROOT).as_posix()
        if file.suffix not in (".py", ".md", ".h", ".cpp"):
            continue
        source = file.read_text(encoding="utf-8")
        table = everywhere | local.get(name, {})
        words = set(WORD.findall(source))
        aliases: dict[str, dict[str, str]] = {}
        imported: dict[str, str] = {}
        if file.suffix == ".py":
            objects = module_objects(source)
            aliases = {alias: qualified[home] for alias, home in objects.items() if home in qualified}
            for home, one in imported_from(source):
                if one in qualified.get(home, {}) and one not in local.get(name, {}):
                    table[one] = qualified[home][one]
                    imported[one] = "not-attribute"
            for alias in objects:
                if alias in table:
                    print(f"{name}: {alias} is a module object; not renamed to {table.pop(alias)}")
        if not aliases and not any(word in table for word in words):
            continue
        for old, new in table.items():
            if "--check" in sys.argv and old in words and new in words and new not in table and file.suffix == ".py":
                names = re.findall(rf"(?<![\w\"'`]){new}\b(?![\"'`])", source)
                if names:
                    print(f"TAKEN {name}: {old} -> {new}")
        if file.suffix == ".py":
            new_text = rename_code(
                source, table, only=restricted | local_only.get(name, {}) | imported, aliases=aliases
            )
        elif file.suffix == ".md":
            new_text = rename_prose(source, table)
        else:  # C++
            wanted = {old: to for old, to in table.items() if is_distinctive(old) or old in local.get(name, {})}
            new_text = rename_words(source, wanted)
        if new_text != source:
            changed += 1
            if "--dry-run" not in sys.argv:
                file.write_text(new_text, encoding="utf-8")
    for entry in patterns:
        if (ROOT / entry["file"]).is_file() and "--dry-run" not in sys.argv:
            file = ROOT / entry["file"]
            file.write_text(re.sub(entry["pattern"], entry["new"], file.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"{len(entries)} renames, {changed} files changed")


if __name__ == "__main__":
    main()
