"""How many streamed chunks per second the load generator takes on one core: run `python benchmarks/load_generator.py`.

A scripted server in a process of its own sends chunks as a server with many streams would, each in a write of its own, at
rates that rise until the generator no longer keeps up. Processor time per chunk is the figure to compare: it hardly
depends on what else runs. `--client httpx` takes the same chunks with httpx and parses nothing, for comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from typing import Any

import httpx

from windlass.clients.loadtest.load_plan import Lengths, LoadPlan, WorkloadSpec
from windlass.clients.loadtest.runner import measure
from windlass.clients.loadtest.target import Target

_CHUNK = {
    "id": "cmpl-0123456789abcdef",
    "object": "text_completion",
    "created": 1,
    "model": "scripted",
    "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    "usage": None,
}


def serve(chunks: int, rate: float) -> int:
    """Answer every generation request with so many chunks at so many per second; prints the port."""

    def event(payload: Any) -> bytes:
        data = b"data: " + (payload if isinstance(payload, bytes) else json.dumps(payload).encode()) + b"\n\n"
        return b"%x\r\n%b\r\n" % (len(data), data)

    choice = {**_CHUNK["choices"][0], "finish_reason": "length"}  # type: ignore[index]
    usage = {"prompt_tokens": 1, "completion_tokens": chunks, "total_tokens": chunks + 1}
    one = event(_CHUNK)
    last = event({**_CHUNK, "choices": [choice]}) + event({**_CHUNK, "choices": [], "usage": usage}) + event(b"[DONE]")

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                if head.startswith("get /v1/models"):
                    body = b'{"data":[{"id":"scripted"}]}'
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
                    continue
                length = int(head.partition("content-length:")[2].partition("\r\n")[0] or 0)
                await reader.readexactly(length)
                if not head.startswith(("post /v1/completions", "post /v1/chat")):
                    writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
                    continue
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                )
                due = loop.time()
                for _ in range(chunks - 1):
                    writer.write(one)
                    due += 1 / rate
                    await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(last + b"0\r\n\r\n")
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    asyncio.run(main())
    return 0


def with_generator(url: str, streams: int, chunks: int) -> dict[str, Any]:
    """One run of the load generator."""
    spec = WorkloadSpec(input_len=Lengths.fixed(8), output_len=Lengths.fixed(chunks), ignore_eos=False)
    plan = LoadPlan(target=Target(url=url), workload=spec, concurrency=streams, count=streams, text_prompts=True)
    result = measure(plan)
    generator = result.generator
    rate = generator["chunks_per_second"]
    return {
        "chunks_per_second": rate,
        "cpu_us_per_chunk": generator["cpu_share"] / rate * 1e6,
        "cpu_share": generator["cpu_share"],
        "busy_share": generator["busy_share"],
        "loop_lag_p99_ms": generator["loop_lag_ms"]["p99"],
        "limited": generator["limited"],
        "completed": len(result.completed),
    }


def with_httpx(url: str, streams: int, chunks: int) -> dict[str, Any]:
    """The same streams by httpx, counting events and looking at nothing."""

    async def one(client: httpx.AsyncClient) -> int:
        count = 0
        async with client.stream("POST", url + "/v1/completions", json={"prompt": "x", "stream": True}) as response:
            async for data in response.aiter_bytes():
                count += data.count(b"data: ")
        return count

    async def main() -> int:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=limits, trust_env=False) as client:
            return sum(await asyncio.gather(*(one(client) for _ in range(streams))))

    begin, cpu = time.monotonic(), time.process_time()
    count = asyncio.run(main())
    seconds, spent = time.monotonic() - begin, time.process_time() - cpu
    return {
        "chunks_per_second": count / seconds,
        "cpu_us_per_chunk": spent / count * 1e6,
        "cpu_share": spent / seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="streams at once")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each run")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[1000, 2000, 4000, 8000, 16000], help="chunks per second"
    )
    parser.add_argument("--client", choices=["generator", "httpx"], default="generator")
    parser.add_argument("--core", type=int, help="keep the generator on this core and the server off it")
    parser.add_argument("--serve", nargs=2, metavar=("CHUNKS", "RATE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(int(options.serve[0]), float(options.serve[1]))
    cores = os.sched_getaffinity(0)
    if options.core is not None:
        os.sched_setaffinity(0, {options.core})
    take = with_generator if options.client == "generator" else with_httpx
    for rate in options.rates:
        per_stream = rate / options.streams
        chunks = max(2, round(options.seconds * per_stream))
        command = [sys.executable, __file__, "--serve", str(chunks), str(per_stream)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                if options.core is not None and len(cores) > 1:
                    os.sched_setaffinity(server.pid, cores - {options.core})
                assert server.stdout is not None
                url = f"http://127.0.0.1:{int(server.stdout.readline())}"
                measured = take(url, options.streams, chunks)
            finally:
                server.kill()
        print(json.dumps({"offered_chunks_per_second": rate, **measured}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
