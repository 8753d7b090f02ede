"""Engine supervision: a watchdog that tells a stuck child from a slow one, and crash reports.

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
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from windlass._version import __version__
from windlass.engine.client.child_process import ChildProcess
from windlass.engine.core.messages import ANNOUNCE_SECONDS, Message, StepDone, StepStarted
from windlass.engine.interface.config import EngineConfig
from windlass.engine.interface.model_info import ModelInfo
from windlass.engine.interface.request import EngineRequest

_ASLEEP = "STt"  # proc(5): sleeping, stopped by a signal, stopped by a debugger

_STOPPED = "T"


class ProcessActivity:
    """pid: of the process, all threads of which count. All attributes are as of the last `refresh`.

    lifeless: whether it was asleep or stopped and had used no processor time since the `refresh` before, nor, while it slept, had
    processes of its own, as compilers are that it waits for.
    stopped: whether a signal has stopped it, after which it does nothing until another has it go on.
    used_seconds: processor time since it began, None where the system does not tell. memory: bytes resident when that was
    told last.
    """

    def __init__(self, pid: int) -> None:
        self._process = Path(f"/proc/{pid}")
        self._children_used: float | None = None  # by its children, as of the last look while it slept
        self.inactive = self.stopped = False
        self.used_seconds: float | None = None
        self.memory: int | None = None
        self.refresh()  # of one that dies at once something is known

    def refresh(self) -> None:
        """Ask the system."""
        before, children_before = self.used_seconds, self._children_used
        self._children_used = None
        try:
            # Behind the name, which may hold anything: state is the first field, user and system time the 12th and 13th,
            # resident pages the 22nd.
            fields = _stat(self._process)
            self.used_seconds = _seconds(fields, 11, 12)
            self.memory = int(fields[21]) * os.sysconf("SC_PAGE_SIZE") or self.memory
            self.stopped = fields[0] in _STOPPED
            self.inactive = self.used_seconds == before and fields[0] in _ASLEEP
            if self.inactive and not self.stopped:
                # Those that have ended stand in the 14th and 15th field once it has waited for them.
                self._children_used = _seconds(fields, 13, 14) + sum(map(_used, self._children()))
                self.inactive = self._children_used == children_before
        except (OSError, ValueError, IndexError):
            self.inactive, self.stopped, self.used_seconds = False, False, None

    def _children(self) -> Iterator[Path]:
        """The processes that its threads have started; none where the system does not tell."""
        for thread in (self._process / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                yield from (Path("/proc") / pid for pid in thread.read_text().split())


def _stat(process: Path) -> list[str]:
    """What the system says of it behind its name. Raises OSError where it is gone."""
    return (process / "stat").read_text().rpartition(")")[2].split()


def _seconds(fields: list[str], *places: int) -> float:
    return sum(int(fields[place]) for place in places) / os.sysconf("SC_CLK_TCK")


def _used(process: Path) -> float:
    """Processor time in seconds; 0 of one that is gone."""
    try:
        return _seconds(_stat(process), 11, 12)
    except (OSError, ValueError, IndexError):
        return 0.0


TICK = 0.25  # seconds between two looks

# A child that owes an answer, and was stopped by a signal when first looked at and ever since for so long, is stuck.
STOPPED_SECONDS = 0.75

INACTIVE_SECONDS = 2.5  # a child that owes an answer, and neither computes nor waits for a disk for so long, is stuck

SUSPECT_SECONDS = 1.0  # one that has done nothing for so long may have to be replaced

BUSY_SECONDS = 10.0  # a step that computes may take so long, whatever was expected of it

SLOW_STEP_FACTOR = 20.0  # and so many times what was expected of it


class Watchdog:
    """Watches one child.

    hang_seconds: how long it may be silent where nothing better is known. has_pending_work: whether it has anything to do.
    has_inspections: whether it has questions to answer, which nobody expected. suspect: called at every look with
    whether the child may soon have to be replaced.
    """

    def __init__(
        self,
        child: ChildProcess,
        hang_seconds: float,
        *,
        has_pending_work: Callable[[], bool],
        has_inspections: Callable[[], bool],
        suspect: Callable[[bool], None],
    ) -> None:
        self._child = child
        self._hang_seconds = hang_seconds
        self._owes_answer, self._answers_looks, self._suspect = has_pending_work, has_inspections, suspect
        self._activity = ProcessActivity(child.process.pid)
        self._silent_seconds = 0.0
        self._expected: float | None = None  # seconds of the step that runs; None: nobody can tell

    @property
    def memory(self) -> int | None:
        """Bytes the child had when it was looked at last."""
        return self._activity.memory

    @property
    def stopped(self) -> bool:
        """Whether a signal had stopped the child when it was looked at last."""
        return self._activity.stopped

    def on_message(self, message: Message) -> None:
        """The child has said something."""
        self._silent_seconds = 0.0
        if isinstance(message, StepStarted):
            self._expected = message.seconds
        elif isinstance(message, StepDone):
            self._expected = ANNOUNCE_SECONDS

    async def watch(self) -> str | None:
        """Return why the child has to be killed, once it has; None once it has ended by itself.

        Silence is counted in ticks of this loop rather than read off a clock, so a parent that was itself stopped or
        busy does not blame the engine.
        """
        tick = min(TICK, self._hang_seconds / 10)
        inactive = used_before = 0.0
        stopped, stopped_before = 0.0, False
        while True:
            await asyncio.sleep(tick)
            if self._child.ended:
                return None
            self._activity.refresh()
            if not self._owes_answer():
                self._silent_seconds = inactive = stopped = 0.0
                stopped_before = False
                self._suspect(False)
                continue
            used = self._activity.used_seconds or 0.0
            if self._silent_seconds == 0.0:
                used_before = used
            self._silent_seconds += tick
            inactive = inactive + tick if self._activity.inactive and self._silent_seconds > tick else 0.0
            # The first look at one that is stopped does not tell for how long it has been.
            stopped = stopped + tick if stopped_before and self._activity.stopped and self._activity.inactive else 0.0
            stopped_before = self._activity.stopped
            if stopped >= STOPPED_SECONDS:
                return f"the engine was stopped by a signal for {stopped:g} seconds with requests to answer"
            if inactive >= INACTIVE_SECONDS:
                return f"the engine did nothing for {inactive:g} seconds with requests to answer"
            limit = self._silence_limit(used - used_before)
            if self._silent_seconds >= limit:
                return f"no step of the engine finished for {limit:g} seconds"
            self._suspect(self._activity.stopped or inactive >= SUSPECT_SECONDS)

    def _silence_limit(self, used: float) -> float:
        """Seconds that the engine may be silent which has used so many of processor time since it was last heard.

        One that gets no processor is slow through no fault of its own, and of a step like none before nothing is known.
        """
        if self._expected is None or self._answers_looks():
            return self._hang_seconds
        limit = max(BUSY_SECONDS, SLOW_STEP_FACTOR * self._expected)
        return limit if used >= limit / 2 else max(limit, self._hang_seconds)


_logger = logging.getLogger("windlass.engine.client.engine_client")

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
