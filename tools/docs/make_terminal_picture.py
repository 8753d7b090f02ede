"""Record docs/terminal.svg: the first minute in a terminal. The commands run as shown, with the default model.

.venv/bin/python tools/docs/make_terminal_picture.py
"""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

WINDLASS = Path(sys.executable).with_name("windlass")
OUT = Path(__file__).resolve().parents[2] / "docs" / "terminal.svg"
WIDTH = 110
LINES = (
    "What does a windlass do? Answer in one sentence.",
    "/rope yarn 4",
    "/retry",
    "/quit",
)
START_SECONDS = ANSWER_SECONDS = 300
BRACKETED_PASTE = re.compile(rb"\x1b\[\?2004[hl]\r?|\r(?!\n)")
PROMPT = re.compile(rb"(?:^|\n)> $")


def main() -> None:
    port = 8000 if is_free(8000) else free_port()
    serve = ["serve"] if port == 8000 else ["serve", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    console = Console(record=True, width=WIDTH)
    show_command(console, serve)
    # Warnings would be about other programs on this machine.
    quiet = {**os.environ, "WINDLASS_LOG_LEVEL": "error"}
    server = subprocess.Popen([WINDLASS, *serve], stderr=subprocess.PIPE, text=True, env=quiet)
    try:
        for line in banner(server, url):
            console.print(Text(line))
        chat = ["chat", "--url", url]
        show_command(console, chat)
        console.print(Text.from_ansi(converse(chat)))
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    console.save_svg(str(OUT), title="windlass")


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def show_command(console: Console, arguments: list[str]) -> None:
    console.print(Text("$ ", style="bold green") + Text(" ".join(["windlass", *arguments]), style="bold"))


def banner(server: subprocess.Popen[str], url: str) -> list[str]:
    """What a server writes until it is ready, without the lines that a terminal overwrites."""
    lines: list[str] = []
    assert server.stderr is not None
    stream = server.stderr
    threading.Thread(target=lambda: lines.extend(stream), daemon=True).start()
    end = time.monotonic() + START_SECONDS
    while not is_ready(url):
        if server.poll() is not None or time.monotonic() > end:
            raise SystemExit("the server did not start:\n" + "".join(lines))
        time.sleep(0.5)
    time.sleep(1)  # the rest of the banner
    return [line.rstrip() for line in lines if line.strip() and not line.startswith("loading weights")]


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def converse(arguments: list[str]) -> str:
    """The screen of a command that reads LINES, one at each prompt, in a terminal of its own."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(TERM="xterm", COLUMNS=str(WIDTH + 20))
        os.execv(WINDLASS, [str(WINDLASS), *arguments])
    shown = b""
    for line in LINES:
        shown = read_until_prompt(terminal, shown)
        os.write(terminal, line.encode() + b"\r")
        time.sleep(0.2)  # its echo
    while chunk := read(terminal):
        shown += chunk
    os.waitpid(child, 0)
    return BRACKETED_PASTE.sub(b"", shown).decode().replace("\r\n", "\n").rstrip()


def read_until_prompt(terminal: int, shown: bytes) -> bytes:
    end = time.monotonic() + ANSWER_SECONDS
    before = len(shown)
    while time.monotonic() < end:
        shown += read(terminal)
        if PROMPT.search(BRACKETED_PASTE.sub(b"", shown[before:]).replace(b"\r\n", b"\n")):
            return shown
    raise SystemExit("no prompt:\n" + shown.decode(errors="replace"))


def read(terminal: int) -> bytes:
    """What has arrived; nothing after the program's end."""
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux reports the end in this way
        return b""


if __name__ == "__main__":
    main()
