"""What `mkdocs build` does beside rendering docs/: pages that lie elsewhere in the repository join the site, and links to
them and to other files outside docs/ lead there.

On a git host the same links work as they stand, so pages are written for that and changed here only.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "models/demo/README.md": "models-demo.md"}
FILES = "files"  # the site's folder with copies of other files that pages link to
LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")
FOLDER = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)\)")  # a link that may lead to one, which a site does not list
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig, **_: Any) -> Files:
    """Pages from elsewhere, and a copy of each file outside docs/ that a page links to."""
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
    """text: of the file `source` (from the root), to stand at `target` (from the site's top)."""

    def lead(match: re.Match[str]) -> str:
        return match[1] + new_link(match[2], source, target) + match[3]

    def name(match: re.Match[str]) -> str:
        return match[1] if (ROOT / resolved(match[2], source)).is_dir() else match[0]

    parts = FENCE.split(text)
    return "".join(part if FENCE.match(part) else LINK.sub(lead, FOLDER.sub(name, part)) for part in parts)


def resolved(link: str, source: str) -> str:
    """From the root of the repository."""
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
