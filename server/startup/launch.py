"""Launch of a server: listener, engine process, readiness, draining, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from windlass.clients.terminal import LoadingDisplay, print_status
from windlass.engine.client.engine_client import EngineClient
from windlass.engine.client.replicated_client import sum_stats
from windlass.engine.errors import LoadError
from windlass.engine.host_resources import pin_to_cores, split_cores
from windlass.engine.interface.outputs import EngineStats
from windlass.engine.model.loading.preflight import check_start, expect_device
from windlass.engine.process_setup import JSON_FORMAT, LOG_FORMAT_VARIABLE, gc_paused_imports, log_as_json
from windlass.server.app.auth import Callers
from windlass.server.config.api_keys import ApiKey, read_key_file
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.option_names import with_option_names
from windlass.server.config.option_parsing import LOG_FORMATS, check_choice, check_log_level
from windlass.server.config.server_options import (
    TEMPLATE_KWARGS,
    ConnectionOptions,
    ServerOptions,
    read_template_kwargs,
)
from windlass.server.config.settings import ConnectionSettings, ServerSettings
from windlass.server.http.event_loop_monitor import EventLoopMonitor
from windlass.server.http.listener import listen_unix, make_tls_context, raise_file_limit
from windlass.server.http.logs import is_not_lost_write_warning
from windlass.server.http.request_id import RequestFields
from windlass.server.observability.metrics import ServerMetrics
from windlass.server.serving.request_rotation import check_profiles
from windlass.server.startup.derived_files import ensure_tokenizer
from windlass.server.startup.display import summary
from windlass.server.startup.early_signals import record_signal
from windlass.server.startup.engines import CORE_VARIABLE, Engines, SupervisedEngine
from windlass.server.startup.model_catalog import cache_folder
from windlass.server.startup.model_defaults import (
    RECOMMENDED,
    check_context_defaults,
    check_model_compatibility,
    find_sampling,
    max_context_sizes,
    rank_settings,
)
from windlass.server.startup.model_files import choose_model, known_sampling, with_draft_model
from windlass.server.startup.shutdown import Shutdown
from windlass.server.text.template_facts import RESERVED

if TYPE_CHECKING:
    from fastapi import FastAPI

    from windlass.engine.model.model_spec import ModelSpec
    from windlass.server.http.server import HttpServer


@dataclass(frozen=True, slots=True, kw_only=True)
class _StartOptions:
    """What a start goes by once its options are checked. template: the operator's. shown: options that are not the defaults."""

    model: str | None
    engine: EngineOptions
    server: ServerOptions
    connection_limits: ConnectionSettings
    level: str
    template: str | None
    tls: ssl.SSLContext | None
    shown: list[str]

    @property
    def stats_interval(self) -> float:
        """Seconds between lines about what goes on; 0: none."""
        return self.server.stats_interval if self.level in ("debug", "info") else 0.0


def serve(
    model: str | None,
    engine: EngineOptions,
    server: ServerOptions,
    connections: ConnectionOptions,
    log_level: str,
    replicas: int = 1,
) -> int:
    """Serve until told to stop; returns the process's exit code.

    0: stopped by a signal. 1: the engine failed for good. Raises LoadError or RequestError, each one line for the
    person who started it, when it cannot start.
    """
    with record_signal(None if server.api_keys is None else signal.SIGHUP) as sighup_received:
        return _serve(model, engine, server, connections, log_level, replicas, sighup_received)


def _serve(
    model: str | None,
    engine: EngineOptions,
    server: ServerOptions,
    connections: ConnectionOptions,
    log_level: str,
    replicas: int,
    sighup_received: Callable[[], bool],
) -> int:
    level = check_log_level(log_level)
    log_to_stderr(level, check_choice("--log-format", server.log_format, LOG_FORMATS))
    if level == "info":
        logging.getLogger("uvicorn.error").setLevel("WARNING")  # its start and stop messages repeat ours
    logging.getLogger("asyncio").addFilter(is_not_lost_write_warning)
    server.to_settings("model", engine)  # options at fault are reported before anything is looked up or downloaded
    template = read_template(server)
    tls = _tls(server)
    engine.to_config(Path())
    with contextlib.closing(Engines(engine, level, replicas)) as engines:
        start = _StartOptions(
            model=model,
            engine=engine,
            server=server,
            connection_limits=connections.to_settings().capped_by_files(raise_file_limit()),
            level=level,
            template=template,
            tls=tls,
            shown=changed_options(engine, server),  # with the draft model as it was named
        )
        return _serve_with(engines, start, sighup_received)


def _serve_with(engines: Engines, start: _StartOptions, sighup_received: Callable[[], bool]) -> int:
    server = start.server
    path, engine, settings = prepare(start.model, start.engine, server, engines.replicas)
    client = engines.client(engine, path, crash_folder(server))
    if engine.pin_cores:
        pin_to_cores(split_cores()[1])
    with _listener(server) as listener, exit_on_signal():
        client.spawn()
        url = _url(listener, start.tls is not None)
        loading = LoadingDisplay(first=f"loading {settings.served_model_name}; listening on {url}")
        if not _engine_may_refuse(engine):
            loading.begin()
        try:
            with gc_paused_imports():
                app = make_app(client, path, settings, start.template)
            with contextlib.closing(app.state.windlass) as state:
                http = make_server(
                    app,
                    listener,
                    start.connection_limits,
                    max_header_bytes=settings.max_header_bytes,
                    access_log=server.access_log,
                    tls=start.tls,
                )
                state.text.wait_loaded()
                release_freed_memory()
                freeze_startup_objects()
                keys = KeyFileReloader(server.api_keys, settings.api_keys, state.callers, sighup_received)
                running = _run(start, app, client, http, loading, url=url, settings=settings, keys=keys)
                return asyncio.run(running)
        finally:
            client.kill()


def prepare(
    model: str | None, engine: EngineOptions, server: ServerOptions, replicas: int = 1
) -> tuple[Path, EngineOptions, ServerSettings]:
    """The model's directory, and options and settings for it; raises LoadError for what cannot be served."""
    name, path = choose_model(model)
    engine = with_draft_model(engine)
    settings = server.to_settings(name, engine)
    spec = check_model(engine, path, server, replicas)
    if spec is not None:
        check_context_defaults(settings, max_context_sizes(engine.to_config(path), spec))
    settings = replace(settings, ranking=rank_settings(path, server, spec))
    path = ensure_tokenizer(path)
    recommended = known_sampling(model, name)
    found = find_sampling(path, recommended, server.generation_config, server.override_generation_config)
    holding = {field: value for field, value in recommended.items() if found.sources.get(field) == RECOMMENDED}
    settings = replace(settings, sampling=found.sampling, sampling_sources=found.sources, recommended_sampling=holding)
    return path, engine, settings


def read_template(server: ServerOptions) -> str | None:
    """The operator's chat template; raises LoadError, one line, if it or its variables cannot be read.

    A text worker compiles it, with limits.
    """
    source = server.read_chat_template()
    for name in read_template_kwargs(server.default_chat_template_kwargs):
        if name in RESERVED:
            raise LoadError(f"{TEMPLATE_KWARGS}: {name} comes from each request: leave it out")
    return source


def check_model(
    engine: EngineOptions, path: Path, server: ServerOptions | None = None, replicas: int = 1
) -> ModelSpec | None:
    """Refuse, before anything is started, what files and options tell cannot be served; raises LoadError, one line.

    server: None where no requests come from outside. Returns what the model is, None where none is loaded.
    """
    if CORE_VARIABLE in os.environ:  # such a core loads no model
        return None
    model = check_start(replace(engine.to_config(path), replicas=replicas))
    check_profiles(engine.profiles(), model.unscaled_groups)
    if server is not None:
        check_model_compatibility(server, model.spec)
    return model.spec


def _engine_may_refuse(engine: EngineOptions) -> bool:
    """Whether the engine may still refuse what `check_model` let pass: it alone asks a GPU what it is and what it has free."""
    return CORE_VARIABLE not in os.environ and expect_device(engine.device) != "cpu"


def crash_folder(server: ServerOptions) -> Path | None:
    """Where reports of engines that died go, None for nowhere."""
    if server.crash_dir == "none":
        return None
    return cache_folder() / "crashes" if server.crash_dir is None else Path(server.crash_dir).absolute()


def _listener(server: ServerOptions) -> contextlib.AbstractContextManager[socket.socket]:
    return contextlib.closing(listen(server.host, server.port)) if server.uds is None else listen_unix(server.uds)


def _tls(server: ServerOptions) -> ssl.SSLContext | None:
    """What HTTPS needs; None for plain HTTP. Raises LoadError for files that cannot be used."""
    if server.ssl_certfile is None:
        return None
    return make_tls_context(server.ssl_certfile, server.ssl_keyfile, server.ssl_keyfile_password, server.ssl_ca_certs)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises LoadError that says what to do about an address that cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise LoadError(f"--host {host} is no address of this machine ({error.strerror or error})") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # From here on clients may connect, and are answered once the app is there. The system cuts the number to its own.
        listener.listen(65535)
        listener.set_inheritable(False)
    except OSError as error:
        listener.close()
        foreign = error.errno == errno.EADDRNOTAVAIL
        advice = "--host has to be an address of this machine" if foreign else "choose another with --port"
        reason = error.strerror or str(error)
        raise LoadError(f"cannot listen on {host} port {port} ({reason}): {advice}") from error
    return listener


@contextlib.contextmanager
def exit_on_signal() -> Iterator[None]:
    """End with SystemExit on SIGINT and SIGTERM until the event loop has its own handlers.

    As process 1 of a container a program that installs no handler is not ended by SIGTERM at all.
    """

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(0)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def make_app(client: EngineClient, path: Path, settings: ServerSettings, template: str | None) -> FastAPI:
    """The app of a model's directory. template: in place of the model's own."""
    # Imported here: fastapi and the tokenizer take a while, and the engine process is already loading beside them.
    from windlass.server.application import create_app
    from windlass.server.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_directory(path)
    if template is not None:
        tokenizer.chat_template, tokenizer.tool_template = template, None
    return create_app(client, tokenizer, settings)


def make_server(
    app: FastAPI,
    listener: socket.socket,
    connection_limits: ConnectionSettings,
    *,
    max_header_bytes: int,
    access_log: bool,
    tls: ssl.SSLContext | None,
) -> HttpServer:
    from windlass.server.http.server import HttpServer

    return HttpServer(
        app, listener, connection_limits, max_header_bytes=max_header_bytes, access_log=access_log, tls=tls
    )


async def _run(
    start: _StartOptions,
    app: FastAPI,
    client: SupervisedEngine,
    server: HttpServer,
    loading: LoadingDisplay,
    *,
    url: str,
    settings: ServerSettings,
    keys: KeyFileReloader,
) -> int:
    ending = Shutdown(client, settings.grace_seconds)
    stopping = _catch_signals(client, ending)
    keys.reload_on_signal()
    client.progress = loading
    client.start_nowait()
    http = asyncio.create_task(server.serve(), name="http")
    engine = asyncio.create_task(_follow_engine(app, client, loading, url, start.shown), name="engine")
    stop = asyncio.create_task(stopping.wait(), name="stop")
    activity = asyncio.create_task(report_activity(app.state.windlass.metrics, start.stats_interval), name="activity")
    watch = EventLoopMonitor(app.state.windlass.observe_event_loop_lag).start()
    try:
        await asyncio.wait({http, engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        loading.stop()
        if stop.done():
            await ending.drain(app.state.windlass)
            return 0
        if engine.done():
            return engine.result()
        http.result()
        return 1  # the HTTP server ended by itself
    finally:
        loading.stop()
        stop.cancel()
        engine.cancel()
        activity.cancel()
        watch.stop()
        if not ending.started:
            ending.begin()
        await ending.close(server, http)


async def _follow_engine(
    app: FastAPI, client: SupervisedEngine, loading: LoadingDisplay, url: str, shown: list[str]
) -> int:
    """Show the model when it is ready; returns an exit code when the engine is given up. Raises LoadError."""
    info = await client.wait_ready()
    loading.begin()
    loading.stop()
    state, settings = app.state.windlass, app.state.windlass.settings
    check_profiles(settings.rope_profiles, info.rotary_groups)
    check_context_defaults(settings, info)
    profiles, sampling = tuple(settings.rope_profiles), settings.sampling.describe(settings.sampling_sources)
    names, chats = ", ".join(settings.model_names), state.text.has_chat_template
    for line in summary(info, names, url, profiles, shown, sampling, chats=chats):
        print_status(line)
    await client.wait_state("failed")
    print_status(f"error: {with_option_names(client.failure)}")
    return 1


def _catch_signals(client: SupervisedEngine, ending: Shutdown) -> asyncio.Event:
    """An event set by the first SIGINT or SIGTERM; the second ends both processes at once.

    These are not the event loop's own handlers: what a client asked for may keep the loop busy for a while.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()

    def handle(signum: int, frame: object) -> None:
        if ending.started:
            os.write(2, b"stopped at once\n")  # print could have been interrupted by this signal
            client.kill()
            os._exit(128 + signum)
        ending.begin()
        ending.enforce_deadline()
        loop.call_soon_threadsafe(stopping.set)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    return stopping


def _url(listener: socket.socket, tls: bool) -> str:
    scheme = "https" if tls else "http"
    if listener.family == socket.AF_UNIX:
        return f"the Unix socket {listener.getsockname()} ({scheme}://localhost/v1)"
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        return f"{scheme}://127.0.0.1:{port}/v1 (on every address of this machine)"
    return f"{scheme}://[{host}]:{port}/v1" if ":" in host else f"{scheme}://{host}:{port}/v1"


async def report_activity(metrics: ServerMetrics, seconds: float) -> None:
    """Say so for ever; nothing while nothing runs. seconds: between two lines, 0 for none at all."""
    before, since = EngineStats(), time.monotonic()
    while seconds > 0:
        await asyncio.sleep(seconds)
        after, now = await metrics.refresh(), time.monotonic()
        if after is None:
            continue
        line = activity_line(_baseline(before, after), after, now - since)
        if line is not None:
            print_status(f"{time.strftime('%H:%M:%S')} {line}")
        before, since = after, now


def _baseline(before: EngineStats, after: EngineStats) -> EngineStats:
    """What the engines of `after` had counted before; one that was started since had counted nothing."""
    pairs = zip(before.engines or (before,), after.engines or (after,), strict=False)
    known = [one if one and two and two.num_steps >= one.num_steps else None for one, two in pairs]
    return sum_stats(known)


def activity_line(before: EngineStats, after: EngineStats, seconds: float) -> str | None:
    """What happened between two snapshots that lie `seconds` apart; None where nothing did.

    Prompt tokens are those that were computed or found in the cache.
    """
    read = after.prompt_tokens - before.prompt_tokens
    generated = after.generation_tokens - before.generation_tokens
    if not (read or generated or after.num_running or after.num_waiting):
        return None
    parts = [f"running {after.num_running:,}, waiting {after.num_waiting:,}"]
    parts.append(f"prompts {read / seconds:,.0f} tokens/s, answers {generated / seconds:,.1f} tokens/s")
    cache = f"cache {after.kv_cache_usage:.0%} in use"
    if looked_up := after.prefix_cache_queries - before.prefix_cache_queries:
        cache += f", {(after.prefix_cache_hits - before.prefix_cache_hits) / looked_up:.0%} of prompts found in it"
    parts.append(cache)
    if proposed := after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens:
        kept = after.spec_decode_num_accepted_tokens - before.spec_decode_num_accepted_tokens
        parts.append(f"{kept / proposed:.0%} of proposals kept")
    if preempted := after.num_preemptions - before.num_preemptions:
        parts.append(f"{preempted:,} preempted")
    return "; ".join(parts)


_logger = logging.getLogger("windlass.server")


class KeyFileReloader:
    """path: None for no file, and nothing done. plain: keys without names, which stay valid beside those of the file.

    asked: whether the signal has come before `reload_on_signal`, since the file was read first.
    """

    def __init__(
        self, path: Path | None, plain: tuple[str, ...], callers: Callers, signal_received: Callable[[], bool]
    ) -> None:
        self._path, self._plain, self._callers, self._signal_received = path, plain, callers, signal_received

    def reload_on_signal(self) -> None:
        """From now on, in the running event loop."""
        if self._path is None:
            return
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload, self._path)
        if self._signal_received():
            self._reload(self._path)

    def _reload(self, path: Path) -> None:
        try:
            named = read_key_file(path)
        except LoadError as error:
            _logger.error("%s; the callers stay as they were", error)
            return
        self._callers.replace((*map(ApiKey.plain, self._plain), *named))
        _logger.warning("--api-keys %s was read again: %d callers", path, len(named))


class _OptionNameFormatter(logging.Formatter):
    """Log lines in the words of the command, whoever wrote them."""

    def format(self, record: logging.LogRecord) -> str:
        return with_option_names(super().format(record))


def log_to_stderr(level: str, log_format: str) -> None:
    """Set up logging of this process, and of those that it will start. log_format: "text" or "json"."""
    if log_format == JSON_FORMAT:
        # Before any of them is started; they are started from many places, and all of them inherit it.
        os.environ[LOG_FORMAT_VARIABLE] = JSON_FORMAT
        log_as_json("server", level, words=with_option_names, fields=RequestFields())
        return
    os.environ.pop(LOG_FORMAT_VARIABLE, None)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OptionNameFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def changed_options(engine: EngineOptions, server: ServerOptions) -> list[str]:
    """The options, as written, that change how answers come about or what requests may ask for, as far as they are set."""
    return [
        option
        for option, given in (
            ("--deterministic", engine.deterministic),
            (f"--speculative-ngram {engine.speculative_ngram}", engine.speculative_ngram > 0),
            (f"--speculative-model {engine.speculative_model}", engine.speculative_model is not None),
            ("--speculative-mtp", engine.speculative_mtp),
            (f"--rope-ladder {','.join(engine.rope_ladder or ())}", bool(engine.rope_ladder)),
            (f"--rope-update {engine.rope_update}", engine.rope_update is not None),
            (f"--rope-policy {server.rope_policy}", server.rope_policy != ServerOptions().rope_policy),
            ("--rope-exact", server.rope_exact),
            (f"--context-overflow {server.context_overflow}", server.context_overflow != "stop"),
            (f"--keep-tokens {server.keep_tokens}", server.keep_tokens is not None),
            (f"--attention-window {server.attention_window}", server.attention_window is not None),
            (f"--attention-sinks {server.attention_sinks}", server.attention_sinks > 0),
            (f"--cache-reuse {server.cache_reuse}", server.cache_reuse > 0),
            (f"--shift-context {engine.shift_context}", engine.shift_context is not None),
            (f"--max-total-tokens {engine.max_total_tokens}", engine.max_total_tokens is not None),
            (f"--chat-template {server.chat_template}", server.chat_template is not None),
            (f"--rerank-tokens {','.join(server.rerank_tokens or ())}", bool(server.rerank_tokens)),
            (f"--rerank-template {server.rerank_template}", server.rerank_template is not None),
            (f"--generation-config {server.generation_config}", server.generation_config != "auto"),
            (
                f"--default-chat-template-kwargs {server.default_chat_template_kwargs}",
                server.default_chat_template_kwargs is not None,
            ),
            (f"--tool-call-parser {server.tool_call_parser}", server.tool_call_parser != "auto"),
            (f"--reasoning-parser {server.reasoning_parser}", server.reasoning_parser != "auto"),
        )
        if given
    ]


TRIM_BYTES = 1 << 20  # bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def release_freed_memory() -> None:
    """Have malloc give pieces of LARGE bytes and more back when they are freed.

    Left alone, glibc raises that size to that of the largest piece freed so far, up to 32 MiB: a few large bodies would
    then stay in the process for good. Without effect where there is no glibc.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, TRIM_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_BYTES)


def freeze_startup_objects() -> None:
    """Call it once everything is imported and made: collections then look at what requests made, and take less time."""
    gc.collect()
    gc.freeze()
