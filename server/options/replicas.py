"""How many engines serve a model: an option of `windlass serve`, and those of `windlass ray deploy`. Starts nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from windlass.engine.errors import LoadError
from windlass.server.options.panels import BATCHING, CLUSTER
from windlass.server.options.spelling import choose, option

MOST_REPLICAS = 1024
LISTENERS = ("ingress", "proxy")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(slots=True, kw_only=True)
class ReplicaOptions:
    """What `windlass serve` takes."""

    replicas: Annotated[
        int,
        option(
            "--replicas",
            panel=BATCHING,
            metavar="N",
            help="Engine processes behind one address, each on its share of the "
            "cores and with a cache of its own, with one copy of the weights; requests go where their beginning is cached.",
        ),
    ] = 1

    def checked(self) -> int:
        """How many; raises LoadError."""
        if not 1 <= self.replicas <= MOST_REPLICAS:
            raise LoadError(f"--replicas must lie between 1 and {MOST_REPLICAS}, got {self.replicas}")
        return self.replicas


@dataclass(slots=True, kw_only=True)
class ClusterOptions:
    """What `windlass ray deploy` takes beside the engine's and the server's options."""

    replicas: Annotated[
        str,
        option(
            "--replicas",
            panel=CLUSTER,
            metavar="N or MIN..MAX",
            help="Engines: so many, or between two numbers, by how many requests they have.",
        ),
    ] = "1"
    address: Annotated[
        str | None,
        option(
            "--address",
            panel=CLUSTER,
            metavar="HOST:PORT",
            help="Where the Ray cluster is. Default: the one that runs on this machine, or RAY_ADDRESS.",
        ),
    ] = None
    name: Annotated[
        str,
        option(
            "--name", panel=CLUSTER, help="Of the application; one of the same name is updated, a replica at a time."
        ),
    ] = "windlass"
    listener: Annotated[
        str,
        option(
            "--listener",
            panel=CLUSTER,
            metavar="ingress or proxy",
            help="Who accepts connections at --host and --port "
            "of the head's machine: the server itself, or Ray's proxy, which passes requests and tokens on.",
        ),
    ] = "ingress"
    target_requests: Annotated[
        int,
        option(
            "--target-requests",
            panel=CLUSTER,
            help="Between two numbers of replicas: requests that each should have, "
            "running and waiting; more of them bring another replica.",
        ),
    ] = 8
    scale_up_seconds: Annotated[
        float, option("--scale-up-seconds", panel=CLUSTER, help="How long there have to be more, before one is added.")
    ] = 10.0
    scale_down_seconds: Annotated[
        float, option("--scale-down-seconds", panel=CLUSTER, help="And fewer, before one is taken away.")
    ] = 300.0

    def count(self) -> tuple[int, int]:
        """The least and the most replicas; raises LoadError."""
        found = re.fullmatch(r"(\d{1,5})(?:\.\.(\d{1,5}))?", self.replicas.strip())
        least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise LoadError(
                f"--replicas must be a number between 1 and {MOST_REPLICAS}, or two such as 2..8, got {self.replicas!r}"
            )
        return least, most

    def check(self) -> None:
        """Raise LoadError for what cannot be meant."""
        self.count()
        choose("--listener", self.listener, LISTENERS)
        if not _NAME.fullmatch(self.name):
            raise LoadError(f"--name must be letters, digits, dots, dashes and underscores, got {self.name!r}")
        if self.target_requests < 1:
            raise LoadError(f"--target-requests must be at least 1, got {self.target_requests}")
        for name in ("scale_up_seconds", "scale_down_seconds"):
            if not 0 <= getattr(self, name) < 86_400:
                raise LoadError(f"--{name.replace('_', '-')} must be 0 or more seconds, got {getattr(self, name):g}")
