"""Brings a deployment to a Ray cluster, or takes it away. What cannot be is one line, before anything is begun."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterator

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException

from windlass._version import __version__
from windlass.clients.terminal.lines import say
from windlass.engine.errors import LoadError
from windlass.server.options.engine import EngineOptions
from windlass.server.options.replicas import ClusterOptions
from windlass.server.options.server import ServerOptions
from windlass.server.options.spelling import check_log_level
from windlass.server.startup.launch import prepare, read_template
from windlass.server.startup.ray.application import INGRESS_CPUS, application, of_a_replica
from windlass.server.startup.ray.call import mixed
from windlass.server.startup.ray.door import HEAD, close_door, open_door

REACH_SECONDS = 5.0
_ERROR = re.compile(r"(?:LoadError|RequestError|RuntimeError|RayServeException): (.+)")


def deploy(
    model: str | None, engine: EngineOptions, server: ServerOptions, cluster: ClusterOptions, log_level: str
) -> None:
    """Deploy, or update what has this name, and return when it serves. Raises LoadError, one line."""
    made = application(model, engine, server, cluster, check_log_level(log_level))
    least, most = cluster.count()
    read_template(server)
    _, engine, settings = prepare(model, engine, server)
    with connected(cluster.address):
        _check_room(least, *of_a_replica(engine), INGRESS_CPUS if cluster.listener == "ingress" else 0.0)
        _check_version(cluster.name)
        itself = cluster.listener == "ingress"
        running = cluster.name in serve.status().applications
        if itself:
            serve.start(proxy_location="Disabled")
            open_door(cluster.name, server.host, server.port)
        else:
            serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=server.host, port=server.port))
        try:
            serve.run(made, name=cluster.name, route_prefix=None if itself else server.root_path or "/")
        except (RuntimeError, RayError, RayServeException) as error:
            reason = _reason(cluster.name, error)
            if not running:
                serve.delete(cluster.name)
                close_door(cluster.name)
            raise LoadError(reason) from None
        if not itself:
            close_door(cluster.name)
    several = f"{least} to {most} replicas" if most > least else f"{least} replica{'s' if least > 1 else ''}"
    say(
        f"{settings.served_model_name} is served by {several} at http://{server.host}:{server.port}{server.root_path}/v1"
    )


def delete(name: str, address: str | None) -> None:
    """Take a deployment away, after its requests. Raises LoadError where there is none."""
    with connected(address):
        if name not in serve.status().applications:
            raise LoadError(f"--name {name}: no deployment has this name on that cluster")
        serve.delete(name)
        close_door(name)
    say(f"{name} is deleted")


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[None]:
    """A connection to the cluster. Raises LoadError where there is none to be had."""
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if (found := re.fullmatch(r"(?:ray://)?\[?([^/\]]+?)\]?:(\d+)", wanted)) is not None:
        try:
            socket.create_connection((found[1], int(found[2])), REACH_SECONDS).close()
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
            "no Ray cluster runs on this machine: begin one with `ray start --head`, or name another with --address"
            if wanted == "auto"
            else f"--address {wanted} is no Ray cluster"
        ) from None
    except (RuntimeError, RayError) as error:
        raise LoadError(f"--address {wanted}: {_first_line(error)}") from None
    try:
        yield
    finally:
        # A call that has just been answered may still be put away by a thread of Ray, which would log that Ray is gone.
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL)
        ray.shutdown()


def _check_room(least: int, cpus: int, gpus: int, on_head: float) -> None:
    """LoadError where the cluster has no place for the least number of replicas. on_head: cores that the head has to have."""
    there = ray.cluster_resources()
    for what, each, more in (("CPU", cpus, INGRESS_CPUS), ("GPU", gpus, 0.0)):
        if least * each + more > there.get(what, 0.0):
            beside = f" and {more:g} for the server" if more else ""
            raise LoadError(
                f"{least} replicas need {least * each} {what}s{beside}, the cluster has {there.get(what, 0.0):g}: use fewer "
                "--replicas, or fewer --threads each"
            )
    places = 0
    for machine in (node["Resources"] for node in ray.nodes() if node["Alive"]):
        free = machine.get("CPU", 0.0)
        if HEAD in machine:
            if free < on_head:
                raise LoadError(
                    f"the server needs {on_head:g} CPUs of the head's machine, which has {free:g}: begin it with more (ray start "
                    "--head --num-cpus=1), or use --listener proxy"
                )
            free -= on_head
        places += int(free // cpus)
    if places < least:
        raise LoadError(
            f"{least} replicas need {cpus} CPUs of one machine each, and there is room for {places}: use fewer --replicas, "
            "or fewer --threads or --tensor-parallel each"
        )


def _check_version(name: str) -> None:
    """LoadError where a deployment of this name is of another version, replicas of which would run beside those of this one."""
    if name not in serve.status().applications:
        return
    try:
        theirs = str(serve.get_app_handle(name).version.remote().result(timeout_s=REACH_SECONDS))
    except (RayError, RayServeException, TimeoutError, AttributeError):
        return  # it does not run, so that nothing is mixed
    if theirs != __version__:
        raise LoadError(mixed(theirs))


def _reason(name: str, error: Exception) -> str:
    """One line of what Ray says of a deployment that failed: what the replica itself said, where it said something."""
    application = serve.status().applications.get(name)
    messages = [] if application is None else [one.message for one in application.deployments.values()]
    said = _ERROR.findall("\n".join((str(error), *messages)))
    return said[-1].strip() if said else f"the deployment {name} failed: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
