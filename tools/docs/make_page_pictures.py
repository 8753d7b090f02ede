"""Take the screenshots of docs/start/chat.md in Chromium: the chat with the default model, the other tabs with smollm2.

.venv/bin/python tools/docs/make_page_pictures.py [--url URL] [--only NAME]

--url: a running server that was started with --attention-maps. The images have few colours, to keep the clone small.
"""

from __future__ import annotations

import argparse
import io
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "page"
COLOURS = 192
DESK, PHONE = {"width": 1100, "height": 800}, {"width": 390, "height": 760}
TALK = "And so the old sailor told the children about the storm, and "


@contextmanager
def served(*model: str) -> Iterator[str]:
    """Start a server of a model, by default the default one, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("windlass")),
        "serve",
        *model,
        "--port",
        str(port),
        "--attention-maps",
    ]
    command += ["--kv-cache-memory", "1GiB", "--log-level", "warning"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def save(page: Page, name: str) -> None:
    """Write a screenshot with few colours."""
    file = FOLDER / f"{name}.png"
    page.mouse.move(0, 0)
    page.wait_for_timeout(300)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(file, optimize=True)
    print(name, f"{file.stat().st_size / 1024:.0f} KiB")


def chat(page: Page) -> None:
    """One question under two scalings."""
    for scaling in ("default", "yarn 4"):  # the first requests of a server take longer
        page.request.post("v1/completions", data={"prompt": "Hello", "max_tokens": 2, "rope_scaling": scaling})
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("group", name="Right: rotary scaling").get_by_label("Kind").select_option("yarn")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Temperature").fill("0")
    page.get_by_text("Settings", exact=True).click()
    page.get_by_label("Message", exact=True).fill("What is a lighthouse? Answer in one sentence.")
    page.keyboard.press("Enter")
    expect(page.locator(".message.assistant > .tools .facts")).to_have_count(2, timeout=200_000)
    expect(page.locator("mark")).to_have_count(2)


def completion(page: Page) -> None:
    page.get_by_label("Text to continue").fill("The capital of France is")
    page.get_by_text("Settings and rotary scaling").click()
    page.get_by_label("Longest answer").fill("32")
    page.get_by_text("Settings and rotary scaling").click()
    page.get_by_role("button", name="Continue the text").click()
    expect(page.get_by_role("button", name="Continue the text")).to_be_visible(timeout=200_000)
    page.locator(".token").nth(8).focus()


def rotary(page: Page) -> None:
    expect(page.get_by_text("Tokens per turn of each pair")).to_be_visible()


def attention(page: Page) -> None:
    page.get_by_label("Layer").fill("5")
    page.get_by_label("Head").fill("2")
    page.get_by_role("button", name="Show the attention").click()
    expect(page.locator("canvas")).to_have_count(2, timeout=200_000)
    page.get_by_role("button", name="Show the attention").evaluate("button => button.scrollIntoView()")


def cache(page: Page) -> None:
    """Four running answers whose prompts share a prefix."""
    ask = """([text, count]) => { for (let i = 0; i < count; i += 1) fetch("v1/completions", {
      method: "POST", headers: {"content-type": "application/json"},
      body: JSON.stringify({prompt: text.repeat(12) + i, max_tokens: 500, ignore_eos: true})}); }"""
    page.evaluate(ask, [TALK, 1])
    running = page.locator(".figures > div").filter(has_text="Running")
    expect(page.locator(".swatch[data-owner]").nth(1)).to_be_visible(timeout=200_000)
    page.wait_for_timeout(3000)
    page.evaluate(ask, [TALK, 3])
    expect(running).to_contain_text("4", timeout=200_000)
    page.wait_for_timeout(4000)


Scene = tuple[str, Callable[[Page], None], dict[str, int], str]  # first tab, actions, size, colour scheme
SCENES: dict[str, Scene] = {
    "chat": ("chat", chat, DESK, "light"),
    "completion": ("completion", completion, PHONE, "dark"),
    "rotary": ("rotary", rotary, DESK, "light"),
    "attention": ("attention", attention, DESK, "dark"),
    "cache": ("cache", cache, DESK, "light"),
}


def take(browser: Browser, url: str, name: str) -> None:
    tab, scene, size, scheme = SCENES[name]
    page = browser.new_page(viewport=size, color_scheme=scheme, base_url=f"{url}/")
    page.goto(f"{url}/#{tab}")
    scene(page)
    save(page, name)
    page.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--only", choices=SCENES)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in [options.only] if options.only else SCENES:
            if options.url:
                take(browser, options.url, name)
            else:
                with served(*(() if name == "chat" else ("smollm2",))) as url:  # a new server, with an empty cache
                    take(browser, url, name)
        browser.close()


if __name__ == "__main__":
    main()
