"""A `windlass serve` child process on a free port, for commands that need a server of their own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from windlass.clients.terminal import PROGRESS_VARIABLE, LoadingDisplay
from windlass.engine.errors import EngineError
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option import options_of
from windlass.server.config.server_options import OPTIONS

if TYPE_CHECKING:
    from windlass.clients import Client
    from windlass.clients.options import RetryPolicy, Timeout


# Variables that the child inherits: those of settings without an option, which its command line cannot set.
_INHERITED_VARIABLES = {"WINDLASS_CACHE", "WINDLASS_CPU_ISA", OPTIONS["crash_dir"].variable} | {
    each.variable for each in options_of(EngineOptions).values() if each.scope != "flag"
}

_STOP_SECONDS = 8.0

_POLL_SECONDS = 0.02


class ManagedServer:
    """Started when it is made; in a `with` block, whose end ends it. The kernel closes its standard input if this process dies.

    url: known once `wait_ready` came back. api_key: of this server alone, so that other users of the machine cannot ask it.
    lines: what it said on standard error and `wait_ready` did not show.
    """

    def __init__(self, model: str, name: str | None, options: Sequence[str]) -> None:
        self.api_key = secrets.token_urlsafe()
        self.url = ""
        self.lines: list[str] = []
        self._listening = threading.Event()
        self._display = LoadingDisplay()
        self._ready = False
        command = [sys.executable, "-m", "windlass.server.cli.chat_child", "serve", model, "--port", "0"]
        command += [
            "--grace-period",
            "0",
            *(["--served-model-name", name] if name else []),
            *options,
        ]
        kept = {k: v for k, v in os.environ.items() if not k.startswith("WINDLASS_") or k in _INHERITED_VARIABLES}
        self._process = subprocess.Popen(
            command,
            env={
                **kept,
                "WINDLASS_API_KEY": self.api_key,
                OPTIONS["stats_interval"].variable: "0",
                PROGRESS_VARIABLE: "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # ctrl-C is for the chat
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Show how it loads and come back when it takes requests; raises EngineError with what it said if it ends."""
        try:
            while not self._listening.wait(_POLL_SECONDS):
                self._check()
            from windlass.clients import APIConnectionError, APIError  # while the server imports as well

            with self.client(timeout=5) as client:
                while True:
                    try:
                        if client.ready().ok:
                            return
                    except APIConnectionError:
                        pass
                    except APIError as error:  # nothing that waiting changes
                        raise EngineError(" ".join(f"{self.url}: {error.message}".split())) from error
                    self._check()
                    time.sleep(_POLL_SECONDS)
        finally:
            self._ready = True
            self._display.stop()

    def client(self, *, timeout: Timeout = None, retry: RetryPolicy | None = None) -> Client:
        """For requests to it, past the proxies that the environment names: they may not reach it, nor read what is said."""
        import httpx

        from windlass.clients import Client

        direct = httpx.HTTPTransport(trust_env=False)  # a client that is given its transport looks for no proxies
        return Client(self.url, api_key=self.api_key, timeout=timeout, retry=retry, transport=direct)

    def failure(self, seconds: float = 0.0) -> str | None:
        """Why the server is gone; None if it is still there after so long."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)
        said = [line for line in self.lines if line.startswith("error: ")] or self.lines
        return said[-1].removeprefix("error: ") if said else f"the server ended with {self._process.returncode}"

    def _check(self) -> None:
        if (failure := self.failure()) is not None:
            raise EngineError(failure)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as said:
            for raw in said:
                line = raw.decode("utf-8", "replace").rstrip("\n")
                if line.startswith(PROGRESS_VARIABLE):
                    if not self._ready:
                        stage, done, total = json.loads(line.removeprefix(PROGRESS_VARIABLE))
                        self._display(stage, done, total)
                elif found := re.fullmatch(r"loading .*; listening on (http://\S+)/v1", line):
                    self.url = found[1]
                    self._listening.set()
                else:
                    self.lines.append(line)

    def close(self) -> None:
        """End it. Safe to call twice."""
        assert self._process.stdin is not None and self._process.stderr is not None
        self._display.stop()
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
