"""What the way through a Ray cluster costs: time to the first token and for each further one, beside `windlass serve`.

    python benchmarks/ray_cost.py [--rounds 30] [--tokens 64] [--streams 16] [--deploy "OPTION ..."] [--out FILE.json]

Starts `windlass serve --replicas N` and a Ray cluster with a deployment of as many replicas (`--deploy`: more options of
`windlass ray deploy`), and asks them in turns: streams one at a time, then many at once. Prompts are never the same, so that
nothing is cached. With --step-ms the engine computes nothing, and what is left is the way. Times are of the clock, so the
machine has to be quiet. Needs the extra `ray`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.machine import describe

from windlass.server.startup.engines import CORE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
OPTIONS = ("--kv-cache-memory", "32MiB", "--max-model-len", "512")
PROMPT = 32
CORE = "helpers.scripted_core:ScriptedCore"


async def stream(url: str, tokens: int, rng: random.Random) -> tuple[float, float]:
    """Seconds to the first token, and for each further one."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    prompt = [50, *(rng.randrange(10, 4000) for _ in range(PROMPT - 1))]
    body = {"prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    begin, first = time.perf_counter(), 0.0
    writer.write(head.encode() + data)
    last = b""
    while b"[DONE]" not in last:
        piece = await reader.read(1 << 16)
        if not piece:
            raise SystemExit(f"error: a stream ended with {last!r}")
        last = last[-300:] + piece
        if not first and b"data: {" in last:
            first = time.perf_counter()
    end = time.perf_counter()
    if b'"finish_reason":"length"' not in last.replace(b" ", b""):
        raise SystemExit(f"error: a stream ended with {last!r}")
    writer.close()
    return first - begin, (end - first) / (tokens - 1)


async def one_by_one(urls: dict[str, str], rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Milliseconds: medians, and the quarter above them begins at p75."""
    rng = random.Random(1)
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in urls}
    for number in range(rounds + 5):
        for name, url in urls.items():
            found = await stream(url, tokens, rng)
            if number >= 5:  # the first ones open connections, fill caches
                took[name].append(found)
    return {
        name: {
            "first_token_ms": round(1e3 * statistics.median(first for first, _ in times), 2),
            "first_token_p75_ms": round(1e3 * statistics.quantiles((first for first, _ in times), n=4)[2], 2),
            "token_ms": round(1e3 * statistics.median(each for _, each in times), 3),
        }
        for name, times in took.items()
    }


async def at_once(url: str, streams: int, tokens: int) -> float:
    """Tokens a second, of all."""
    rng = random.Random(2)
    begin = time.perf_counter()
    await asyncio.gather(*(stream(url, tokens, rng) for _ in range(streams)))
    return streams * tokens / (time.perf_counter() - begin)


def measure(urls: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = asyncio.run(one_by_one(urls, options.rounds, options.tokens))
    for _ in range(3):
        for name, url in urls.items():
            rate = asyncio.run(at_once(url, options.streams, 4 * options.tokens))
            found[name].setdefault("tokens_per_second", []).append(round(rate))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--deploy", type=shlex.split, action="append", default=[])
    parser.add_argument("--step-ms", type=float, help="of a scripted engine in place of the bundled model's")
    parser.add_argument("--burst-ms", default="0", help="with bursts, several tokens are sent at a time")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    from helpers.ray_cluster import ray_cluster
    from helpers.real_server import serve

    os.environ["OMP_NUM_THREADS"] = "1"
    if options.step_ms is not None:
        os.environ |= {CORE_VARIABLE: CORE, "SCRIPT_STEP_SECONDS": str(options.step_ms / 1e3)}
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(ROOT / "tests"))))
    os.environ["WINDLASS_BURST_MS"] = options.burst_ms
    replicas = ("--replicas", str(options.replicas))
    found: dict[str, Any] = {"machine": describe(), "prompt": PROMPT, "tokens": options.tokens}
    with ExitStack() as stack:
        single = stack.enter_context(serve(*replicas, *OPTIONS))
        for more in options.deploy or [[]]:
            with ray_cluster() as cluster:
                cluster.deploy(*replicas, *OPTIONS, *more)
                time.sleep(2)
                found["ray " + " ".join(more)] = measure({"serve": single.url, "ray": cluster.url}, options)
            print(" ".join(more), json.dumps(found["ray " + " ".join(more)]), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
