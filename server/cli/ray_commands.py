"""`windlass ray`: deployments on a Ray cluster. Ray is an extra and imported when a command runs."""

from __future__ import annotations

from types import ModuleType
from typing import Annotated

from typer_injector import InjectingTyper

from windlass.clients.terminal import option
from windlass.engine.errors import LoadError
from windlass.server.cli.parameters import (
    BriefHelp,
    Cluster,
    Engine,
    LogLevel,
    ModelArgument,
    Server,
    help_all_option,
    variable_option,
)
from windlass.server.config.option import Panel

app = InjectingTyper(help="Serve a model on a Ray cluster.", no_args_is_help=True)


@app.command(cls=BriefHelp)
def deploy(
    engine: Engine,
    server: Server,
    cluster: Cluster,
    model: ModelArgument = None,
    log_level: LogLevel = "warning",
    help_all: Annotated[bool, help_all_option()] = False,
) -> None:
    """Deploy a model, or update the deployment of the same name, and wait until it serves."""
    _deploying().deploy(model, engine, server, cluster, log_level)


@app.command()
def delete(
    name: Annotated[str, option("Name of the deployment.")] = "windlass",
    address: Annotated[
        str | None,
        variable_option("--address", "Address of the Ray cluster.", panel=Panel.CLUSTER, metavar="HOST:PORT"),
    ] = None,
) -> None:
    """Delete a deployment after its running requests have finished."""
    _deploying().delete(name, address)


def _deploying() -> ModuleType:
    try:
        import ray.serve  # noqa: F401
    except ImportError:
        raise LoadError(
            "windlass ray needs Ray: run pip install -c constraints.txt -e '.[ray]' in the clone, on every machine of the cluster"
        ) from None
    from windlass.server.startup.ray import application

    return application
