"""What choosing among replicas costs: time before a request is sent, time for each token that comes back, and memory.

    python benchmarks/router_cost.py [--prompts 64 512 8192 131072] [--replicas 2 8 64] [--rounds 200] [--out FILE.json]

Engines are replaced by ones that answer at once, so that nothing but the router is measured: the keys of the prompt, the search
in what is remembered of each replica, which is full, and the way of an output through `ReplicatedClient`. Times are of the
processor. At last the same over two processes of a scripted engine, beside one without a router: there they are of the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from harness.machine import describe

from windlass.engine.client.prefix_router import MAX_TRACKED_BLOCKS, PrefixKeys, PrefixRouter, digest_chain
from windlass.engine.client.process_client import ProcessClient
from windlass.engine.client.replicated_client import ReplicatedClient
from windlass.engine.interface.config import EngineConfig, RotaryConfig
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.outputs import RequestOutput
from windlass.engine.interface.request import EngineRequest, SamplingParams

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
CORE = "helpers.scripted_core:SpinningCore"
TOKENS = 20_000  # of a stream without an engine
STREAM = 200  # and of one of a scripted engine


def request(name: str, token_ids: list[int], tokens: int = 1) -> EngineRequest:
    return EngineRequest(name, token_ids, SamplingParams(max_tokens=tokens))


def full_router(replicas: int, block_tokens: int) -> PrefixRouter[int]:
    """One that remembers as much of each replica as it may."""
    router, rng = PrefixRouter[int](block_tokens), random.Random(1)
    for replica in range(replicas):
        for stem in [rng.randbytes(8) for _ in range(16)]:
            router.sent(replica, digest_chain(stem, range(MAX_TRACKED_BLOCKS // 16 * block_tokens), block_tokens))
    return router


def choosing(keys: PrefixKeys, router: PrefixRouter[int], replicas: int, length: int, rounds: int) -> dict[str, float]:
    """Microseconds of the processor for one request; the first half of its prompt is that of others."""
    rng = random.Random(2)
    base = [rng.randrange(50_000) for _ in range(length)]
    prompts = [[*base[: length // 2], *(rng.randrange(50_000) for _ in range(length // 2))] for _ in range(rounds)]
    load = dict.fromkeys(range(replicas), 0)
    took = []
    for number, prompt in enumerate(prompts):
        one = request(str(number), prompt)
        begin = time.process_time_ns()
        digests = keys.of(one)
        router.sent(router.choose(digests, load), digests)
        took.append((time.process_time_ns() - begin) / 1e3)
    return {"replicas": replicas, "prompt": length, "microseconds": round(statistics.median(took), 1)}


class AtOnce:
    """An engine's client whose outputs are there."""

    state, restarts, adapter_ids = "ready", 0, frozenset[int]()

    def __init__(self) -> None:
        self.outputs = [RequestOutput("r", token_ids=(1,)) for _ in range(TOKENS)]

    async def generate(self, asked: EngineRequest) -> AsyncGenerator[RequestOutput, None]:
        for output in self.outputs:
            yield output


async def passing_on() -> float:
    """Microseconds of the processor that a token takes longer behind the router."""
    clients: list[Any] = [AtOnce(), AtOnce()]
    several = ReplicatedClient(clients, EngineConfig(model="none"))
    several._info = info_of()
    for replica in several._replicas:
        await replica.prepare({})
    took: dict[str, list[float]] = {"alone": [], "behind": []}
    for name, source in (("alone", clients[0]), ("behind", several)) * 7:
        begin = time.process_time_ns()
        async for _ in source.generate(request("r", [1] * 64)):
            pass
        took[name].append((time.process_time_ns() - begin) / 1e3 / TOKENS)
    return round(min(took["behind"]) - min(took["alone"]), 3)


def remembered_bytes() -> float:
    """Of one block."""
    router: PrefixRouter[int] = PrefixRouter(32)
    tracemalloc.start()
    router.sent(
        0,
        digest_chain(b"root", range(MAX_TRACKED_BLOCKS * 32), 32) + [os.urandom(16) for _ in range(MAX_TRACKED_BLOCKS)],
    )
    size = tracemalloc.get_traced_memory()[0] / router.num_tracked_blocks
    tracemalloc.stop()
    return round(size, 1)


def info_of() -> ModelInfo:
    from helpers.scripted_core import scripted_info

    return scripted_info(EngineConfig(model="none", max_model_len=1 << 20))


async def _stream(client: Any, name: str, prompt: list[int]) -> tuple[float, float]:
    """Seconds to the first token, and for each further one."""
    begin, first = time.perf_counter(), 0.0
    async for _ in client.generate(request(name, prompt, STREAM)):
        first = first or time.perf_counter()
    return first - begin, (time.perf_counter() - first) / (STREAM - 1)


async def over_processes(rounds: int, length: int) -> dict[str, float]:
    """Milliseconds of the clock, of one engine alone and of two behind a router, in turns."""
    os.environ["PYTHONPATH"] = str(ROOT / "tests")
    config = EngineConfig(model="scripted", max_model_len=1 << 20)
    single = ProcessClient(config, core=CORE)
    several = ReplicatedClient([ProcessClient(config, core=CORE) for _ in range(2)], config)
    rng = random.Random(1)
    took: dict[str, list[tuple[float, float]]] = {"one": [], "two": []}
    try:
        await single.start()
        await several.start()
        for number in range(rounds):
            prompt = [50, *(rng.randrange(1000) for _ in range(length - 1))]
            for name, client in (("one", single), ("two", several)):
                took[name].append(await _stream(client, f"{name}{number}", prompt))
    finally:
        await single.close()
        await several.close()
    found: dict[str, float] = {"prompt": length}
    for name, times in took.items():
        found[f"{name}_first_token_ms"] = round(1e3 * statistics.median(first for first, _ in times), 4)
        found[f"{name}_token_ms"] = round(1e3 * statistics.median(each for _, each in times), 5)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, nargs="+", default=[64, 512, 8192, 131_072])
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 64])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(), "choosing": []}
    keys = PrefixKeys(info_of(), RotaryConfig())
    for replicas in options.replicas:
        router = full_router(replicas, keys.block_tokens)
        for length in options.prompts:
            rounds = max(5, min(options.rounds, 1_000_000 // length))
            found["choosing"].append(choosing(keys, router, replicas, length, rounds))
            print(found["choosing"][-1], flush=True)
    found["microseconds_per_token"] = asyncio.run(passing_on())
    found["bytes_per_block"] = remembered_bytes()
    found["over_processes"] = asyncio.run(over_processes(options.rounds, 512))
    print(json.dumps({name: found[name] for name in ("microseconds_per_token", "bytes_per_block", "over_processes")}))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
