"""Contestants: Windlass and the installed peers, each of which can start, measure and stop.

A contestant that lacks something raises WorkerError when it starts; the caller decides what to do about it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from harness import llama_cpp
from harness.measures import MOST_STREAMS, Measure
from harness.places import Places
from harness.serving import time_to_ready
from harness.shape import REAL
from harness.worker import Worker, WorkerError

_BENCHMARKS = Path(__file__).resolve().parents[1]
STARTUP_KV_BYTES = 512 << 20
_COMMAND_SECONDS = 7200
Prepared = Callable[[], None]


class Contestant(Protocol):
    """program: Windlass, OpenVINO, llama.cpp or vLLM. weights: a key of WEIGHT_BITS. kv_dtype: what the cache holds, if known.

    slow: takes so long to start that it takes part only when it is named.

    weight_bytes: of what a decode step reads, None where the program does not report it.
    cache: the dtype that its cache has now and its bytes of a token, None where the program does not report it.
    measure returns up to `repeats` samples in tokens per second; more than one where repeating costs extra. It calls
    `prepared` when only the timed part remains, or before its command where it cannot be held there.
    startup returns seconds until ready and peak bytes, or None where the program has no such thing.
    """

    program: str
    name: str
    weights: str
    kv_dtype: str
    slow: bool

    def start(self) -> None: ...
    def version(self) -> str: ...
    def weight_bytes(self) -> float | None: ...
    def cache(self) -> tuple[str, float] | None: ...
    def measure(self, measure: Measure, repeats: int, prepared: Prepared) -> list[float]: ...
    def startup(self) -> tuple[float, int] | None: ...
    def close(self) -> None: ...


class _InWorker(ABC):
    """A contestant that answers in a worker process of its own."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    @abstractmethod
    def _launch(self) -> Worker:
        """A worker that has loaded the model. Raises WorkerError if it cannot be started."""

    def start(self) -> None:
        self._worker = self._launch()

    def version(self) -> str:
        return str(self._started().info["version"])

    def weight_bytes(self) -> float | None:
        return None

    def cache(self) -> tuple[str, float] | None:
        return None

    def measure(self, measure: Measure, repeats: int, prepared: Prepared) -> list[float]:
        return self._started().measure(measure.to_dict(), prepared)

    def startup(self) -> tuple[float, int] | None:
        from harness.machine import peak_memory

        worker = self._launch()
        try:
            for request in (Measure("", "decode", streams=8), Measure("", "prefill", prompt=512)):
                worker.measure(request.to_dict())
            return worker.ready_seconds, peak_memory([worker.process.pid])
        finally:
            worker.close()

    def close(self) -> None:
        if self._worker:
            self._worker.close()
            self._worker = None

    def _started(self) -> Worker:
        if self._worker is None:
            raise WorkerError("not started")
        return self._worker


class WindlassContestant(_InWorker):
    """The engine in a worker process; `windlass serve` for the start-up. dtype: what it computes in."""

    program = "Windlass"
    slow = False

    def __init__(
        self, places: Places, quantization: str, threads: int, kv_dtype: str, kv_gb: float, dtype: str = "auto"
    ) -> None:
        super().__init__()
        self.weights = quantization
        self.kv_dtype = kv_dtype
        self.dtype = dtype
        label = quantization
        if quantization == "none":
            label = "f16" if places.shape in REAL else "bf16"
        self.name = f"Windlass {label}" + (f", {kv_dtype} KV" if kv_dtype != "auto" else "")
        if dtype != "auto":
            self.name += f", computed in {dtype}"
        self._places, self._threads = places, threads
        self._options: dict[str, Any] = {"threads": threads, "kv_cache_memory": int(kv_gb * (1 << 30))}
        self._options["max_num_seqs"] = MOST_STREAMS
        if quantization != "none":
            self._options["quantization"] = quantization
        if kv_dtype != "auto":
            self._options["kv_cache_dtype"] = kv_dtype
        if dtype != "auto":
            self._options["dtype"] = dtype

    def _launch(self) -> Worker:
        command = [sys.executable, "-m", "harness.windlass_worker", str(self._places.model), json.dumps(self._options)]
        return Worker(command, log=_log(self._places, self.name), environment=_environment(self._threads))

    def info(self) -> dict[str, Any]:
        """Properties that the engine reports, with byte counts."""
        return self._started().info

    def version(self) -> str:
        info = self.info()
        return f"{info['version']} with torch {info['torch']}"

    def weight_bytes(self) -> float | None:
        return float(self.info()["weight_bytes"])

    def cache(self) -> tuple[str, float] | None:
        return self.info()["kv_cache_dtype"], float(self.info()["kv_bytes_per_token"])

    def startup(self) -> tuple[float, int] | None:
        options = ["--kv-cache-memory", str(STARTUP_KV_BYTES), "--threads", str(self._threads)]
        if self.weights != "none":
            options += ["--quantization", self.weights]
        if self.kv_dtype != "auto":
            options += ["--kv-cache-dtype", self.kv_dtype]
        if self.dtype != "auto":
            options += ["--dtype", self.dtype]
        return time_to_ready(self._places.model, options, _log(self._places, self.name), _environment(self._threads))


class OpenVINOContestant(_InWorker):
    """OpenVINO GenAI's continuous batching pipeline; its KV cache is u8 on a CPU by default."""

    program = "OpenVINO"
    slow = False
    kv_dtype = "u8"

    def __init__(self, places: Places, weights: str, threads: int, vocab: int) -> None:
        super().__init__()
        self.name, self.weights = f"OpenVINO {weights}", weights
        self._places, self._options = places, {"threads": threads, "vocab": vocab}

    def _launch(self) -> Worker:
        python, model = self._places.openvino_python, self._places.openvino_model(self.weights)
        if python is None:
            raise WorkerError("not installed: no environment peers/openvino in the work folder")
        if not model.exists():
            raise WorkerError(f"no model at {model}: run benchmarks/prepare_peers.py")
        command = [str(python), "-m", "harness.openvino_worker", str(model), json.dumps(self._options)]
        return Worker(command, log=_log(self._places, self.name), environment={"PYTHONPATH": str(_BENCHMARKS)})


class LlamaCppContestant:
    """llama.cpp, or its fork ik_llama.cpp: llama-bench and llama-batched-bench, one command per measure.

    The file is read again each time, outside the clock.
    At depth llama-depth in a worker where it is built, since llama-bench computes what it fills the cache with.
    """

    slow = False
    kv_dtype = "f16; q8_0 at depth"

    def __init__(self, places: Places, weights: str, threads: int, program: str = "llama.cpp") -> None:
        self.program, self._dialect = program, llama_cpp.DIALECTS[program]
        self.name, self.weights = f"{program} {weights.upper()}", weights
        self._places, self._threads = places, threads
        self._version = "unknown"
        self._deep: tuple[Measure, Worker] | None = None  # one cache is filled at a time

    def start(self) -> None:
        for tool in ("llama-bench", "llama-batched-bench"):
            if self._places.llama_tool(tool, self.program) is None:
                raise WorkerError(f"not installed: no {tool} in peers/{self.program}-build/bin of the work folder")
        if not self._places.gguf(self.weights).exists():
            raise WorkerError(f"no model at {self._places.gguf(self.weights)}: run benchmarks/prepare_peers.py")

    def version(self) -> str:
        return self._version

    def weight_bytes(self) -> float | None:
        return float(self._places.gguf(self.weights).stat().st_size)  # but for some megabytes of vocabulary

    def cache(self) -> tuple[str, float] | None:
        return None

    def measure(self, measure: Measure, repeats: int, prepared: Prepared) -> list[float]:
        model = self._places.gguf(self.weights)
        if measure.kind == "depth" and (deep := self._filled(measure)):
            self._version = str(deep.info["version"])
            return deep.measure(measure.to_dict(), prepared)
        prepared()
        if measure.streams > 1:
            tool = self._tool("llama-batched-bench")
            command = llama_cpp.batched_bench_command(tool, model, measure, self._threads, self._dialect)
            # Its log thread sometimes loses everything at exit, the result among it, with status 0.
            outputs = (self._run(command, errors_too=self.program != "llama.cpp") for _ in range(5))
            return llama_cpp.parse_batched_bench(next(filter(str.strip, outputs), ""))
        times = repeats if measure.kind == "depth" else 1
        tool = self._tool("llama-bench")
        output = self._run(llama_cpp.bench_command(tool, model, measure, self._threads, times, self._dialect))
        self._version = llama_cpp.parse_version(output)
        return llama_cpp.parse_bench(output)

    def startup(self) -> tuple[float, int] | None:
        return None

    def close(self) -> None:
        if self._deep:
            self._deep[1].close()
            self._deep = None

    def _filled(self, measure: Measure) -> Worker | None:
        """The worker with the cache for `measure`; None where llama-depth is not built."""
        tool = self._places.llama_tool("llama-depth", self.program)
        if tool is None:
            return None
        if self._deep is None or self._deep[0] != measure:
            self.close()
            command = llama_cpp.depth_command(tool, self._places.gguf(self.weights), measure, self._threads)
            self._deep = (measure, Worker(command, log=_log(self._places, self.name)))
        return self._deep[1]

    def _tool(self, name: str) -> Path:
        tool = self._places.llama_tool(name, self.program)
        if tool is None:
            raise WorkerError(f"not installed: {name}")
        return tool

    def _run(self, command: list[str], *, errors_too: bool = False) -> str:
        """The output of a command. errors_too: with standard error, where some tools print results."""
        log = _log(self._places, self.name)
        with log.open("ab") as errors:  # some tools leave a file of their own where they run
            try:
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if errors_too else errors,
                    text=True,
                    timeout=_COMMAND_SECONDS,
                    cwd=log.parent,
                )
            except subprocess.TimeoutExpired:
                raise WorkerError(f"{command[0]} took longer than {_COMMAND_SECONDS} s: see {log}") from None
            except OSError as error:
                raise WorkerError(f"{command[0]} cannot be started: {error}") from None
        if done.returncode:
            raise WorkerError(f"{command[0]} exited with {done.returncode}: see {log}")
        return done.stdout


class VLLMContestant(_InWorker):
    """vLLM's offline engine for CPUs; compiled as by default, or `eager`, which starts sooner."""

    program = "vLLM"
    slow = True

    def __init__(self, places: Places, weights: str, threads: int, vocab: int, *, eager: bool = False) -> None:
        """weights: bf16 or fp32, in which the cache is too."""
        super().__init__()
        self.name, self.weights = f"vLLM {weights}" + (", eager" if eager else ""), weights
        self.kv_dtype = {"bf16": "bfloat16", "fp32": "float32"}[weights]
        self._places, self._threads = places, threads
        self._options: dict[str, Any] = {"dtype": self.kv_dtype, "eager": eager, "max_model_len": 8192, "vocab": vocab}
        self._options["max_num_seqs"] = MOST_STREAMS

    def _launch(self) -> Worker:
        python = self._places.vllm_python
        if python is None:
            raise WorkerError("not installed: no environment peers/vllm in the work folder")
        script = _BENCHMARKS / "harness" / "vllm_worker.py"
        command = [str(python), str(script), str(self._places.model), json.dumps(self._options)]
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB, as much as OpenVINO gets
            # All in one process: as several, those that wait spin, and on few cores take the time of those that compute.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(self._threads),
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(self._places.work / "peers" / "vllm-cache"),
            "HF_HUB_OFFLINE": "1",
        }
        return Worker(command, log=_log(self._places, self.name), environment=environment, load_seconds=1800.0)


def contestants_for(
    kind: str, places: Places, threads: int, vocab: int, kv_gb: float, kv_dtypes: list[str]
) -> list[Contestant]:
    """All contestants of a group. Missing programs are reported at their start."""
    openvino: list[Contestant] = [OpenVINOContestant(places, w, threads, vocab) for w in ("int8", "int4")]
    llama: list[Contestant] = [
        LlamaCppContestant(places, w, threads, program)
        for program in llama_cpp.DIALECTS
        for w in ("f16", "q8_0", "q4_0", "q4_k_m")
    ]
    if kind == "depth":
        ours: list[Contestant] = [WindlassContestant(places, "int8", threads, kv, kv_gb) for kv in kv_dtypes]
        return [*ours, openvino[0], *(one for one in llama if one.weights == "q8_0")]
    ours = [WindlassContestant(places, w, threads, "auto", kv_gb) for w in ("none", "int8", "int4")]
    ours.append(WindlassContestant(places, "none", threads, "auto", kv_gb, dtype="bfloat16"))
    vllm: list[Contestant] = [
        VLLMContestant(places, "bf16", threads, vocab),
        VLLMContestant(places, "bf16", threads, vocab, eager=True),
        VLLMContestant(places, "fp32", threads, vocab),
    ]
    return [*ours, *openvino, *llama, *vllm]


def _environment(threads: int) -> dict[str, str]:
    inherited = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(_BENCHMARKS), *([inherited] if inherited else [])])
    return {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _log(places: Places, name: str) -> Path:
    folder = places.work / "bench-logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / (name.replace(" ", "-").replace(",", "").lower() + ".log")
