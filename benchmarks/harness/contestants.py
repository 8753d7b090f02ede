"""Contestants: Windlass, ik_llama.cpp, llama.cpp and OpenVINO GenAI, which measure the same rows on the same GGUF file."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.gguf_model import GGUFModel
from harness.worker import Worker, WorkerError

BENCHMARKS = Path(__file__).resolve().parents[1]
_COMMAND_SECONDS = 3600
_SPEED_COLUMN = 7  # S_TG of llama-batched-bench's table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in tokens per second of all streams together.

    decode: `streams` sequences after `tokens` tokens each, `steps` further tokens each. prompt: one prompt of `tokens` tokens.
    cache: f16 means each program's default.
    """

    name: str
    title: str
    kind: Literal["decode", "prompt"]
    tokens: int
    streams: int = 1
    steps: int = 0
    cache: Literal["f16", "q8_0"] = "f16"


ROWS = {
    row.name: row
    for row in (
        Row("decode-1", "decode, 1 stream", "decode", 32, steps=64),
        Row("decode-8", "decode, 8 streams", "decode", 32, streams=8, steps=32),
        Row("decode-32", "decode, 32 streams", "decode", 32, streams=32, steps=16),
        Row("prompt-512", "prompt of 512", "prompt", 512),
        Row("prompt-2048", "prompt of 2,048", "prompt", 2048),
        Row("depth-16384", "decode after 16,384, 8-bit cache", "decode", 16384, steps=16, cache="q8_0"),
    )
}

_MOST_TOKENS = max(row.streams * (row.tokens + row.steps + 64) for row in ROWS.values())


class Contestant(ABC):
    """A program, which runs one command per sample unless it is started. Methods raise WorkerError, with the reason.

    install: command that installs it.
    """

    program: str
    install: str

    def __init__(self, model: GGUFModel, threads: int, work: Path) -> None:
        self.model, self.threads, self.work = model, threads, work
        self.version = "unknown"

    @abstractmethod
    def start(self, cache: str) -> None:
        """Prepare for rows with this cache."""

    @abstractmethod
    def command(self, row: Row) -> list[str]:
        """The command that measures a row."""

    @abstractmethod
    def measure(self, row: Row, prepared: Callable[[], None]) -> float:
        """Tokens per second. Calls `prepared` right before the timed part, or before its command."""

    def close(self) -> None:
        return

    def _log(self) -> Path:
        folder = self.work / "bench-logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{self.program.lower().replace(' ', '-')}.log"

    def _check_installed(self, *files: Path) -> None:
        missing = [str(file) for file in files if not file.exists()]
        if missing:
            raise WorkerError(f"not installed, no {', '.join(missing)}. To install it: {self.install}")


class _InWorker(Contestant):
    """A contestant that stays loaded in a process."""

    _worker: Worker | None = None
    _command: list[str]

    def start(self, cache: str) -> None:
        path = os.pathsep.join([str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": str(self.threads)}
        self._command = self._worker_command(cache)
        self._worker = Worker(self._command, log=self._log(), environment=environment)
        self.version = str(self._worker.info["version"])

    def command(self, row: Row) -> list[str]:
        return self._command

    @abstractmethod
    def _worker_command(self, cache: str) -> list[str]: ...

    def measure(self, row: Row, prepared: Callable[[], None]) -> float:
        if self._worker is None:
            raise WorkerError("not started")
        request = {"kind": row.kind, "tokens": row.tokens, "streams": row.streams, "steps": row.steps}
        return self._worker.measure(request, prepared)

    def close(self) -> None:
        if self._worker:
            self._worker.close()
            self._worker = None


class Windlass(_InWorker):
    """The engine with scheduling and sampling, without HTTP. kv_cache_dtype: overrides that of the rows."""

    program = "Windlass"
    install = "make serve"

    def __init__(
        self,
        model: GGUFModel,
        threads: int,
        work: Path,
        *,
        kv_cache_dtype: str | None = None,
        most: int = _MOST_TOKENS,
    ) -> None:
        """most: tokens in the cache at once."""
        super().__init__(model, threads, work)
        self._kv_cache_dtype = kv_cache_dtype
        self._memory = int(1.1 * most * 2 * model.cache_bytes("f16"))  # enough for float32

    @property
    def info(self) -> dict[str, Any]:
        """What the engine reports, with byte counts."""
        if self._worker is None:
            raise WorkerError("not started")
        return self._worker.info

    def _worker_command(self, cache: str) -> list[str]:
        dtype = self._kv_cache_dtype or ("int8" if cache == "q8_0" else "auto")
        options: dict[str, Any] = {"threads": self.threads, "kv_cache_memory": self._memory, "kv_cache_dtype": dtype}
        return [sys.executable, "-m", "harness.windlass_worker", str(self.model.directory), json.dumps(options)]


class OpenVINO(_InWorker):
    """The continuous batching pipeline. It converts the file when it loads, and its cache is 8-bit on a CPU by default."""

    program = "OpenVINO GenAI"
    install = "python3 -m venv work/peers/openvino && work/peers/openvino/bin/pip install openvino-genai"

    def _worker_command(self, cache: str) -> list[str]:
        python = self.work / "peers" / "openvino" / "bin" / "python"
        self._check_installed(python)
        options = {"threads": self.threads, "vocab": self.model.vocab}
        return [str(python), "-m", "harness.openvino_worker", str(self.model.file), json.dumps(options)]


class LlamaCpp(Contestant):
    """llama-bench, and llama-batched-bench for several streams. The file is read for every sample, outside the clock."""

    program = "llama.cpp"
    repository = "ggml-org/llama.cpp"

    def __init__(self, model: GGUFModel, threads: int, work: Path) -> None:
        super().__init__(model, threads, work)
        source, build = f"work/peers/src/{self.program}", f"work/peers/{self.program}-build"
        self.install = (
            f"git clone --depth 1 https://github.com/{self.repository} {source} && "
            f"cmake -S {source} -B {build} -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DBUILD_SHARED_LIBS=OFF "
            "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF && "
            f"cmake --build {build} -j --target llama-bench llama-batched-bench"
        )

    def _tool(self, name: str) -> Path:
        return self.work / "peers" / f"{self.program}-build" / "bin" / name

    def start(self, cache: str) -> None:
        self._check_installed(self._tool("llama-bench"), self._tool("llama-batched-bench"))

    def command(self, row: Row) -> list[str]:
        name = "llama-bench" if row.streams == 1 else "llama-batched-bench"
        command = [str(self._tool(name)), "-m", str(self.model.file), "-t", str(self.threads)]
        if row.streams > 1:
            # A stream has a multiple of 256 cells; what does not fit the context is silently left out.
            context = row.streams * -(-(row.tokens + row.steps) // 256) * 256
            command += ["-c", str(context), "-npp", str(row.tokens), "-ntg", str(row.steps), "-npl", str(row.streams)]
            return [*command, *self._batched_options]
        command += ["-o", "json", "-r", "1", *self._bench_options]
        if row.cache == "q8_0":
            command += ["-ctk", "q8_0", "-ctv", "q8_0", "-fa", "1"]
        if row.kind == "prompt":
            return [*command, "-p", str(row.tokens), "-n", "0"]
        return [*command, *self._decode_options(row)]

    _bench_options: tuple[str, ...] = ()
    _batched_options: tuple[str, ...] = ()

    def _decode_options(self, row: Row) -> list[str]:
        return ["-p", "0", "-n", str(row.steps), "-d", str(row.tokens)]

    def measure(self, row: Row, prepared: Callable[[], None]) -> float:
        prepared()
        for _ in range(3):
            output = self._output(self.command(row), together=row.streams > 1)
            if output.strip():  # the log thread of llama-batched-bench sometimes loses everything
                break
        if row.streams > 1:
            return parse_batched_bench(output)
        value, self.version = parse_bench(output)
        return value

    def _output(self, command: list[str], *, together: bool) -> str:
        """Standard output, `together` with errors, where llama-batched-bench may print its table."""
        log = self._log()
        with log.open("ab") as errors:
            try:
                done = subprocess.run(
                    command,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if together else errors,
                    text=True,
                    timeout=_COMMAND_SECONDS,
                    cwd=log.parent,  # some tools write a file where they run
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise WorkerError(f"{command[0]}: {error}: see {log}") from None
        if done.returncode:
            raise WorkerError(f"{shlex.join(command)} exited with {done.returncode}: see {log}")
        return done.stdout


class IkLlamaCpp(LlamaCpp):
    """The fork. -rtr rearranges the weights for its fastest products."""

    program = "ik_llama.cpp"
    repository = "ikawrakow/ik_llama.cpp"
    _bench_options = ("-rtr", "1")
    _batched_options = ("-rtr",)

    def _decode_options(self, row: Row) -> list[str]:
        return ["-p", "0", "-n", "0", "-gp", f"{row.tokens},{row.steps}"]


CONTESTANTS: tuple[type[Contestant], ...] = (Windlass, IkLlamaCpp, LlamaCpp, OpenVINO)


def parse_bench(output: str) -> tuple[float, str]:
    """(tokens per second, build) of llama-bench's JSON. Raises WorkerError where it has none."""
    try:
        (found,) = json.loads(output)
        (value,) = found["samples_ts"]
        return _positive(float(value), output), f"build {found['build_commit']}"
    except (ValueError, KeyError, TypeError):
        raise WorkerError(f"no tokens per second in the output: {output[-300:]!r}") from None


def parse_batched_bench(output: str) -> float:
    """Tokens per second of all streams together, of the last row of llama-batched-bench's table. Raises WorkerError for none."""
    rows = [line.strip("| ").split("|") for line in output.splitlines() if re.match(r"\| *\d", line)]
    return _positive(float(rows[-1][_SPEED_COLUMN]) if rows else 0.0, output)


def _positive(value: float, output: str) -> float:
    if not math.isfinite(value) or value <= 0:
        raise WorkerError(f"no tokens per second in the output: {output[-300:]!r}")
    return value
