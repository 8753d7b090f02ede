"""Cost of streaming over HTTP: processor time of the API process per chunk, and tokens per second compared with the bare engine.

    python benchmarks/http_cost.py [--streams 8 64] [--rate 800 40000] [--seconds 5] [--model MODEL --rounds 2] [--out FILE.json]

First a scripted engine makes tokens at each `--rate` (per second, over all streams), which this process reads. Processor time
per chunk hardly depends on other work on the machine; its inverse is the number of chunks that one core can send. At low
rates each chunk also pays for waking the server; the highest rate exceeds what the engine can make. With --model, 16 streams
of a real engine take turns, alone (`windlass bench engine`) and over HTTP (`windlass bench serve`), with prompts of 32 and
answers of 256 tokens. That part needs a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.machine import describe
from harness.serving import Server, serving

from windlass.engine.client.supervision import ProcessActivity
from windlass.server.startup.engines import CORE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
WINDLASS = [sys.executable, "-m", "windlass.server.cli.main"]
STREAMS, PROMPT, ANSWER = 16, 32, 256  # of a real engine
SETTLE = 0.2  # share of a run before which nothing is counted


async def _read(url: str, tokens: int, counted: list[int]) -> None:
    """One stream, whose chunks are counted as they come."""
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    body = {"prompt": [50, 7], "max_tokens": tokens, "stream": True, "temperature": 1}
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += f"content-length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    last = b""
    while b"[DONE]" not in last:
        piece = await reader.read(1 << 16)
        if not piece:
            raise SystemExit("error: the server closed a stream before its end")
        counted[0] += piece.count(b"data: {")  # several tokens where the server falls behind
        last = last[-200:] + piece
    if b'"finish_reason":"length"' not in last:
        raise SystemExit(f"error: a stream ended with {last!r}")
    writer.close()


async def _measure(url: str, pid: int, streams: int, tokens: int, seconds: float) -> dict[str, float]:
    pulse, counted = ProcessActivity(pid), [0]
    reading = [asyncio.create_task(_read(url, tokens, counted)) for _ in range(streams)]
    await asyncio.sleep(SETTLE * seconds)
    pulse.refresh()
    used, began, before = pulse.used_seconds or 0.0, time.monotonic(), counted[0]
    await asyncio.sleep((1 - 2 * SETTLE) * seconds)
    pulse.refresh()
    took, chunks = time.monotonic() - began, counted[0] - before
    used = (pulse.used_seconds or 0.0) - used
    await asyncio.gather(*reading)
    return {
        "streams": streams,
        "chunks_per_second": round(chunks / took, 1),
        "tokens_asked_per_second": round(streams * tokens / seconds, 1),
        "microseconds_per_chunk": round(1e6 * used / chunks, 1),
        "chunks_per_core_second": round(chunks / used, 1),
    }


def cost_of_chunks(streams: int, rate: float, seconds: float) -> dict[str, float]:
    """A server over the scripted engine, read by this process."""
    environment = {
        CORE_VARIABLE: "helpers.scripted_core:ScriptedCore",
        "SCRIPT_STEP_SECONDS": str(streams / rate),
        "PYTHONPATH": str(ROOT / "tests"),
    }
    tokens = max(1, int(rate * seconds / streams))
    options = ["--max-model-len", str(tokens + 16), "--max-num-seqs", str(streams)]
    with _serving(Path("demo"), options, environment) as server:
        return asyncio.run(_measure(server.url, server.pid, streams, tokens, seconds))


def beside_the_engine(
    model: Path, rounds: int, options: list[str], *, streams: int = STREAMS, answer: int = ANSWER
) -> dict[str, list[float]]:
    """Generated tokens per second of the whole run, of the engine alone and over HTTP in turns."""
    found: dict[str, list[float]] = {"engine": [], "http": []}
    options = ["--max-num-seqs", str(streams), *options]
    for _ in range(rounds):
        command = [*WINDLASS, "bench", "engine", str(model), "--json", "--batch-size", str(streams)]
        command += ["--input-len", str(PROMPT), "--output-len", str(answer), *options]
        report = json.loads(_output(command))
        seconds = report["prefill_seconds"] + answer * report["decode_step_milliseconds"] / 1000
        found["engine"].append(round(streams * answer / seconds, 1))
        with _serving(model, options, {}) as server:
            found["http"].append(_of_server(server.url, streams, answer))
    return found


def _of_server(url: str, streams: int, answer: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        command = [*WINDLASS, "bench", "serve", "--url", url, "--json", str(report), "--ignore-eos"]
        command += ["--num-prompts", str(streams), "--concurrency", str(streams)]
        _output([*command, "--input-len", str(PROMPT), "--output-len", str(answer)])
        return round(float(json.loads(report.read_text())["output_tokens_per_second"]), 1)


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout


@contextmanager
def _serving(model: Path, options: list[str], environment: dict[str, str]) -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder, serving(model, options, Path(folder, "log"), environment) as server:
        yield server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--rate", nargs="+", type=float, default=[800.0, 40_000.0], help="tokens a second in all")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    report: dict[str, Any] = {"machine": describe(), "date": time.strftime("%Y-%m-%d"), "chunks": []}
    for streams, rate in product(options.streams, options.rate):
        found = cost_of_chunks(streams, rate, options.seconds)
        report["chunks"].append(found)
        print(
            f"{streams} streams, {rate:,.0f} tokens/s: {found['chunks_per_second']:,.0f} chunks/s, "
            f"{found['microseconds_per_chunk']} us of processor each: {found['chunks_per_core_second']:,.0f} a second on one core"
        )
    if options.model is not None:
        both = beside_the_engine(options.model, options.rounds, [])
        report["model"], report["tokens_per_second"] = str(options.model), both
        engine, http = (statistics.median(both[name]) for name in ("engine", "http"))
        print(f"{STREAMS} streams: engine {engine:,.1f} tokens/s, over HTTP {http:,.1f}: {100 * http / engine:.1f} %")
    if options.out is not None:
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
