"""Streams that run on a real server while something goes wrong, and what a test asks of that server afterwards."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
from helpers.raw_client import wait_for
from helpers.real_server import RealServer

PATH = "/v1/completions"
LONG = {"prompt": "The sea", "max_tokens": 4000, "ignore_eos": True, "temperature": 0, "stream": True}


class Streams:
    """Streams that run side by side; `ends` has how each of them ended: "length", or the code of its error.

    texts: of each. gaps: seconds between two pieces, of all of them.
    """

    def __init__(self, url: str, count: int, tokens: int = 4000) -> None:
        self._body = {**LONG, "max_tokens": tokens}
        self.ends: list[str] = []
        self.texts: list[str] = []
        self.gaps: list[float] = []
        self.begun = threading.Semaphore(0)
        self._threads = [threading.Thread(target=self._run, args=(url,)) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self.begun.acquire(timeout=60)

    def _run(self, url: str) -> None:
        end, done, begun, text, last = "cut", False, False, "", 0.0
        with httpx.Client(timeout=60) as http, http.stream("POST", url + PATH, json=self._body) as answer:
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    done = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    now = time.monotonic()
                    if not begun:
                        self.begun.release()
                    else:
                        self.gaps.append(now - last)
                    begun, last = True, now
                    if "error" in event:
                        end = event["error"]["code"]
                    elif event["choices"]:
                        text += event["choices"][0]["text"]
                        end = event["choices"][0]["finish_reason"] or end
        self.texts.append(text)
        self.ends.append(end if done else f"{end}, without [DONE]")

    def finish(self) -> list[str]:
        for thread in self._threads:
            thread.join(600)
        assert len(self.ends) == len(self._threads)
        return self.ends


def answer(server: RealServer, **fields: object) -> httpx.Response:
    return httpx.post(
        server.url + PATH, json={"prompt": "The sea", "max_tokens": 8, "temperature": 0, **fields}, timeout=240
    )


def serves_again(server: RealServer) -> None:
    wait_for(lambda: answer(server).status_code == 200, 180.0)


def open_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))
