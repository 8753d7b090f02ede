"""One simulated run of the entire server, with all random decisions of a seed.

Real: the app with its middleware and routes, the HTTP protocol and its limits, admission and callers, streams, the engine client
with its supervisor and watchdog, the messages between processes, the engine's loop, scheduler and paged cache. Simulated: the
operating system (time, sockets, processes, threads) and the model. Tests use `simulate`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from simulation import invariants
from simulation.client import Record, SimulatedClient
from simulation.engine import EngineProcess, SimulatedActivity
from simulation.faults import CLIENTS, Faults
from simulation.invariants import WRITE_SECONDS
from simulation.loop import SimulatedLoop, simulated_time
from simulation.network import Listener, Weather
from simulation.text import SimulatedForkServer, tokenizer
from simulation.workload import ADAPTERS, TokenSampler

from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicatedClient
from windlass.engine.interface.config import AdapterConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from windlass.engine.interface.model_info import AdapterSource
from windlass.server.application import create_app
from windlass.server.config.api_keys import ApiKey
from windlass.server.config.settings import ServerSettings
from windlass.server.http.connection_limits import ConnectionSettings
from windlass.server.http.server import HttpServer

MAX_SECONDS = 3600.0  # of simulated time that a run may take
HANG_SECONDS = 20.0


@dataclass(frozen=True)
class Plan:
    """Random configuration of the server."""

    num_blocks: int
    block_size: int
    max_model_len: int
    scheduling: SchedulerConfig
    concurrency: dict[str, int | None]  # of callers by key; empty: no keys
    max_in_flight: int
    max_connections: int
    keep_alive: float
    window: int
    high_water: int
    clients: int
    asks: int

    @classmethod
    def drawn(cls, rng: random.Random) -> Plan:
        block_size = rng.choice([2, 4, 8])
        num_blocks = rng.choice([12, 16, 24, 48])
        keys = rng.choice([0, 0, 1, 3])
        return cls(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=min(96, num_blocks * block_size),
            scheduling=SchedulerConfig(
                max_num_batched_tokens=rng.choice([6, 16, 64]),
                max_num_seqs=rng.choice([1, 2, 4, 8]),
                max_waiting=rng.choice([1, 4, 100]),
                target_step_seconds=rng.choice([0.0, 0.02]),
                burst_seconds=rng.choice([0.0, 0.02, 0.2]),
                speculation=SpeculationConfig(num_tokens=rng.choice([0, 0, 2]), min_match=1),
            ),
            concurrency={f"key-{number}": rng.choice([None, 1, 2]) for number in range(keys)},
            max_in_flight=rng.choice([2, 6, 100]),
            max_connections=rng.choice([3, 100, 100]),
            keep_alive=rng.choice([0.5, 10.0]),
            window=rng.choice([256, 256, 2048, 65536]),
            high_water=rng.choice([512, 512, 4096, 65536]),
            clients=rng.randint(1, 5),
            asks=rng.randint(1, 4),
        )


@dataclass
class Report:
    """violations: of the guarantees. digest: of all events, equal for the same seed."""

    seed: int
    violations: list[str]
    digest: str
    records: list[Record]
    faults: Faults
    seconds: float
    engines: int
    replicas: int = 1


@dataclass(frozen=True)
class Death:
    """Death of a loaded engine. begun: ids of the requests in its last step or with a token. given: ids of all its requests.
    others: number of engines that were ready."""

    at: float
    begun: frozenset[str]
    given: frozenset[str]
    others: int


@dataclass
class World:
    seed: int
    rng: random.Random
    faults: Faults
    plan: Plan
    replicas: int = 1
    loop: SimulatedLoop = field(init=False)
    listener: Listener = field(init=False)
    records: list[Record] = field(default_factory=list)
    processes: dict[int, EngineProcess] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)
    longest_step: float = 0.0
    stood_still: list[tuple[float, float]] = field(default_factory=list)  # time and duration
    deaths: list[float] = field(default_factory=list)  # of loaded engines
    ready: list[float] = field(default_factory=list)
    cut_off: list[Death] = field(default_factory=list)
    turned_away: set[str] = field(default_factory=set)  # ids of requests for which the queue of an engine was full
    exchanges: dict[str, tuple[float, float | None]] = field(default_factory=dict)  # by id: begin and end in the server
    trace: hashlib._Hash = field(default_factory=hashlib.sha256)

    def __post_init__(self) -> None:
        self.loop = SimulatedLoop(self._thread_delay)
        self.listener = Listener(self.loop)

    # ---- used by the parts ---------------------------------------------------------------------------------------------------
    def violation(self, text: str) -> None:
        self.violations.append(f"at {self.loop.time():.3f}: {text}")

    def happens(self, kind: str, of: str = "") -> bool:
        if kind not in self.faults.rates:
            return False
        happened = self.faults.happens(kind, self.loop.time(), of)
        self.trace.update(f"{self.loop.time():.9f} {kind} {of} {happened}\n".encode())
        return happened

    def new_pid(self, process: EngineProcess) -> int:
        pid = 1000 + len(self.processes)
        self.processes[pid] = process
        return pid

    def engine_died(self, process: EngineProcess) -> None:
        self.deaths.append(self.loop.time())
        others = sum(one.state == "ready" and one._child is not process for one in self.engines)
        begun = frozenset(one.rpartition("-")[0] for one in {*process.last_planned, *process.answered})
        given = frozenset(one.rpartition("-")[0] for one in process.given)
        self.cut_off.append(Death(self.loop.time(), begun, given, others))

    def weather(self, *, calm: bool = False) -> Weather:
        """Return properties of a new connection. calm: between two processes of one machine, without faults."""
        rng = self.rng
        slowest = 0.0005 if calm else rng.choice([0.001, 0.02, 0.2])
        pieces = rng.choice([1000, 10**6]) if calm else rng.choice([30, 300, 300, 10**6])

        def latency() -> float:
            if not calm:
                if self.happens("process stands still"):
                    self._stand_still()
                if self.happens("clock on the wall is set"):
                    self.loop.set_wall_clock(rng.choice([-7200.0, -1.0, 3600.0, 86400.0]))
            late = rng.uniform(0.5, 3.0) if self.happens("piece is late") and not calm else 0.0
            return rng.uniform(0.1, 1.0) * slowest + late

        return Weather(latency, lambda: rng.randint(1, pieces), 10**9 if calm else self.plan.window)

    def _stand_still(self) -> None:
        seconds = self.rng.choice([0.3, 2.0, 30.0])
        self.stood_still.append((self.loop.time(), seconds))
        self.loop.stand_still(seconds)

    def _thread_delay(self, name: str) -> float:
        return self.rng.uniform(0.0001, 0.02)

    # ---- the run ---------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        plan = self.plan
        config = EngineConfig(
            model="simulated",
            scheduling=plan.scheduling,
            adapters=AdapterConfig(sources=_adapters(), max_loaded=4),
            replicas=self.replicas,
        )
        self.engines = [ProcessClient(config, hang_seconds=HANG_SECONDS, max_deaths=1000) for _ in range(self.replicas)]
        self.engine = engine = self.engines[0] if self.replicas == 1 else ReplicatedClient(self.engines, config)
        callers = tuple(
            ApiKey(digest=ApiKey.plain(key).digest, name=key, concurrency=most)
            for key, most in plan.concurrency.items()
        )
        settings = ServerSettings(
            served_model_name="simulated",
            callers=callers,
            max_in_flight=plan.max_in_flight,
            stream_comment_seconds=plan.keep_alive,
            adapters=_adapters(),
            lora_folder=Path(__file__).parent,  # any folder; nothing is read from it
            body_stall_seconds=5.0,
        )
        app = create_app(engine, tokenizer(), settings)
        self.state = app.state.windlass
        self._observe_exchanges()
        connections = ConnectionSettings(
            max_connections=plan.max_connections, max_per_address=100, write_seconds=WRITE_SECONDS, idle_seconds=30.0
        )
        self.server = server = HttpServer(
            app,
            self.listener,  # type: ignore[arg-type]
            connections,
            max_header_bytes=65536,
            max_body_bytes=settings.max_body_bytes,
        )
        server.config.load()
        server.lifespan = server.config.lifespan_class(server.config)
        await engine.start()
        await server.startup()
        token_sampler = self._drawer()
        work = []
        for client in range(plan.clients):
            asks = token_sampler.asks(f"r{client}", plan.asks)
            work.append(self.loop.create_task(SimulatedClient(self, client).run(asks)))
        cuts = self.loop.create_task(self._cut_connections())
        await asyncio.wait(work)
        cuts.cancel()
        self.faults.over = True
        await self._settle()
        await self._probe(token_sampler)
        await self._settle()
        for task in work:
            if task.exception() is not None:
                self.violation(f"a client failed: {task.exception()!r}")
        invariants.check_books(self)
        await server.shutdown()
        await engine.close()
        self.state.close()

    def _observe_exchanges(self) -> None:
        """Record when each exchange begins and ends."""
        state = self.state
        register, unregister = state.register, state.unregister

        def begin(exchange: Any) -> None:
            self.exchanges[exchange._id] = (self.loop.time(), None)
            register(exchange)

        def end(exchange: Any) -> None:
            self.exchanges[exchange._id] = (self.exchanges[exchange._id][0], self.loop.time())
            unregister(exchange)

        state.register, state.unregister = begin, end

    def _drawer(self) -> TokenSampler:
        behaviours = {kind: rate for kind, rate in self.faults.rates.items() if kind in CLIENTS}
        return TokenSampler(self.rng, self.plan.max_model_len, list(self.plan.concurrency), behaviours)

    async def _cut_connections(self) -> None:
        """Reset random connections."""
        rate = self.faults.rates.get("connection is reset", 0.0)
        while rate:
            await asyncio.sleep(self.rng.expovariate(rate * 50))
            open_now = [record for record in self.records if record.end is not None and not record.end.lost]
            if open_now:
                record = self.rng.choice(open_now)
                assert record.end is not None
                self.faults.log.append((self.loop.time(), "connection is reset", record.ask.request_id))
                record.end.reset()

    async def _settle(self) -> None:
        """Wait until no request is in flight and all engines are ready."""
        deadline = self.loop.time() + 400.0
        while self.loop.time() < deadline:
            await asyncio.sleep(1.0)
            idle = not self.state.in_flight and not any(one._router.in_flight for one in self.engines)
            if idle and all(one.state in ("ready", "failed") for one in self.engines):
                break
        await asyncio.sleep(3.0)

    async def _probe(self, token_sampler: TokenSampler) -> None:
        """Send requests that must succeed, as many concurrent ones per caller as permitted."""
        if self.engine.state != "ready":
            return
        clients = []
        for number, (key, most) in enumerate(self.plan.concurrency.items() or [(None, 1)]):
            for each in range(min(most or 1, self.plan.max_in_flight, self.plan.scheduling.max_waiting)):
                ask = token_sampler.plain(f"probe-{number}-{each}", key)
                clients.append(SimulatedClient(self, 100 + 10 * number + each).run([ask]))
            await asyncio.gather(*clients)
            clients.clear()
            await asyncio.sleep(1.0)


def simulate(seed: int, replicas: int = 1) -> Report:
    """Run a seed with a number of engines, and check the guarantees."""
    rng = random.Random(seed)
    world = World(seed, rng, Faults.drawn(rng), Plan.drawn(rng), replicas)
    with _operating_system(world):
        try:
            asyncio.set_event_loop(world.loop)
            world.loop.run_until_complete(asyncio.wait_for(world.run(), MAX_SECONDS))
        except TimeoutError:
            world.violation(f"the run has not ended after {MAX_SECONDS:g} seconds")
        except AssertionError as error:
            world.violation(f"{type(error).__name__}: {error}")
        finally:
            _close(world.loop)
        invariants.check_records(world)
        world.violations += world.loop.failures
    for record in world.records:
        seen = (record.ask.request_id, record.status, record.texts, record.finishes, record.codes, record.ended_at)
        world.trace.update(repr(seen).encode())
    digest = world.trace.hexdigest()
    seconds = world.loop.time()
    return Report(seed, world.violations, digest, world.records, world.faults, seconds, len(world.ready), replicas)


@contextlib.contextmanager
def _operating_system(world: World) -> Iterator[None]:
    """Replace time, processes and process activity. Logging and garbage collection are off."""
    client, text = "windlass.engine.client", "windlass.server.text.workers.pool"
    collecting = gc.isenabled()
    gc.disable()  # finalizers of forgotten generators would run at random times
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with (
            simulated_time(world.loop),
            mock.patch(
                f"{client}.child_process.ChildProcess", lambda *args, **options: EngineProcess(world, *args, **options)
            ),
            mock.patch(f"{client}.supervision.ProcessActivity", lambda pid: SimulatedActivity(world, pid)),
            mock.patch(f"{text}.ForkServer", lambda source: SimulatedForkServer(world, source)),
            mock.patch("simulation.network.HIGH_WATER", world.plan.high_water),
        ):
            yield
    finally:
        logging.disable(level)
        if collecting:
            gc.enable()


def _close(loop: SimulatedLoop) -> None:
    """Cancel remaining tasks silently."""
    tasks = asyncio.all_tasks(loop)
    loop.set_exception_handler(lambda *_: None)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(BaseException):
        loop.run_until_complete(asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 1.0))
    asyncio.set_event_loop(None)
    loop.close()


def _adapters() -> tuple[AdapterSource, ...]:
    return tuple(AdapterSource(1 + number, name, f"/adapters/{name}") for number, name in enumerate(ADAPTERS))
