"""Hooks of `mkdocs build`: add pages from outside docs/ to the site, and rewrite links to files outside docs/.

Links in the pages are written for a git host.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    "README.md": "readme.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "repeat-benchmarks.md",
    "models/demo/README.md": "models-demo.md",
}
FILES = "files"  # folder of the site with copies of other linked files
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FOLDER = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\)")  # possible links to folders, which a site does not list
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Add pages from outside docs/, and a copy of each linked file outside docs/."""
    for source, target in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, target, content=rewritten(text, source, target)))
    for linked in sorted(outside_files()):
        files.append(File.generated(config, f"{FILES}/{linked}", abs_src_path=str(ROOT / linked)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    if page.file.generated_by:
        return markdown
    return rewritten(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def rewritten(text: str, source: str, target: str) -> str:
    """The text of file `source` (relative to the repository) with links for `target` (relative to the site)."""

    def lead(match: re.Match[str]) -> str:
        return match[1] + new_link(match[2], source, target) + match[3]

    def name(match: re.Match[str]) -> str:
        return match[1] if (ROOT / resolved(match[2], source)).is_dir() else match[0]

    parts = FENCE.split(text)
    return "".join(part if FENCE.match(part) else LINK.sub(lead, FOLDER.sub(name, part)) for part in parts)


def resolved(link: str, source: str) -> str:
    """The target of a link, relative to the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), link))


def new_link(link: str, source: str, target: str) -> str:
    path = resolved(link, source)
    if path in PAGES:
        place = PAGES[path]
    elif path.startswith("docs/"):
        place = path.removeprefix("docs/")
    else:
        place = f"{FILES}/{path}"
    return posixpath.relpath(place, posixpath.dirname(target) or ".")


def outside_files() -> set[str]:
    found = set()
    sources = [*PAGES, *(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    for source in sources:
        text = FENCE.sub("", (ROOT / source).read_text(encoding="utf-8"))
        for _, link, _ in LINK.findall(text):
            path = resolved(link, source)
            if path not in PAGES and not path.startswith("docs/") and (ROOT / path).is_file():
                found.add(path)
    return found
