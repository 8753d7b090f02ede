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
from pathlib import Path
from typing import TYPE_CHECKING, Self

from windlass.clients.terminal import PROGRESS_VARIABLE, LoadingDisplay
from windlass.engine.errors import EngineError, with_place
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option import options_of, to_arguments
from windlass.server.config.server_options import OPTIONS, SamplingOptions
from windlass.server.startup.model_files import choose_model

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
    """A server that ends with the `with` block. If this process dies, the kernel closes the server's standard input.

    url: known once `wait_ready` returned. api_key: of this server alone, so that other users of the machine cannot use it.
    lines: what the server printed on standard error, without its progress.
    """

    def __init__(self, model: str, name: str | None, options: Sequence[str]) -> None:
        self.api_key = secrets.token_urlsafe()
        self.url = ""
        self.lines: list[str] = []
        self._listening = threading.Event()
        self._display = LoadingDisplay()
        self._ready = False
        command = [sys.executable, "-m", "windlass.server.cli.managed_server_child", "serve", model, "--port", "0"]
        command += [
            "--grace-period",
            "0",
            OPTIONS["shared_prefix_cache"].flag,  # the key is new in every run: persisted blocks must not belong to it
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
            start_new_session=True,  # ctrl-C is for the command, not for the server
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_ready(self) -> None:
        """Show the loading progress until the server accepts requests. Raises EngineError with its error if it ends."""
        try:
            while not self._listening.wait(_POLL_SECONDS):
                self._check()
            from windlass.clients import APIConnectionError, APIError  # imported while the server starts

            with self.client(timeout=5) as client:
                while True:
                    try:
                        if client.ready().ok:
                            return
                    except APIConnectionError:
                        pass
                    except APIError as error:  # waiting does not help
                        raise EngineError(" ".join(with_place(self.url, error.message).split())) from error
                    self._check()
                    time.sleep(_POLL_SECONDS)
        finally:
            self._ready = True
            self._display.stop()

    def client(self, *, timeout: Timeout = None, retry: RetryPolicy | None = None) -> Client:
        """A client that ignores the proxies of the environment, which may not reach the server and must not read the chat."""
        import httpx

        from windlass.clients import Client

        direct = httpx.HTTPTransport(trust_env=False)  # with a transport of its own the client uses no proxies
        return Client(self.url, api_key=self.api_key, timeout=timeout, retry=retry, transport=direct)

    def failure(self, seconds: float = 0.0) -> str | None:
        """The reason why the server ended; None if it still runs after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        self._reader.join(1.0)
        errors = [line for line in self.lines if line.startswith("error: ")] or self.lines
        return errors[-1].removeprefix("error: ") if errors else f"the server ended with {self._process.returncode}"

    def _check(self) -> None:
        if (failure := self.failure()) is not None:
            raise EngineError(failure)

    def _read(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stream:
            for raw in stream:
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
        """End the server. May be called twice."""
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

    def __exit__(self, *exception: object) -> None:
        self.close()


def managed_server(model: str | None, options: EngineOptions, sampling: SamplingOptions) -> ManagedServer:
    """A server for a model, which may have to be downloaded first. Raises LoadError."""
    name = None
    if model is None or not Path(model).expanduser().exists():
        name, path = choose_model(model)
        model = model or (name if not Path(name).exists() else str(path))
    return ManagedServer(model, name, [*to_arguments(options), *to_arguments(sampling)])
