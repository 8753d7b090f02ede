"""`make docs`: navigation, links, and no content of other hosts."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from helpers.doc_examples import ROOT

DOCS = ROOT / "docs"
CONFIG = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


# Pages from outside docs/, which tools/docs/site_hooks.py adds.
OUTSIDE = {"readme.md", "changelog.md", "contributing.md", "models-demo.md", "repeat-benchmarks.md"}


def listed(nav: object) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [page for part in parts for page in listed(part)]  # type: ignore[union-attr]


def navigation() -> list[str]:
    return listed(yaml.safe_load(CONFIG.split("\nnav:\n")[1]))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = navigation()
    assert len(set(pages)) == len(pages)
    here = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert set(pages) == here | OUTSIDE


def build(root: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("mkdocs", reason="needs the extra e2e: pip install -e '.[e2e]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=250, check=False)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that a build reads."""
    root = tmp_path_factory.mktemp("clone")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in files.stdout.splitlines():
        if (
            name.startswith(
                ("docs/", "deploy/", "models/demo/", "benchmarks/results/", "benchmarks/README.md", "tools/docs/")
            )
            or "/" not in name
        ):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, root / name)
    return root


@pytest.mark.slow
def test_the_site_builds_without_warnings_and_loads_nothing_from_other_hosts(clone: Path) -> None:
    done = build(clone)
    assert done.returncode == 0, done.stdout + done.stderr
    site = clone / "build" / "docs"
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(navigation())
    for page in pages:
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"(https?:[^\"]+)", text)
        loaded += re.findall(r"<link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href=\"(https?:[^\"]+)", text)
        assert loaded == [], page
    # Links out of docs/ lead to pages of the site or to copies.
    guide = (site / "guides" / "choosing-a-model.html").read_text(encoding="utf-8")
    assert 'href="../models-demo.html#training"' in guide and (site / "models-demo.html").exists()
    home = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="readme.html"' in home and (site / "readme.html").exists()
    assert (site / "files" / "docker-compose.yml").read_text() == (ROOT / "docker-compose.yml").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong", ["[there](no-such-page.md)", "[there](guides/cache.md#no-such-heading)", "![there](none.png)"]
)
def test_a_broken_link_fails_the_build(clone: Path, wrong: str) -> None:
    page = clone / "docs" / "guides" / "troubleshooting.md"
    original = page.read_text(encoding="utf-8")
    try:
        page.write_text(f"{original}\n{wrong}\n", encoding="utf-8")
        done = build(clone)
        assert done.returncode != 0 and "troubleshooting.md" in done.stdout + done.stderr
    finally:
        page.write_text(original, encoding="utf-8")
