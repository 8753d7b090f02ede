"""The application of a deployment, as `windlass ray deploy` and a Serve config (`import_path`) make it. Connects to nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from windlass.engine.client.prefix_router import MIN_KEY_BLOCK_TOKENS
from windlass.engine.errors import LoadError, did_you_mean
from windlass.server.options.engine import EngineOptions
from windlass.server.options.replicas import ClusterOptions
from windlass.server.options.server import ServerOptions
from windlass.server.startup.ray.call import Start
from windlass.server.startup.ray.door import HEAD, name_of_door
from windlass.server.startup.ray.ingress import Ingress
from windlass.server.startup.ray.replica import EngineReplica
from windlass.server.startup.ray.routing import PrefixRequestRouter
from windlass.server.startup.ray.scaling import by_requests_and_cache

INGRESS_CPUS = 0.5
AFTER_GRACE_SECONDS = 4.0  # for the ingress to end its connections
_NEEDLESS = ("uds", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "record", "access_log")
_PATHS = ("api_key_file", "api_keys", "chat_template", "lora_folder", "crash_dir")


def build(args: Mapping[str, Any]) -> serve.Application:
    """For a Serve config: `args` are `model`, and options of `windlass ray deploy` with underscores. Raises LoadError."""
    given = {name.replace("-", "_"): value for name, value in args.items()}
    model, level = given.pop("model", None), str(given.pop("log_level", "warning"))
    known = {field.name for kind in (EngineOptions, ServerOptions, ClusterOptions) for field in fields(kind)}
    for name in given:
        if name not in known:
            raise LoadError(f"there is no option {name!r}{did_you_mean(name, known)}")

    def of(kind: Any) -> dict[str, Any]:
        return {field.name: _spelt(field.name, given[field.name]) for field in fields(kind) if field.name in given}

    engine, server = EngineOptions(**of(EngineOptions)), ServerOptions(**of(ServerOptions))
    cluster = ClusterOptions(**{"listener": "proxy", **of(ClusterOptions)})
    if cluster.listener != "proxy":
        raise LoadError("listener: in a Serve config Ray's proxies listen; leave it out")
    return application(model, engine, server, cluster, level)


def application(
    model: str | None, engine: EngineOptions, server: ServerOptions, cluster: ClusterOptions, log_level: str
) -> serve.Application:
    """Replicas and the HTTP side in front of them. Raises LoadError for options that cannot be."""
    cluster.check()
    for name in _NEEDLESS:
        if getattr(server, name) != getattr(ServerOptions(), name):
            raise LoadError(
                f"--{name.replace('_', '-')} is of a server by itself, and a deployment has none: leave it out"
            )
    engine.to_config(Path())
    grace = max(server.to_settings("model", engine).grace_seconds, 1.0)
    least, most = cluster.count()
    start = Start(model, engine, server, log_level, most if engine.kv_cache_memory is None else 1)
    itself = cluster.listener == "ingress"
    start = replace(start, door=name_of_door(cluster.name) if itself else None)
    scaling: dict[str, object] = {"num_replicas": least}
    if most > least:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=least,
                max_replicas=most,
                target_ongoing_requests=cluster.target_requests,
                upscale_delay_s=cluster.scale_up_seconds,
                downscale_delay_s=cluster.scale_down_seconds,
                policy=AutoscalingPolicy(policy_function=by_requests_and_cache),
            )
        }
    block_tokens = -(-MIN_KEY_BLOCK_TOKENS // engine.block_size) * engine.block_size
    router = RequestRouterConfig(
        request_router_class=PrefixRequestRouter, request_router_kwargs={"block_tokens": block_tokens}
    )
    cpus, gpus = of_a_replica(engine)
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
        ray_actor_options={"num_cpus": INGRESS_CPUS, "resources": {HEAD: 0.001} if itself else {}},
        max_ongoing_requests=100_000,  # the app has bounds of its own
        graceful_shutdown_timeout_s=grace + AFTER_GRACE_SECONDS,
    )
    return ingress.bind(start, engines.bind(start))


def of_a_replica(engine: EngineOptions) -> tuple[int, int]:
    """The cores and the GPUs that a replica is given."""
    gpus = engine.tensor_parallel if engine.device.startswith("cuda") else 0
    return engine.tensor_parallel * (engine.threads or 1), gpus


def _spelt(name: str, value: Any) -> Any:
    """What YAML says with a number, a string, a list or an object, as the command line has it."""
    if isinstance(value, Mapping):
        return [json.dumps(value)] if name == "rope_profile" else json.dumps(value)
    if name in _PATHS and value is not None:
        return Path(value)
    return str(value) if name == "replicas" else value
