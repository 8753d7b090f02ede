"""What a prompt costs after a restart, computed and brought back from files (`--kv-persist`), and what writing costs streams.

    python benchmarks/persisted_prefix.py MODEL [--tokens 4000] [--repeats 3] [--kv-cache-dtype float32 …] [--out FILE.json]

MODEL is a directory or a GGUF file. Every measurement is a process of its own, warmed up, whose first request is the prompt
of so many random tokens and one block more; the time is that to its first token. Ways go in turns: computed without a folder,
computed with an empty one, brought back, and brought back after the system was told to forget what it holds of the files.
Behind each prompt one stream decodes 200 tokens: the median and the 99th percentile of its steps tell what writing beside them
costs. Times are medians of the repeats; a run beside which others used the machine is made again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from harness.machine import describe
from harness.quiet import quiet

WAYS = ("computed", "computed, written", "from memory", "from disk")
_MARK = "result: "


def measure(options: argparse.Namespace) -> None:
    """In a process of its own: one line of JSON."""
    from windlass.engine.core.engine_core import EngineCore
    from windlass.engine.interface.config import CacheConfig, ComputeConfig, EngineConfig, SchedulerConfig
    from windlass.engine.interface.request import EngineRequest, SamplingParams
    from windlass.server.startup.derived_files import derive_gguf_directory, is_gguf

    model = derive_gguf_directory(options.model) if is_gguf(options.model) else options.model
    persist = None if options.folder is None else str(options.folder)
    core = EngineCore(
        EngineConfig(
            model=str(model),
            max_model_len=options.tokens + 512,
            compute=ComputeConfig(device="cpu"),
            cache=CacheConfig(dtype=options.kv_cache_dtype[0], memory=2 << 30, persist=persist, persist_size=None),
            scheduling=SchedulerConfig(burst_seconds=0.0),  # a step is a token
        )
    )
    core.warm_up()
    time.sleep(1.5)  # as long as a server waits for its first request, at least
    numbers = random.Random(0)
    prompt = [numbers.randrange(1000, core.info.vocab_size) for _ in range(options.tokens + core.info.block_size)]
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=201)
    began = time.perf_counter()
    core.add(EngineRequest("a", prompt, sampling))
    first, cached, count, steps = 0.0, 0, 0, list[float]()
    while core.has_work():
        at = time.perf_counter()
        for output in core.step():
            count += len(output.token_ids)
            first = first or time.perf_counter() - began
            cached = output.cached_tokens
        if count > 1:
            steps.append(time.perf_counter() - at)
    written_after = time.perf_counter()
    while core.stats().persist.waiting_blocks:
        time.sleep(0.01)
    result = {
        "seconds": first,
        "cached_tokens": cached,
        "step_median": statistics.median(steps),
        "step_p99": statistics.quantiles(steps, n=100)[98],
        "step_longest": max(steps),
        "writing_went_on": time.perf_counter() - written_after,
    }
    core.close()
    stats = core.stats().persist
    print(_MARK + json.dumps(result | {"read_bytes": stats.read_bytes, "written_bytes": stats.written_bytes}))


def run_once(options: argparse.Namespace, dtype: str, folder: Path | None) -> dict[str, Any]:
    command = [sys.executable, __file__, str(options.model), "--tokens", str(options.tokens), "--measure"]
    command += ["--kv-cache-dtype", dtype, *([] if folder is None else ["--folder", str(folder)])]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    line = next(line for line in done.stdout.splitlines() if line.startswith(_MARK))
    result: dict[str, Any] = json.loads(line.removeprefix(_MARK))
    return result


def forget(folder: Path) -> None:
    """Let the system hold nothing of these files in memory."""
    os.sync()
    for path in folder.rglob("*.safetensors"):
        number = os.open(path, os.O_RDONLY)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def compare(options: argparse.Namespace, dtype: str, folder: Path) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            run, foreign = once(options, dtype, way, folder)
            runs[way].append(run | {"foreign_share": foreign})
    rows = {}
    for way in WAYS:
        rows[way] = {key: statistics.median(run[key] for run in runs[way]) for key in runs[way][0]}
        shown = rows[way]
        print(
            f"{dtype:9} {way:18} first token {shown['seconds']:7.3f} s  cached {shown['cached_tokens']:5.0f}  "
            f"step {1e3 * shown['step_median']:6.2f} ms, p99 {1e3 * shown['step_p99']:6.2f}  "
            f"times {rows['computed']['seconds'] / shown['seconds']:.1f}",
            flush=True,
        )
    return {"kv_cache_dtype": dtype, "ways": rows}


def once(options: argparse.Namespace, dtype: str, way: str, folder: Path) -> tuple[dict[str, Any], float]:
    """One run, and the share of the machine that others had meanwhile."""

    def run() -> dict[str, Any]:
        if way == "computed, written":
            shutil.rmtree(folder, ignore_errors=True)
        if way == "from disk":
            forget(folder)
        return run_once(options, dtype, None if way == "computed" else folder)

    found, foreign, _ = quiet(run, options.max_foreign, options.retries, 5.0)
    return found, foreign


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["float32", "bfloat16", "int8"])
    parser.add_argument("--folder", type=Path, help="where files are kept; default: a temporary folder")
    parser.add_argument("--max-foreign", type=float, default=0.05, help="share of the machine that others may use")
    parser.add_argument("--retries", type=int, default=4)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)) / "kept"
        found = [compare(options, dtype, folder) for dtype in options.kv_cache_dtype]
    if options.out is not None:
        report = {
            "date": str(datetime.datetime.now(datetime.UTC).date()),
            "machine": describe(),
            "tokens": options.tokens,
        }
        options.out.write_text(json.dumps(report | {"repeats": options.repeats, "dtypes": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
