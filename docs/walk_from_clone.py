"""Walks from a clone to two scalings compared in the page, as docs/walk.md tells it: says when what was seen, and takes pictures.

.venv/bin/python docs/walk_from_clone.py FOLDER [--source REPOSITORY]

FOLDER: where to clone to; it must not exist, and is left for whoever wants to look. Nothing that earlier installations left is
used: pip's cache and that of models lie in FOLDER too. Ends with 1 where something is not seen.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from make_page_pictures import DESK, save_as
from playwright.sync_api import Page, expect, sync_playwright

DOCS = Path(__file__).parent
PICTURES = DOCS / "walk"
QUESTION = "Name the capital of France."


class Clock:
    """Time since the beginning, without that in which this process, and the walk with it, was stopped (SIGSTOP)."""

    def __init__(self) -> None:
        self.begin, self.stopped = time.monotonic(), 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(0.2)
            now = time.monotonic()
            if now - before > 3:
                self.stopped += now - before
            before = now

    def tell(self, what: str) -> None:
        seconds = time.monotonic() - self.begin - self.stopped
        print(f"{int(seconds // 60)}:{seconds % 60:04.1f}  {what}", flush=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(clone: Path, port: int, clock: Clock) -> subprocess.Popen[str]:
    """`make serve` in the clone, until the server says that it serves."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("VIRTUAL_ENV", "WINDLASS"))
    }
    environment |= {"PIP_CACHE_DIR": str(clone / "build" / "pip"), "WINDLASS_CACHE": str(clone / "build" / "models")}
    process = subprocess.Popen(
        ["make", "serve", f"PORT={port}"],
        cwd=clone,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if (
            line.startswith(("==", "Successfully", "loading", "smollm2", "windlass", "  ", "note", "error"))
            and "━" not in line
        ):
            clock.tell(line.rstrip()[:150])
        if line.startswith("  rotary"):
            return process
    raise SystemExit(f"make serve ended with {process.wait()}")


def in_the_page(page: Page, url: str, clock: Clock) -> None:
    page.goto(url)
    expect(page.get_by_label("Message", exact=True)).to_be_visible()
    clock.tell("the page shows the chat, and names the model in its head")
    page.get_by_role("link", name="Rotary").click()
    expect(page.get_by_text("Tokens per turn of each pair")).to_be_visible()
    clock.tell(
        "Rotary: " + "; ".join(" ".join(row.split("\n")) for row in page.locator(".figures > div").all_inner_texts())
    )
    page.get_by_label("Kind").select_option("linear")
    expect(page.get_by_role("heading", name="linear")).to_be_visible()
    clock.tell("Linear is picked: " + page.get_by_label("JSON", exact=True).inner_text())
    save_as(page, PICTURES / "linear.png")
    page.get_by_role("button", name="Compare in the chat").click()
    expect(page.get_by_label("Right: rotary scaling")).to_be_visible()
    clock.tell("Compare in the chat: two columns, the right one has the scaling")
    page.get_by_label("Message", exact=True).fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant .facts")).to_have_count(2, timeout=120_000)
    for name, answer in zip(("left", "right"), page.locator(".message.assistant").all(), strict=True):
        said, facts = answer.locator(".markdown").inner_text(), answer.locator(".facts").inner_text()
        clock.tell(f"{name}: “{' '.join(said.split())[:120]}” ({' '.join(facts.split())})")
    save_as(page, PICTURES / "answers.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default=str(DOCS.parent))
    options = parser.parse_args()
    PICTURES.mkdir(exist_ok=True)
    clock = Clock()
    subprocess.run(["git", "clone", "--quiet", options.source, str(options.folder)], check=True)
    clock.tell("cloned")
    port = free_port()
    process = serve(options.folder.resolve(), port, clock)
    try:
        with sync_playwright() as playwright:
            chromium = shutil.which("chromium") or shutil.which("google-chrome")
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            in_the_page(browser.new_page(viewport=DESK, color_scheme="light"), f"http://127.0.0.1:{port}/", clock)
            browser.close()
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
    if clock.stopped:
        print(f"stopped for {clock.stopped:.0f} s meanwhile, which are not counted")


if __name__ == "__main__":
    main()
