"""Cost and gain of two ranks on this machine: sums over ranks, and steps of a model in one process and in two.

    python benchmarks/tensor_parallel.py [MODEL] [--ranks 2] [--threads 2] [--rounds 3] [--quantization none int8]
        [--out FILE.json]

The sums are those of a step (tokens times the hidden size), in shared memory and by gloo of torch.distributed. The model runs
with all threads in one process, and with as many in all ranks together, in turns. Each run is a new process, and the fastest
round counts.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness.machine import describe

from windlass.engine.process_setup import create_memory_file
from windlass.kernels import shared_memory_bytes
from windlass.server.startup.model_files import choose_model

HIDDEN = 576  # of SmolLM2 135M

SUMS = {1: 3000, 16: 1000, 512: 60}  # how often
RUNS = ((1, 64), (8, 32))  # requests at once, tokens that each decodes
PROMPT = 512
_RANK = """
import json, os, statistics, sys, time
import torch
rank, ranks, way, memory, port, sizes, hidden = json.loads(sys.argv[1])
torch.set_num_threads(1)
if way == "gloo":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch.distributed as dist
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    summed = dist.all_reduce
else:
    from windlass import kernels
    summed = kernels.bind("cpu", ranks=kernels.Ranks(memory, rank, ranks, (1,) * ranks)).all_reduce
found = {}
for rows, times in sizes.items():
    x = torch.zeros(int(rows), hidden)
    took = []
    for _ in range(times):
        began = time.perf_counter()
        summed(x)
        took.append(time.perf_counter() - began)
    found[rows] = 1e6 * statistics.median(took)
if rank == 0:
    print(json.dumps(found))
"""
_MODEL = """
import json, sys
from pathlib import Path
from windlass.engine.engine_benchmark import run_engine_benchmark
from windlass.server.config.option_names import from_flat
model, values, run = json.loads(sys.argv[1])
print(json.dumps(run_engine_benchmark(from_flat(model, values), **run)))
"""


def sums(way: str, ranks: int) -> dict[str, float]:
    """Microseconds of a sum, the median, by tokens of the step."""
    memory = create_memory_file(shared_memory_bytes(ranks))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, json.dumps([rank, ranks, way, memory, port, SUMS, HIDDEN])],
            stdout=subprocess.PIPE,
            pass_fds=[memory],
        )
        for rank in range(ranks)
    ]
    out = [process.communicate()[0] for process in running]
    os.close(memory)
    found: dict[str, float] = json.loads(out[0])
    return found


def run_model(model: str, ranks: int, threads: int, quantization: str, batch: int, tokens: int) -> dict[str, Any]:
    """What `run_engine_benchmark` finds, in a process of its own."""
    values = {
        "tensor_parallel": ranks,
        "threads": threads,
        "quantization": quantization,
        "device": "cpu",
        "kv_cache_memory": 512 << 20,
        "max_model_len": 2048,
    }
    run = {"batch_size": batch, "input_len": PROMPT, "output_len": tokens}
    command = [sys.executable, "-c", _MODEL, json.dumps([model, values, run])]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main() -> None:
    """Print what was measured, and write it down where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(), "date": time.strftime("%Y-%m-%d"), "hidden": HIDDEN}
    found["microseconds of a sum"] = {way: sums(way, options.ranks) for way in ("memory", "gloo")}
    print(json.dumps(found["microseconds of a sum"], indent=1), flush=True)
    if options.model is not None:
        path = str(choose_model(options.model)[1])
        found["model"], found["runs"] = options.model, []
        for quantization in options.quantization:
            for batch, tokens in RUNS:
                rounds: dict[int, list[dict[str, Any]]] = {1: [], options.ranks: []}
                for _ in range(options.rounds):
                    for ranks, of_ranks in rounds.items():
                        of_ranks.append(run_model(path, ranks, options.threads // ranks, quantization, batch, tokens))
                for ranks, of_ranks in rounds.items():
                    run = {
                        "quantization": quantization,
                        "requests": batch,
                        "ranks": ranks,
                        "decode_step_milliseconds": min(one["decode_step_milliseconds"] for one in of_ranks),
                        "prefill_tokens_per_second": max(one["prefill_tokens_per_second"] for one in of_ranks),
                        "decode_step_median": statistics.median(one["decode_step_milliseconds"] for one in of_ranks),
                    }
                    found["runs"].append(run)
                    print(json.dumps(run), flush=True)
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
