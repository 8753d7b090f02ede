"""Style check: phrases that documentation, comments, docstrings, help texts and messages avoid, with a replacement for each.

    python tools/docs/style.py [FILE ...]

Prints `file:line: phrase -> replacement` for each occurrence and exits with 1 if there is one. Without arguments all tracked
files are checked. Code is not: fenced blocks, text in backquotes, identifiers, and in tests every string that is not a docstring.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Regular expressions, without regard to case. A space matches any white space.
PHRASES = {
    r"tells?|told|telling": "report, show, distinguish",
    r"says?|said|saying": "state, report, return",
    r"whoever|whomever": "any client, the user who",
    r"nobody": "no client, no one",
    r"somebody": "a client, another user",
    r"shall": "must, will",
    r"anew": "again",
    r"besides?": "next to, in addition to",
    r"likewise": "also, in the same way",
    r"spelt": "spelled",
    r"likeliest": "most likely",
    r"(?:looks?|looked)(?! up\b| it up\b| them up\b|-)": "inspect, appear, search",
    r"stands?|stood": "is, appears, means",
    r"rooms?": "space, memory",
    r"lies|lain": "is, is stored",
    r"mends?|mended": "repair, correct",
    r"comes? to|came to": "amounts to, reaches",
    r"go on|goes on|going on|went on": "continue",
    r"knows? nothing of": "does not depend on",
    r"so many": "that many",
    r"what becomes of": "the result of",
    r"what (?:it|they|an?|the|one|each|all) (?:[a-z]+ ){0,3}takes?": "the cost of, the requirements of",
    r"(?<!there\s)is no (?!longer|more|less|need|way|other|such)\w+": "is not a",
    r"the whole of": "all of, the entire",
    r"of its own accord": "automatically",
}

# Files whose text is data or quoted from elsewhere.
EXEMPT = (
    "CHANGELOG.md",
    "LICENSE",
    "NOTICE",
    "benchmarks/lm_eval/",
    "benchmarks/results/",
    "models/",
    "requirements.lock",
    "tools/docs/style.py",
    "tests/docs/test_style.py",
)

# Phrases in sample texts and word lists.
SAMPLES = {
    ("clients/loadtest/workload.py", "said"),
    ("lab/retrieval_documents.py", "said"),
    ("lab/retrieval_documents.py", "told"),
    ("tools/demo_model/evaluate.py", "came to"),
    ("tools/demo_model/evaluate.py", "tell"),
    ("tools/docs/make_page_pictures.py", "told"),
}

_SUFFIXES = {".md": "markdown", ".py": "python", ".h": "c", ".cpp": "c", ".js": "c", ".mjs": "c"}
_SUFFIXES |= dict.fromkeys((".toml", ".yml", ".yaml", ".sh", ".conf", ".txt"), "hash")
_NAMES = {"Makefile": "hash", "Dockerfile": "hash", "run": "hash"}

_ALTERNATIVES = (f"(?P<p{at}>{phrase.replace(' ', chr(92) + 's+')})" for at, phrase in enumerate(PHRASES))
_PATTERN = re.compile(rf"\b(?:{'|'.join(_ALTERNATIVES)})\b", re.IGNORECASE)
_REPLACEMENTS = list(PHRASES.values())
_MIN_PROSE = 25  # characters of a string that may be prose


def blanked(text: str, pattern: str) -> str:
    """`text` with every match of `pattern` replaced by spaces, line breaks excepted."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.MULTILINE | re.DOTALL)


def without_code(text: str) -> str:
    """Text without quoted code and addresses."""
    return blanked(text, r"``.+?``|`[^`\n]*`|\]\([^)\s]+\)|https?://\S+")


def markdown_prose(text: str) -> Iterator[tuple[int, str]]:
    text = blanked(text, r"^( *)(```|~~~).*?^\1\2")
    yield 1, blanked(text, r"<!--.*?-->")


def python_prose(text: str, *, strings: bool) -> Iterator[tuple[int, str]]:
    """Comments and docstrings, and with `strings` every other string that may be prose."""
    outer = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}
    middle = getattr(tokenize, "FSTRING_MIDDLE", None)  # Python 3.12
    previous = tokenize.ENCODING
    depth = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        in_fstring = token.type == middle and strings and len(token.string) > _MIN_PROSE
        if token.type == tokenize.COMMENT or in_fstring:
            yield token.start[0], token.string
        elif token.type == tokenize.STRING:
            docstring = previous in outer and depth == 0
            if docstring or (strings and len(token.string) > _MIN_PROSE):
                prefix = re.match(r"\w*", token.string)[0].lower()  # type: ignore[index]
                yield token.start[0], blanked(token.string, r"\{[^{}]*\}") if "f" in prefix else token.string
        if token.type == tokenize.OP:
            depth += (token.string in "([{") - (token.string in ")]}")
        previous = token.type


def c_prose(text: str) -> Iterator[tuple[int, str]]:
    for match in re.finditer(r"(?<![:\"'])//[^\n]*|/\*.*?\*/", text, re.DOTALL):
        yield text.count("\n", 0, match.start()) + 1, match[0]


def hash_prose(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        comment = re.search(r"(?:^|\s)#.*|@?echo \".*", line)
        if comment:
            yield number, comment[0]


def prose_of(name: str, text: str) -> Iterator[tuple[int, str]]:
    """(first line, text) of every piece of prose in a file."""
    kind = _NAMES.get(Path(name).name) or _SUFFIXES.get(Path(name).suffix)
    if kind == "markdown":
        yield from markdown_prose(text)
    elif kind == "python":
        yield from python_prose(text, strings=not name.startswith("tests/"))
    elif kind == "c":
        yield from c_prose(text)
    elif kind == "hash":
        yield from hash_prose(text)


def findings(name: str, text: str) -> list[str]:
    """`file:line: phrase -> replacement` for every phrase in a file. name: relative to the repository."""
    found = []
    for first, prose in prose_of(name, text):
        prose = without_code(prose)
        for match in _PATTERN.finditer(prose):
            line = first + prose.count("\n", 0, match.start())
            phrase = " ".join(match[0].split())
            if (name, phrase.lower()) in SAMPLES:
                continue
            replacement = _REPLACEMENTS[int(match.lastgroup[1:])]  # type: ignore[index]
            found.append(f"{name}:{line}: {phrase} -> {replacement}")
    return found


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.splitlines() if not name.startswith(EXEMPT) and not (ROOT / name).is_symlink()]


def main(names: Sequence[str]) -> int:
    names = [str(Path(name).resolve().relative_to(ROOT)) for name in names] or tracked()
    found = []
    for name in names:
        if Path(name).name in _NAMES or Path(name).suffix in _SUFFIXES:
            found += findings(name, (ROOT / name).read_text(encoding="utf-8", errors="replace"))
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
