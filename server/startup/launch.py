"""Launch of a server: checks, listener, engine process, event loop, signals and exit code.

Its shutdown takes a bounded time: drain, abort, close, and as a last resort exit.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.clients.terminal import LoadingDisplay, print_status
from windlass.engine.client.engine_client import EngineClient
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import pin_to_cores, split_cores
from windlass.engine.model.loading.preflight import check_start, expect_device
from windlass.engine.process_setup import disable_core_dumps, gc_paused_imports, trim_heap
from windlass.server.app.auth import reload_keys_on_sighup
from windlass.server.app.middleware import binding_of
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option_names import with_option_names
from windlass.server.config.server_options import (
    ConnectionOptions,
    ServerOptions,
    changed_options,
    check_log_level,
    read_template_kwargs,
)
from windlass.server.config.settings import ServerSettings
from windlass.server.http.connection_limits import ConnectionSettings, raise_file_limit
from windlass.server.http.listener import listen_tcp, listen_unix, make_tls_context
from windlass.server.observability.logging import EventLoopMonitor, log_to_stderr
from windlass.server.serving.request_rotation import check_profiles
from windlass.server.startup.default_model import DEFAULT_MODELS
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.startup.display import better_model_line, link_lines, report_activity, summary
from windlass.server.startup.early_signals import exit_on_signals, record_signal
from windlass.server.startup.engines import CORE_VARIABLE, Engines, SupervisedEngine
from windlass.server.startup.model_catalog import cache_folder
from windlass.server.startup.model_defaults import (
    RECOMMENDED,
    check_context_defaults,
    check_loaded,
    find_sampling,
    max_context_sizes,
    rank_settings,
)
from windlass.server.startup.model_files import choose_model, known_sampling, with_draft_model
from windlass.server.text.tokenizer_files import RESERVED

if TYPE_CHECKING:
    from fastapi import FastAPI

    from windlass.engine.model.model_spec import ModelSpec
    from windlass.server.app.state import ServerState
    from windlass.server.http.server import HttpServer

AFTER_GRACE_SECONDS = 2.0  # after the grace period, at most, until the process has ended; of these:
ABORT_SECONDS = 0.6  # for streams to send their error event
HTTP_SECONDS = 0.7  # for uvicorn's own steps once no client is connected
INTERPRETER_EXIT_SECONDS = 0.5  # for the interpreter to end, and for a busy machine
CLOSE_SECONDS = 5.0  # for requests other than generation, if the grace period is that long
_UNLIMITED_SECONDS = 1e8  # three years: means no limit


class Shutdown:
    """Shutdown of a server. Create it in the main thread while the server runs, and call `begin` once.

    grace_seconds: time for running generation requests.
    """

    def __init__(self, client: SupervisedEngine, grace_seconds: float) -> None:
        self._client = client
        self._grace_seconds = grace_seconds
        self._grace_ends = self._exit_at = 0.0
        self._deadline_enforced = threading.Event()
        self.started = False
        # It waits from the start, since a thread cannot be started safely in a signal handler.
        threading.Thread(target=self._exit_on_deadline, name="ending", daemon=True).start()

    def begin(self) -> None:
        """Start the grace period. Called by a signal handler, so that it starts even if the event loop is busy."""
        self.started = True
        self._grace_ends = time.monotonic() + self._grace_seconds
        self._exit_at = self._grace_ends + AFTER_GRACE_SECONDS - INTERPRETER_EXIT_SECONDS

    def enforce_deadline(self) -> None:
        """Make the process exit in time, with code 0, even while threads do work that no request waits for.

        Python joins threads before it exits, and one that tokenizes a long text cannot be interrupted.
        """
        self._deadline_enforced.set()

    async def drain(self, state: ServerState) -> None:
        """Refuse new work, wait the grace period for running requests, then end them with an error."""
        state.draining = True
        if state.in_flight:
            left = describe_time_left(state.in_flight, self._grace_ends - time.monotonic())
            print_status(f"draining: {left}; send the signal again to stop now")
        if not await _idle(state, self._grace_ends):
            print_status(f"the grace period has ended: {state.in_flight} requests are aborted")
            state.abort_all()
            await _idle(state, time.monotonic() + ABORT_SECONDS)
        print_status("stopped")

    async def close(self, server: HttpServer, http: asyncio.Task[None]) -> None:
        """End the HTTP server, which the task `http` runs, and the engine."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._left()):
                await asyncio.gather(self._close_http(server, http), self._client.close())

    async def _close_http(self, server: HttpServer, http: asyncio.Task[None]) -> None:
        await server.stop(min(CLOSE_SECONDS, self._left() - HTTP_SECONDS))
        await asyncio.wait({http}, timeout=self._left())

    def _left(self) -> float:
        return max(0.0, self._exit_at - time.monotonic())

    def _exit_on_deadline(self) -> None:
        self._deadline_enforced.wait()
        time.sleep(self._left())
        self._client.kill(reap=False)
        os._exit(0)


def describe_time_left(requests: int, seconds: float) -> str:
    """The remaining time of running requests, in words."""
    who = "1 request has" if requests == 1 else f"{requests:,} requests have"
    if seconds > _UNLIMITED_SECONDS:
        return f"{who} unlimited time to finish"
    return f"{who} {max(0.0, seconds):,.{0 if seconds >= 10 else 1}f} s to finish"


async def _idle(state: ServerState, deadline: float) -> bool:
    while state.in_flight and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return not state.in_flight


TRIM_BYTES = 1 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def serve(
    model: str | None,
    engine: EngineOptions,
    server: ServerOptions,
    connections: ConnectionOptions,
    log_level: str,
    replicas: int = 1,
) -> int:
    """Serve until a signal arrives. Returns the exit code of the process.

    0: stopped by a signal. 1: the engine failed permanently. Raises LoadError or RequestError, each one line for the
    operator, if it cannot start.
    """
    disable_core_dumps()
    with record_signal(None if server.api_key_file is None else signal.SIGHUP) as sighup_received:
        level = check_log_level(log_level)
        log_to_stderr(level, server.log_format)
        # Options at fault are reported before anything is downloaded or started.
        server.to_settings("model", engine)
        template, tls = read_template(server), _tls_context(server)
        engine.to_config(Path())
        connection_limits = ConnectionSettings.from_options(connections)
        with contextlib.closing(Engines(engine, level, replicas)) as engines:
            start = _StartOptions(
                model=model,
                engine=engine,
                server=server,
                connection_limits=connection_limits.capped_by_files(raise_file_limit()),
                level=level,
                template=template,
                tls=tls,
                changed=changed_options(engine, server),  # with the draft model as the operator named it
                sighup_received=sighup_received,
            )
            return _serve_with(engines, start)


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartOptions:
    """Checked options of a start. template: the operator's. changed: options that differ from their defaults, as written."""

    model: str | None
    engine: EngineOptions
    server: ServerOptions
    connection_limits: ConnectionSettings
    level: str
    template: str | None
    tls: ssl.SSLContext | None
    changed: list[str]
    sighup_received: Callable[[], bool]

    @property
    def stats_interval(self) -> float:
        """Seconds between activity lines; 0: none."""
        return self.server.stats_interval if self.level in ("debug", "info") else 0.0


def _serve_with(engines: Engines, start: _StartOptions) -> int:
    server = start.server
    path, engine, settings = prepare(start.model, start.engine, server, engines.replicas)
    client = engines.client(engine, path, crash_folder(server))
    if engine.pin_cores:
        pin_to_cores(split_cores()[1])
    listening = (
        contextlib.closing(listen_tcp(server.host, server.port)) if server.uds is None else listen_unix(server.uds)
    )
    with listening as listener, exit_on_signals(signal.SIGINT, signal.SIGTERM):
        client.spawn()
        settings = replace(settings, binding=binding_of(listener))
        base = _base_url(listener, start.tls is not None)
        url = _described_url(listener, base)
        loading = LoadingDisplay(first=f"loading {settings.served_model_name}; listening on {url}")
        if not _engine_may_refuse(engine):
            loading.begin()
        try:
            with gc_paused_imports():
                app = make_app(client, path, settings, start.template)
                from windlass.server.http.server import HttpServer
            with contextlib.closing(app.state.windlass) as state:
                http = HttpServer(
                    app,
                    listener,
                    start.connection_limits,
                    max_header_bytes=settings.max_header_bytes,
                    max_body_bytes=settings.max_body_bytes,
                    access_log=server.access_log,
                    tls=start.tls,
                )
                state.text.wait_loaded()
                release_freed_memory()
                # The garbage collector then inspects only the objects of requests, which takes less time.
                gc.collect()
                gc.freeze()
                return asyncio.run(_RunningServer(start, state, client, http, loading, url, base).run())
        finally:
            client.kill()


@dataclass(frozen=True, slots=True)
class _RunningServer:
    """A server whose engine loads or is loaded, on one event loop."""

    start: _StartOptions
    state: ServerState
    client: SupervisedEngine
    http: HttpServer
    loading: LoadingDisplay
    url: str
    base_url: str

    async def run(self) -> int:
        """Returns the exit code. Raises LoadError if the engine refuses to load."""
        state, client, settings = self.state, self.client, self.state.settings
        shutdown = Shutdown(client, settings.grace_seconds)
        stopping = _catch_signals(client, shutdown)
        if (key_file := self.start.server.api_key_file) is not None:
            plain_keys = self.start.server.plain_keys()
            reload_keys_on_sighup(key_file, plain_keys, state.callers, self.start.sighup_received)
        client.progress = self.loading
        client.start_nowait()
        http = asyncio.create_task(self.http.serve(), name="http")
        engine = asyncio.create_task(self._follow_engine(), name="engine")
        stop = asyncio.create_task(stopping.wait(), name="stop")
        activity = asyncio.create_task(report_activity(state.metrics, self.start.stats_interval), name="activity")
        monitor = EventLoopMonitor(state.observe_event_loop_lag).start()
        try:
            await asyncio.wait({http, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
            self.loading.stop()
            if stop.done():
                await shutdown.drain(state)
                return 0
            if engine.done():
                return engine.result()
            http.result()
            return 1  # the HTTP server ended unexpectedly
        finally:
            self.loading.stop()
            stop.cancel()
            engine.cancel()
            activity.cancel()
            monitor.stop()
            if not shutdown.started:
                shutdown.begin()
            await shutdown.close(self.http, http)

    async def _follow_engine(self) -> int:
        """Print the summary when the model is loaded; returns an exit code when the engine has failed. Raises LoadError."""
        info = await self.client.wait_ready()
        self.loading.begin()
        self.loading.stop()
        settings = self.state.settings
        check_loaded(settings, info)
        lines = summary(
            info,
            ", ".join(settings.model_names),
            self.url,
            tuple(settings.rope_profiles),
            self.start.changed,
            settings.sampling.describe(settings.sampling_sources),
            chats=self.state.text.has_chat_template,
        )
        if self.start.server.uds is None:
            lines += link_lines(
                self.base_url,
                page=settings.ui,
                key=settings.requires_key,
                chats=self.state.text.has_chat_template,
                generates=info.generates,
            )
        best, *smaller = DEFAULT_MODELS
        if self.start.model is None and settings.served_model_name in [model.name for model in smaller]:
            lines.append(better_model_line(best))
        for line in lines:
            print_status(line)
        await self.client.wait_state("failed")
        print_status(f"error: {with_option_names(self.client.failure)}")
        return 1


def _catch_signals(client: SupervisedEngine, shutdown: Shutdown) -> asyncio.Event:
    """An event that the first SIGINT or SIGTERM sets; the second one ends both processes immediately.

    These are not the event loop's own handlers: a request may keep the loop busy for a while.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def handle(signum: int, frame: object) -> None:
        if shutdown.started:
            os.write(2, b"stopped without waiting for requests\n")  # this signal may have interrupted a print
            client.kill()
            os._exit(128 + signum)
        shutdown.begin()
        shutdown.enforce_deadline()
        loop.call_soon_threadsafe(stopping.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stopping


def prepare(
    model: str | None, engine: EngineOptions, server: ServerOptions, replicas: int = 1
) -> tuple[Path, EngineOptions, ServerSettings]:
    """The model's directory, and options and settings for it. Raises LoadError for a model that cannot be served."""
    name, path = choose_model(model)
    engine = with_draft_model(engine)
    settings = server.to_settings(name, engine)
    spec = check_model(engine, path, server, replicas)
    settings = replace(settings, ranking=rank_settings(path, server, spec))
    path = ensure_tokenizer(path)
    recommended = known_sampling(model, name, path)
    found = find_sampling(path, recommended, server.generation_config, server.override_generation_config)
    in_force = {field: value for field, value in recommended.items() if found.sources.get(field) == RECOMMENDED}
    settings = replace(settings, sampling=found.sampling, sampling_sources=found.sources, recommended_sampling=in_force)
    return path, engine, settings


def check_model(
    engine: EngineOptions, path: Path, server: ServerOptions | None = None, replicas: int = 1
) -> ModelSpec | None:
    """Check files and options before anything is started. Raises LoadError, one line.

    server: None if there are no requests from outside. Returns the spec of the model, None if none is loaded.
    """
    if CORE_VARIABLE in os.environ:  # such a core loads no model
        return None
    config = replace(engine.to_config(path), replicas=replicas)
    model = check_start(config)
    check_profiles(engine.profiles(), model.unscaled_groups)
    if server is not None:
        kinds = {group.scaling.rope_type for group in model.spec.rotary_groups}
        check_context_defaults(server.to_settings("model", engine), max_context_sizes(config, model.spec), kinds)
    return model.spec


def _engine_may_refuse(engine: EngineOptions) -> bool:
    """Whether the engine may refuse what `check_model` accepted: only the engine asks a GPU for its type and free memory."""
    return CORE_VARIABLE not in os.environ and expect_device(engine.device) != "cpu"


def read_template(server: ServerOptions) -> str | None:
    """The operator's chat template. Raises LoadError, one line, if it or its variables cannot be read.

    A text worker compiles it, with limits.
    """
    source = server.read_chat_template()
    for name in read_template_kwargs(server.default_chat_template_kwargs):
        if name in RESERVED:
            raise LoadError(f"`default_chat_template_kwargs`: {name} comes from each request: leave it out")
    return source


def make_app(client: EngineClient, path: Path, settings: ServerSettings, template: str | None) -> FastAPI:
    """The app for a model's directory. template: replaces the model's own."""
    # Imported here: fastapi and the tokenizer take a while, and the engine process is already loading in parallel.
    from windlass.server.application import create_app
    from windlass.server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(path)
    if template is not None:
        tokenizer.chat_template, tokenizer.tool_template = template, None
    return create_app(client, tokenizer, settings)


def crash_folder(server: ServerOptions) -> Path | None:
    """The folder for reports of engine crashes, None for none."""
    if server.crash_dir == "none":
        return None
    return cache_folder() / "crashes" if server.crash_dir is None else Path(server.crash_dir).absolute()


def _tls_context(server: ServerOptions) -> ssl.SSLContext | None:
    """The context for HTTPS; None for plain HTTP. Raises LoadError for files that cannot be used."""
    if server.ssl_certfile is None:
        return None
    return make_tls_context(server.ssl_certfile, server.ssl_keyfile, server.ssl_keyfile_password, server.ssl_ca_certs)


def _base_url(listener: socket.socket, tls: bool) -> str:
    """The URL without a path by which programs on this machine reach the server; over a Unix socket its host is arbitrary."""
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    host = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _described_url(listener: socket.socket, base: str) -> str:
    """The URL of the API, and where the server listens."""
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {listener.getsockname()} ({base}/v1)"
    on_all = " (on every address of this machine)" if listener.getsockname()[0] in ("0.0.0.0", "::") else ""
    return f"{base}/v1{on_all}"


def release_freed_memory() -> None:
    """Make malloc return freed pieces of TRIM_BYTES and more to the system, now and in future. No effect without glibc.

    By default glibc raises that size to the largest piece freed so far, up to 32 MiB, so a few large bodies would remain in
    the process forever.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, TRIM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)
    trim_heap()
