"""The Ray Serve application: ingress, listener actor, and `windlass ray deploy`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from windlass._version import __version__
from windlass.clients.terminal import print_status
from windlass.engine.client.prefix_router import MIN_KEY_BLOCK_TOKENS
from windlass.engine.errors import LoadError, did_you_mean
from windlass.engine.process_setup import disable_core_dumps
from windlass.server.app.middleware import binding_of, is_loopback_host
from windlass.server.config.engine_options import EngineOptions
from windlass.server.config.migration_hints import moved_option_hint
from windlass.server.config.option import options_of
from windlass.server.config.option_names import with_keyword_names
from windlass.server.config.server_options import ClusterOptions, ServerOptions, check_log_level
from windlass.server.config.settings import Binding
from windlass.server.http.connection_limits import ConnectionSettings, raise_file_limit
from windlass.server.http.listener import listen_tcp
from windlass.server.http.server import HttpServer
from windlass.server.observability.logging import EventLoopMonitor
from windlass.server.startup.launch import make_app, prepare, read_template
from windlass.server.startup.ray.client import RayClient
from windlass.server.startup.ray.replica import EngineReplica, PrefixRequestRouter, scale_by_requests_and_cache
from windlass.server.startup.ray.wire import DeploymentSpec, version_mismatch

NAMESPACE = "windlass"
HEAD_RESOURCE = "node:__internal_head__"  # Ray's name of a resource that only the head node has
INGRESS_CPUS = 0.5
AFTER_GRACE_SECONDS = 4.0  # for the ingress to close its connections
REUSE_SECONDS = 1.0  # for a client to reuse its connection once more and to learn that it closes
CONNECT_SECONDS = 5.0  # to reach the cluster or a deployment
_HANDOVER_SECONDS = 10.0
_ERROR = re.compile(r"(?:LoadError|OptionError|RequestError|RuntimeError|RayServeException): (.+)")


class ListenerActor:
    """Ray actor on the head node that holds a listening socket across updates of a deployment.

    Ray calls its methods in one thread.
    """

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._address: tuple[str, int] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="windlass-door-"))  # private to this user
        self._path = self._folder / "socket"
        self._handover_socket = socket.socket(socket.AF_UNIX)
        self._handover_socket.bind(str(self._path))
        self._handover_socket.listen()
        threading.Thread(target=self._hand_over, name="listener-handover", daemon=True).start()

    def open(self, host: str, port: int) -> str | None:
        """Listen at this address only. Returns the error message if that is impossible."""
        if self._address == (host, port):
            return None
        try:
            listener = listen_tcp(host, port)
        except LoadError as error:
            return str(error)
        before, self._listener = self._listener, listener
        self._address = host, port
        if before is not None:
            before.close()
        return None

    def path(self) -> str:
        """The Unix socket at which processes of this user on this machine receive the listening socket."""
        return str(self._path)

    def close(self) -> None:
        """Stop listening and remove the folder."""
        if self._listener is not None:
            self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _hand_over(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                peer, _ = self._handover_socket.accept()
                with peer:
                    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                    if uid == os.getuid() and self._listener is not None:
                        socket.send_fds(peer, [b"."], [self._listener.fileno()])


def open_listener_actor(name: str, host: str, port: int) -> bool:
    """Make the listener actor of a deployment listen. Returns whether it was created now. Raises LoadError."""
    existed = listener_actor_name(name) in {one["name"] for one in ray.util.list_named_actors(all_namespaces=True)}
    listener_actor = (
        ray.remote(ListenerActor)
        .options(
            name=listener_actor_name(name),
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            resources={HEAD_RESOURCE: 0.001},
        )
        .remote()
    )
    problem = ray.get(listener_actor.open.remote(host, port))
    if problem is not None:
        if not existed:
            close_listener_actor(name)
        raise LoadError(problem)
    return not existed


def close_listener_actor(name: str) -> None:
    """Remove the listener actor of a deployment, if any."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        listener_actor = ray.get_actor(listener_actor_name(name), namespace=NAMESPACE)
        ray.get(listener_actor.close.remote())
        ray.kill(listener_actor)


async def fetch_listener(listener_actor: str) -> socket.socket:
    """The listening socket of the actor with this name. Raises RuntimeError."""
    try:
        actor: Any = await asyncio.to_thread(ray.get_actor, listener_actor, namespace=NAMESPACE)
        return await asyncio.to_thread(_fetch, await actor.path.remote())
    except (ValueError, OSError, ray.exceptions.RayError) as error:
        raise RuntimeError(f"the listener of this deployment does not exist ({error}): deploy it again") from None


def listener_actor_name(name: str) -> str:
    """The name of a deployment's listener actor, which exists in running clusters."""
    return f"windlass-door-{name}"


def _fetch(path: str) -> socket.socket:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(_HANDOVER_SECONDS)
        peer.connect(path)
        _, found, _, _ = socket.recv_fds(peer, 1, 1)
    if not found:
        raise OSError("the actor sent no socket")
    return socket.socket(fileno=found[0])


@serve.ingress()
class Ingress:
    """The HTTP side of a deployment. engines: the replicas."""

    async def __init__(self, spec: DeploymentSpec, engines: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        spec.check()
        disable_core_dumps()
        template = read_template(spec.server)
        path, engine, settings = await asyncio.to_thread(prepare, spec.model, spec.engine, spec.server)
        listener = None if spec.listener_actor is None else await fetch_listener(spec.listener_actor)
        if listener is None:
            binding: Binding = "loopback" if is_loopback_host(spec.server.host.lower()) else "network"
        else:
            binding = binding_of(listener)
        settings = replace(settings, binding=binding)
        self._client = RayClient(engines, engine.to_config(Path(path)))
        self._app = make_app(self._client, path, settings, template)
        state = self._app.state.windlass
        await asyncio.to_thread(state.text.spawn)
        await asyncio.to_thread(state.text.wait_loaded)
        await self._client.start()
        self._monitor = EventLoopMonitor(state.observe_event_loop_lag).start()
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._grace = settings.grace_seconds
        if listener is not None:
            limits = ConnectionSettings().capped_by_files(raise_file_limit())
            self._http = HttpServer(
                self._app,
                listener,
                limits,
                max_header_bytes=settings.max_header_bytes,
                max_body_bytes=settings.max_body_bytes,
            )
            self._serving = asyncio.get_running_loop().create_task(self._http.serve(), name="http")

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The app that Serve calls, and shuts down before this object: an empty one if this object serves HTTP itself."""
        return self._app if self._http is None else FastAPI()

    async def check_health(self) -> None:
        """Raise if the HTTP server has ended: Serve then starts another ingress."""
        if self._serving is not None and self._serving.done():
            raise RuntimeError("the HTTP server ended")

    async def __del__(self) -> None:
        """Finish responses that have begun. Serve awaits this before it ends the process."""
        if self._http is None or self._serving is None:
            return
        self._http.retire()
        busy_at = time.monotonic()
        deadline = busy_at + self._grace
        while (now := time.monotonic()) < min(deadline, busy_at + REUSE_SECONDS):
            if self._app.state.windlass.in_flight:
                busy_at = now
            await asyncio.sleep(0.05)
        await self._http.stop(max(0.0, deadline - time.monotonic()))
        await asyncio.wait({self._serving}, timeout=2.0)

    async def version(self) -> str:
        """The version of Windlass in this process."""
        return __version__


def build(args: Mapping[str, Any]) -> serve.Application:
    """Build the application for a Serve config. Raises LoadError.

    args: `model`, and options of `windlass ray deploy` with hyphens or underscores.
    """
    given = {name.replace("-", "_"): value for name, value in args.items()}
    model, level = given.pop("model", None), str(given.pop("log_level", "warning"))
    known = {name for kind in (EngineOptions, ServerOptions, ClusterOptions) for name in options_of(kind)}
    for name in given:
        if name not in known:
            moved = moved_option_hint(None, name)
            hint = did_you_mean(name, known) if moved is None else f": {moved}"
            raise LoadError(with_keyword_names(f"there is no option {name!r}{hint}"))

    def of(kind: Any) -> dict[str, Any]:
        return {name: given[name] for name in options_of(kind) if name in given}

    try:
        # The proxies listen at the address of the config's `http_options`, which is not known here.
        engine, server = EngineOptions(**of(EngineOptions)), ServerOptions(**{"host": "0.0.0.0", **of(ServerOptions)})
        cluster = ClusterOptions(**{"listener": "proxy", **of(ClusterOptions)})
        if cluster.listener != "proxy":
            raise LoadError("`listener`: with a Serve config, Ray's proxies listen: leave it out")
        return application(model, engine, server, cluster, level)
    except LoadError as error:
        raise LoadError(with_keyword_names(str(error))) from None


def application(
    model: str | None, engine: EngineOptions, server: ServerOptions, cluster: ClusterOptions, log_level: str
) -> serve.Application:
    """Replicas and the HTTP side in front of them. Raises LoadError for unsupported options."""
    for each in options_of(server).values():
        if not each.in_ray and getattr(server, each.name) != each.default:
            raise LoadError(f"`{each.name}` applies only to a server without Ray: leave it out")
    engine.to_config(Path())
    grace = max(server.to_settings("model", engine).grace_seconds, 1.0)
    least, most = cluster.replica_bounds()
    has_own_listener = cluster.listener == "ingress"
    spec = DeploymentSpec(
        model,
        engine,
        server,
        log_level,
        engines_per_machine=most if engine.kv_cache_memory is None else 1,
        listener_actor=listener_actor_name(cluster.name) if has_own_listener else None,
    )
    scaling: dict[str, object] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                target_ongoing_requests=cluster.target_requests,
                upscale_delay_s=cluster.scale_up_seconds,
                downscale_delay_s=cluster.scale_down_seconds,
                policy=AutoscalingPolicy(policy_function=scale_by_requests_and_cache),
            )
        }
    block_tokens = -(-MIN_KEY_BLOCK_TOKENS // engine.block_size) * engine.block_size
    router = RequestRouterConfig(
        request_router_class=PrefixRequestRouter, request_router_kwargs={"block_tokens": block_tokens}
    )
    cpus, gpus = replica_resources(engine)
    engines = serve.deployment(EngineReplica).options(
        name="Engine",
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        max_ongoing_requests=engine.max_num_seqs + engine.max_waiting,
        graceful_shutdown_timeout_s=grace,
        graceful_shutdown_wait_loop_s=0.2,
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        request_router_config=router,
        **scaling,
    )
    ingress = serve.deployment(Ingress).options(
        name="Ingress",
        ray_actor_options={"num_cpus": INGRESS_CPUS, "resources": {HEAD_RESOURCE: 0.001} if has_own_listener else {}},
        max_ongoing_requests=100_000,  # the app has its own limits
        graceful_shutdown_timeout_s=grace + AFTER_GRACE_SECONDS,
    )
    return ingress.bind(spec, engines.bind(spec))


def replica_resources(engine: EngineOptions) -> tuple[int, int]:
    """Cores and GPUs of a replica."""
    gpus = engine.tensor_parallel if engine.device.startswith("cuda") else 0
    return engine.tensor_parallel * (engine.threads or 1), gpus


def deploy(
    model: str | None, engine: EngineOptions, server: ServerOptions, cluster: ClusterOptions, log_level: str
) -> None:
    """Create or update the deployment of this name, and return when it serves. Raises LoadError, one line."""
    app = application(model, engine, server, cluster, check_log_level(log_level))
    least, most = cluster.replica_bounds()
    read_template(server)
    _, engine, settings = prepare(model, engine, server)
    with connect_to_cluster(cluster.address):
        has_own_listener = cluster.listener == "ingress"
        _check_capacity(least, *replica_resources(engine), INGRESS_CPUS if has_own_listener else 0.0)
        _check_version(cluster.name)
        running = cluster.name in serve.status().applications
        if has_own_listener:
            serve.start(proxy_location="Disabled")
            open_listener_actor(cluster.name, server.host, server.port)
        else:
            serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=server.host, port=server.port))
        try:
            serve.run(app, name=cluster.name, route_prefix=None if has_own_listener else server.root_path or "/")
        except (RuntimeError, RayError, RayServeException) as error:
            reason = _reason(cluster.name, error)
            if not running:
                serve.delete(cluster.name)
                close_listener_actor(cluster.name)
            raise LoadError(reason) from None
        if not has_own_listener:
            close_listener_actor(cluster.name)
    several = f"{least} to {most} replicas" if most > least else f"{least} replica{'s' if least > 1 else ''}"
    print_status(
        f"{settings.served_model_name} is served by {several} at http://{server.host}:{server.port}{server.root_path}/v1"
    )


def delete(name: str, address: str | None) -> None:
    """Delete a deployment after its requests have ended. Raises LoadError if there is none."""
    with connect_to_cluster(address):
        if name not in serve.status().applications:
            raise LoadError(f"--name {name}: the cluster has no deployment with this name")
        serve.delete(name)
        close_listener_actor(name)
    print_status(f"{name} is deleted")


@contextlib.contextmanager
def connect_to_cluster(address: str | None) -> Iterator[None]:
    """A connection to the cluster. Raises LoadError if that is impossible."""
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if (found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+?)\]?:(\d+)", wanted)) is not None:
        try:
            socket.create_connection((found[1], int(found[2])), CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise LoadError(
                f"--address {wanted} cannot be reached ({getattr(error, 'strerror', None) or error})"
            ) from None
    elif wanted != "auto":
        raise LoadError(f"--address must be HOST:PORT, got {wanted!r}")
    for logger in ("ray", "ray.serve"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    try:
        ray.init(wanted, namespace="windlass", log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError:
        raise LoadError(
            "no Ray cluster runs on this machine: start one with `ray start --head`, or name another with --address"
            if wanted == "auto"
            else f"--address {wanted} is not a Ray cluster"
        ) from None
    except (RuntimeError, RayError) as error:
        raise LoadError(f"--address {wanted}: {_first_line(error)}") from None
    try:
        yield
    finally:
        # A thread of Ray may still clean up a completed call, and would log that Ray is gone.
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        ray.shutdown()


def _check_capacity(least: int, cpus: int, gpus: int, on_head: float) -> None:
    """Raise LoadError if the minimum number of replicas does not fit on the cluster. on_head: CPUs required on the head node."""
    resources = ray.cluster_resources()
    for what, each, more in (("CPU", cpus, INGRESS_CPUS), ("GPU", gpus, 0.0)):
        if least * each + more > resources.get(what, 0.0):
            for_server = f" and {more:g} for the server" if more else ""
            raise LoadError(
                f"{least} replicas need {least * each} {what}s{for_server}, the cluster has {resources.get(what, 0.0):g}: "
                "use fewer --replicas, or fewer --threads each"
            )
    places = 0
    for machine in (node["Resources"] for node in ray.nodes() if node["Alive"]):
        free = machine.get("CPU", 0.0)
        if HEAD_RESOURCE in machine:
            if free < on_head:
                raise LoadError(
                    f"the server needs {on_head:g} CPUs of the head node, which has {free:g}: start it with more (ray start "
                    "--head --num-cpus=1), or use --listener proxy"
                )
            free -= on_head
        places += int(free // cpus)
    if places < least:
        raise LoadError(
            f"{least} replicas need {cpus} CPUs of one machine each, and only {places} fit: use fewer --replicas, "
            "or fewer --threads or --tensor-parallel each"
        )


def _check_version(name: str) -> None:
    """Raise LoadError if a deployment of this name has another version, whose replicas would run next to new ones."""
    if name not in serve.status().applications:
        return
    try:
        theirs = str(serve.get_app_handle(name).version.remote().result(timeout_s=CONNECT_SECONDS))
    except (RayError, RayServeException, TimeoutError, AttributeError):
        return  # it does not run
    if theirs != __version__:
        raise LoadError(version_mismatch(theirs))


def _reason(name: str, error: Exception) -> str:
    """Why a deployment failed, in one line: the error of the replica itself if Ray's texts contain it."""
    application = serve.status().applications.get(name)
    messages = [] if application is None else [one.message for one in application.deployments.values()]
    errors = _ERROR.findall("\n".join((str(error), *messages)))
    return errors[-1].strip() if errors else f"the deployment {name} failed: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
