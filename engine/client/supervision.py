"""Engine supervision: a watchdog that distinguishes a stuck child from a slow one, and crash reports.

The watchdog uses /proc (Linux; elsewhere only the hang timeout works) and the expected time of the step. Crash reports are a
bounded number of files, without prompts and keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windlass._version import __version__
from windlass.engine.client.child_process import ChildProcess
from windlass.engine.core.messages import ANNOUNCE_SECONDS, Message, StepDone, StepStarted
from windlass.engine.host_resources import read_table
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest
from windlass.engine.process_setup import signal_name

_logger = logging.getLogger("windlass.engine.client")

# -- activity of a process ---------------------------------------------------------------------------------------------
_ASLEEP = "STt"  # proc(5): sleeping, stopped by a signal, stopped by a debugger
_STOPPED = "T"


class ProcessActivity:
    """CPU time and memory of a process with all its threads, as of the last `refresh`.

    inactive: since the previous `refresh` the process was asleep or stopped and used no CPU time, and neither did its children
    (compilers that it waits for, for example) while it was asleep.
    stopped: a signal has stopped it until another one continues it.
    used_seconds: CPU time since its start, None if the system does not report it. memory: resident bytes when last reported.
    """

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        self._children_used: float | None = None  # CPU time of its children at the last `refresh`, while asleep
        self.inactive = self.stopped = False
        self.used_seconds: float | None = None
        self.memory: int | None = None
        self.refresh()  # so that values exist even if the process dies at once

    def refresh(self) -> None:
        """Read the values from the system."""
        before, children_before = self.used_seconds, self._children_used
        self._children_used = None
        try:
            # After the name, which may contain anything: state is the first field, user and system time the 12th and 13th,
            # resident pages the 22nd.
            fields = _stat(self._process)
            self.used_seconds = _seconds(fields, 11, 12)
            self.memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") or self.memory
            self.stopped = fields[0] in _STOPPED
            self.inactive = self.used_seconds == before and fields[0] in _ASLEEP
            if self.inactive and not self.stopped:
                # The 14th and 15th field hold the time of children that have ended and been waited for.
                self._children_used = _seconds(fields, 13, 14) + sum(map(_used, self._children()))
                self.inactive = self._children_used == children_before
        except (OSError, ValueError, IndexError):
            self.inactive, self.stopped, self.used_seconds = False, False, None

    def _children(self) -> Iterator[Path]:
        """The processes that its threads have started; none if the system does not report them."""
        for thread in (self._process / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from (Path("/proc") / pid for pid in thread.read_text().split())


def _stat(process: Path) -> list[str]:
    """The fields of /proc/PID/stat after the name. Raises OSError if the process is gone."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _seconds(fields: list[str], *indices: int) -> float:
    return sum(int(fields[index]) for index in indices) / os.sysconf("SC_CLK_TCK")


def _used(process: Path) -> float:
    """CPU time in seconds; 0 if the process is gone."""
    try:
        return _seconds(_stat(process), 11, 12)
    except (OSError, ValueError, IndexError):
        return 0.0


# -- watchdog ----------------------------------------------------------------------------------------------------------
TICK = 0.25  # seconds between two checks
STOPPED_SECONDS = 0.75  # a child with pending work that a signal has stopped for this long is stuck
INACTIVE_SECONDS = 2.5  # a child with pending work that neither computes nor waits for a disk for this long is stuck
SUSPECT_SECONDS = 1.0  # a child that has been inactive for this long may have to be replaced
BUSY_SECONDS = 10.0  # a computing step may take this long, whatever its expected duration
SLOW_STEP_FACTOR = 20.0  # and this multiple of its expected duration


@dataclass
class Watchdog:
    """Watches one child.

    hang_seconds: maximum silence if the expected duration of the step is unknown. has_pending_work: whether the child has work.
    has_inspections: whether it has introspection queries to answer, which the expected duration does not include.
    suspect: called at every check with whether the child may soon have to be replaced. activity: of the child at the last check.
    """

    child: ChildProcess
    hang_seconds: float
    _: KW_ONLY
    has_pending_work: Callable[[], bool]
    has_inspections: Callable[[], bool]
    suspect: Callable[[bool], None]

    def __post_init__(self) -> None:
        self.activity = ProcessActivity(self.child.process.pid)
        self._silent_seconds = 0.0
        self._expected: float | None = None  # seconds of the running step; None: unknown

    def on_message(self, message: Message) -> None:
        """Reset the silence, and note the expected duration of the next step."""
        self._silent_seconds = 0.0
        if isinstance(message, StepStarted):
            self._expected = message.seconds
        elif isinstance(message, StepDone):
            self._expected = ANNOUNCE_SECONDS

    async def watch(self) -> str | None:
        """Return the reason once the child has to be killed; None once it has ended by itself.

        Silence is counted in ticks of this loop instead of clock time, so that a parent that was itself stopped or busy does not
        blame the engine.
        """
        tick = min(TICK, self.hang_seconds / 10)
        inactive = used_before = 0.0
        stopped, stopped_before = 0.0, False
        while True:
            await asyncio.sleep(tick)
            if self.child.ended:
                return None
            self.activity.refresh()
            if not self.has_pending_work():
                self._silent_seconds = inactive = stopped = 0.0
                stopped_before = False
                self.suspect(False)
                continue
            used = self.activity.used_seconds or 0.0
            if self._silent_seconds == 0.0:
                used_before = used
            self._silent_seconds += tick
            inactive = inactive + tick if self.activity.inactive and self._silent_seconds > tick else 0.0
            # The first check that finds the child stopped does not count: it is unknown since when.
            stopped = stopped + tick if stopped_before and self.activity.stopped and self.activity.inactive else 0.0
            stopped_before = self.activity.stopped
            if stopped >= STOPPED_SECONDS:
                return f"the engine was stopped by a signal for {stopped:g} seconds while requests were in progress"
            if inactive >= INACTIVE_SECONDS:
                return f"the engine was idle for {inactive:g} seconds although requests were in progress"
            limit = self._silence_limit(used - used_before)
            if self._silent_seconds >= limit:
                return f"no step of the engine finished for {limit:g} seconds"
            self.suspect(self.activity.stopped or inactive >= SUSPECT_SECONDS)

    def _silence_limit(self, used: float) -> float:
        """Maximum silence in seconds, given the CPU time used during the silence.

        hang_seconds applies if the duration of the step is unknown, or if the engine gets no CPU time, which is not its fault.
        """
        if self._expected is None or self.has_inspections():
            return self.hang_seconds
        limit = max(BUSY_SECONDS, SLOW_STEP_FACTOR * self._expected)
        return limit if used >= limit / 2 else max(limit, self.hang_seconds)


# -- crash reports -----------------------------------------------------------------------------------------------------
MAX_REPORTS = 20  # files; the oldest ones are removed
WRITE_SECONDS = 2.0  # a slower disk does not delay the next engine
PARTIAL_SECONDS = 600.0  # an unfinished report that is older has no writer any more
STACK_SECONDS = 1.0  # for a child to write its stacks before it is killed

_PREFIX, _SUFFIX = "crash-", ".json"
_LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "llguidance")
_INFO = (
    "architecture dtype weight_dtype kv_cache_dtype quantization device num_parameters num_layers "
    "block_size num_kv_blocks max_model_len max_num_seqs fingerprint"
).split()


@dataclass
class CrashReports:
    """Writes crash reports to `folder`, None for none. last: path of the last report."""

    _folder: Path | None
    last: Path | None = None

    async def write(
        self,
        child: ChildProcess,
        reason: str,
        config: EngineConfig,
        info: ModelInfo | None,
        requests: Sequence[EngineRequest],
        memory: int | None,
    ) -> str:
        """Write a report and return the end of the log line: "; crash report: PATH" or an empty string. Never raises.

        requests: those that failed with the child. memory: its last known resident bytes.
        """
        try:
            stack = child.stacks.read()
            if self._folder is None:
                return f"; its stack: {stack}" if stack else ""
            code = child.process.poll()
            report = {
                "windlass_crash": 1,
                "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "reason": reason,
                "end": child.describe_end(),
                "exit_code": code if code is not None and code >= 0 else None,
                "signal": signal_name(code),
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
            path = await asyncio.wait_for(asyncio.to_thread(_write, self._folder, report), WRITE_SECONDS)
        except Exception as error:  # for example, no thread can be started: restarting the engine matters more
            cause = "the disk is too slow" if isinstance(error, TimeoutError) else str(error) or repr(error)
            _logger.warning("no crash report could be written to %s: %s", self._folder, cause)
            return ""
        self.last = path
        return f"; crash report: {path}"


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


def _versions() -> dict[str, str | None]:
    """Installed versions, read from the packages' metadata, since this process imports none of them."""
    versions: dict[str, str | None] = {"windlass": __version__, "python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def _system_memory() -> dict[str, int]:
    """Bytes, as far as the system reports them."""
    found = read_table(Path("/proc/meminfo"))
    names = {"MemTotal": "total", "MemAvailable": "available", "SwapFree": "free_swap"}
    return {name: found[field] * 1024 for field, name in names.items() if field in found}


def _write(folder: Path, report: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = f"{_PREFIX}{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{report['pid']}{_SUFFIX}"
    path, partial = folder / name, folder / f".{name}.partial"
    _remove_partials(folder)
    # Never readable by other users, and no incomplete report is left if the disk is full.
    file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as text:
            text.write(json.dumps(report, indent=1, default=str) + "\n")
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    # The new report is exempt, since the clock may have been set back.
    others = sorted(other for other in folder.glob(f"{_PREFIX}*{_SUFFIX}") if other != path)
    for old in others[: max(0, len(others) + 1 - MAX_REPORTS)]:
        old.unlink(missing_ok=True)
    return path


def _remove_partials(folder: Path) -> None:
    """Remove files of writers that were killed."""
    for partial in folder.glob(f".{_PREFIX}*.partial"):
        with contextlib.suppress(OSError):  # removed meanwhile, or owned by another user
            if time.time() - partial.stat().st_mtime > PARTIAL_SECONDS:
                partial.unlink()
