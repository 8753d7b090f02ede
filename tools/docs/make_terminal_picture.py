"""Record docs/terminal.svg: the terminal output of a server with smollm2 and of two requests.

.venv/bin/python tools/docs/make_terminal_picture.py
"""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

WINDLASS = Path(sys.executable).with_name("windlass")
OUT = Path(__file__).resolve().parents[2] / "docs" / "terminal.svg"
YARN = '{"rope_type": "yarn", "factor": 4}'


def main() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    console = Console(record=True, width=104)
    command = ["serve", "--port", port]
    prompt(console, "windlass " + " ".join(command))
    server = subprocess.Popen([WINDLASS, *command], stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if line.strip() and not line.startswith("loading weights"):
            console.print(Text(line.rstrip()))
        if line.lstrip().startswith("rotary"):
            break
    for arguments in (
        ["generate", "Name the capital of Japan.", "--chat", "--temperature", "0"],
        [
            "generate",
            "Name the capital of Italy.",
            "--chat",
            "--temperature",
            "0",
            "--rope-scaling",
            YARN,
        ],
    ):
        shown = shlex.join(arguments)
        prompt(console, f"windlass {shown} --url http://127.0.0.1:{port}")
        answer = subprocess.run(
            [WINDLASS, *arguments, "--url", f"http://127.0.0.1:{port}"], capture_output=True, text=True, check=True
        )
        console.print(Text(answer.stdout.strip("\n")))
    server.send_signal(signal.SIGINT)
    server.wait(30)
    console.save_svg(str(OUT), title="windlass")


def prompt(console: Console, command: str) -> None:
    console.print(Text("$ ", style="bold green") + Text(command, style="bold"))


if __name__ == "__main__":
    main()
