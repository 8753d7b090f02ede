"""Writes down what is known of an engine that died: a file for people, a bounded number of them, without prompts and keys.

Knows the child by what it left and nothing of how it is started again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windlass._version import __version__
from windlass.engine.api.config import EngineConfig
from windlass.engine.api.request import EngineRequest, ModelInfo
from windlass.engine.client.child import ChildProcess

_logger = logging.getLogger("windlass.engine.client")

MAX_REPORTS = 20  # files that are kept; the oldest go
WRITE_SECONDS = 2.0  # a disk that takes longer does not hold up the next engine
PARTIAL_SECONDS = 600.0  # after which nobody writes to an unfinished report any more
STACK_SECONDS = 1.0  # for a child to write its stacks before it is killed
_PREFIX, _SUFFIX = "crash-", ".json"
_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "llguidance")
_INFO = (
    "architecture",
    "dtype",
    "weight_dtype",
    "kv_cache_dtype",
    "quantization",
    "device",
    "num_parameters",
    "num_layers",
    "block_size",
    "num_kv_blocks",
    "max_model_len",
    "max_num_seqs",
    "fingerprint",
)


class CrashReports:
    """folder: where they go, None for nowhere. `last`: the last one."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self.last: Path | None = None

    async def write(
        self,
        child: ChildProcess,
        reason: str,
        config: EngineConfig,
        info: ModelInfo | None,
        requests: Sequence[EngineRequest],
        memory: int | None,
    ) -> str:
        """What a log line says of it: "; crash report: PATH", or nothing. Never raises.

        requests: those that died with it. memory: bytes it had when it was looked at last.
        """
        try:
            stack = child.stacks.read()
            if self._folder is None:
                return f"; its stack: {stack}" if stack else ""
            report = _report(child, reason, config, info, requests, memory, stack)
            path = await asyncio.wait_for(asyncio.to_thread(_write, self._folder, report), WRITE_SECONDS)
        except Exception as error:  # no thread can be started, …: another engine matters more
            cause = "the disk is too slow" if isinstance(error, TimeoutError) else str(error) or repr(error)
            _logger.warning("no crash report in %s: %s", self._folder, cause)
            return ""
        self.last = path
        return f"; crash report: {path}"


def _report(
    child: ChildProcess,
    reason: str,
    config: EngineConfig,
    info: ModelInfo | None,
    requests: Sequence[EngineRequest],
    memory: int | None,
    stack: str,
) -> dict[str, Any]:
    code = child.process.poll()
    return {
        "windlass_crash": 1,
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "reason": reason,
        "end": child.describe_end(),
        "exit_code": code if code is not None and code >= 0 else None,
        "signal": _signal_name(code),
        "pid": child.process.pid,
        "versions": _versions(),
        "machine": {"system": platform.platform(), "processor": platform.machine(), "cores": os.cpu_count()},
        "memory": {"engine": memory, **_system_memory()},
        "configuration": asdict(config),
        "model": None if info is None else {name: getattr(info, name) for name in _INFO},
        "plans": child.recorder.read(),
        "requests": [_shape(request) for request in requests],
        "stack": stack.splitlines(),
    }


def _shape(request: EngineRequest) -> dict[str, Any]:
    scaling = request.rope_scaling
    return {
        "request_id": request.request_id,
        "prompt_tokens": len(request.prompt_token_ids),
        "max_tokens": request.sampling.max_tokens,
        "samples": request.sampling.n,
        "scaling": None if scaling is None else scaling.to_dict(),
        "context": asdict(request.context),
        "grammar": request.sampling.grammar is not None,
        "pooling": request.pooling is not None,
        "adapter": request.adapter,
        "priority": request.priority,
    }


def _signal_name(code: int | None) -> str | None:
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return str(-code)


def _versions() -> dict[str, str | None]:
    """Read off what is installed: this process imports none of it."""
    found: dict[str, str | None] = {"windlass": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _system_memory() -> dict[str, int]:
    """Bytes, as far as the system tells."""
    wanted = {"MemTotal": "total", "MemAvailable": "available", "SwapFree": "free_swap"}
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {
        wanted[name]: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in lines)
        if name in wanted
    }


def _write(folder: Path, report: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{report['pid']}{_SUFFIX}"
    path, partial = folder / name, folder / f".{name}.partial"
    _remove_partials(folder)
    # Not to be read by others at any time, and no half of it stays where the disk is full.
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as text:
            text.write(json.dumps(report, indent=1, default=str) + "\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    others = sorted(other for other in folder.glob(f"{_PREFIX}*{_SUFFIX}") if other != path)  # a clock may be set back
    for old in others[: max(0, len(others) + 1 - MAX_REPORTS)]:
        old.unlink(missing_ok=True)
    return path


def _remove_partials(folder: Path) -> None:
    """Remove what writers that were killed have left; of others that still write there is none so old."""
    for left in folder.glob(f".{_PREFIX}*.partial"):
        with contextlib.suppress(OSError):  # gone meanwhile, or somebody else's
            if time.time() - left.stat().st_mtime > PARTIAL_SECONDS:
                left.unlink()
