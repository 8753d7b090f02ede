"""What goes to a replica for one request, and what comes back. Plain data: knows neither Ray nor engines."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from windlass._version import __version__
from windlass.engine.errors import EngineError
from windlass.engine.interface.model_info import AdapterSource
from windlass.engine.interface.outputs import EngineStats, RequestOutput
from windlass.engine.interface.request import EngineRequest
from windlass.server.options.engine import EngineOptions
from windlass.server.options.server import ServerOptions


@dataclass(frozen=True, slots=True)
class Start:
    """What every process of a deployment starts with. model: as it was named. sharing: engines that may be on one machine.

    door: the name of the actor that holds the listening socket; None where Ray's proxies listen.
    """

    model: str | None
    engine: EngineOptions
    server: ServerOptions
    log_level: str
    sharing: int
    door: str | None = None
    version: str = __version__

    def check(self) -> None:
        """Raise RuntimeError where another version of Windlass runs than has deployed this."""
        if self.version != __version__:
            raise RuntimeError(mixed(self.version))


@dataclass(frozen=True, slots=True)
class Address:
    """Where an ingress listens for outputs (see `lane`). secret: who connects says it first."""

    host: str
    port: int
    secret: bytes


@dataclass(frozen=True, slots=True)
class ReplicaCall:
    """A request on its way. seconds: to its deadline, as clocks differ from machine to machine.

    digests: the keys of its prompt's blocks, of which a replica may remember `most_blocks`. avoid: ids of replicas that could
    not take it. adapter: the one that it names. lane, number: where outputs may go, and the call's number there.
    """

    request: EngineRequest
    seconds: float | None
    digests: tuple[bytes, ...] = ()
    most_blocks: int = 1
    avoid: tuple[str, ...] = ()
    adapter: AdapterSource | None = None
    lane: Address | None = None
    number: int = 0
    version: str = __version__

    @classmethod
    def of(cls, request: EngineRequest) -> ReplicaCall:
        deadline = request.deadline
        return cls(replace(request, deadline=None), None if deadline is None else deadline - time.monotonic())

    def arrived(self) -> EngineRequest:
        """The request by this machine's clock."""
        deadline = None if self.seconds is None else time.monotonic() + self.seconds
        return replace(self.request, deadline=deadline)


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream ended by an error, and where."""

    replica: str
    error: EngineError


@dataclass(frozen=True, slots=True)
class Finished:
    """Nothing more comes this way."""


@dataclass(frozen=True, slots=True)
class Lost:
    """The way by which outputs came is gone. replica: where it led, if that is known."""

    replica: str = ""


Item = list[RequestOutput] | Ended


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """How one replica is. stats: None where its engine has none now. draining ones report too."""

    replica: str
    state: str
    restarts: int
    stats: EngineStats | None = None


def mixed(theirs: str) -> str:
    """What to say where two versions meet."""
    return (
        f"this machine has Windlass {__version__}, the deployment is of {theirs}: install one version on every machine of the "
        "cluster, or delete the deployment first (windlass ray delete)"
    )
