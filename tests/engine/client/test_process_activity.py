"""Detection of inactive processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.eventually import children, eventually

from windlass.engine.client.supervision import ProcessActivity

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def looks(pulse: ProcessActivity, times: int = 5) -> list[bool]:
    found = []
    for _ in range(times):
        time.sleep(0.1)
        pulse.refresh()
        found.append(pulse.inactive)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("code", "asleep"), [("import time; time.sleep(60)", True), ("while True: pass", False)])
def test_sleeping_and_busy_processes(code: str, asleep: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            pulse = ProcessActivity(process.pid)
            assert not pulse.inactive and pulse.memory  # the first refresh has no reference
            first = pulse.used_seconds
            assert first is not None
            # Each is reached once the process has run on a core.
            eventually(
                lambda: set(looks(pulse)[1:]) == {asleep} and ((pulse.used_seconds or 0.0) - first < 0.05) is asleep, 30
            )
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: looks(pulse)[-1] and pulse.stopped, 30)
            process.send_signal(signal.SIGCONT)
            eventually(lambda: set(looks(pulse)[1:]) == {asleep} and not pulse.stopped, 30)
        finally:
            process.kill()


@pytest.mark.slow
def test_process_with_a_busy_child_is_active(tmp_path: Path) -> None:
    """A process that waits for a compiler. Once the child sleeps, too, the process is inactive."""
    rest = tmp_path / "rest"
    child = f"import os, time\nwhile not os.path.exists({str(rest)!r}): pass\ntime.sleep(60)"
    code = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        try:
            pulse = ProcessActivity(process.pid)
            eventually(lambda: children(process.pid, b"exists"), 30)
            eventually(lambda: not any(looks(pulse)[1:]), 30)
            process.send_signal(signal.SIGSTOP)  # a stopped process is inactive despite its child
            eventually(lambda: looks(pulse, 2)[-1] and pulse.stopped, 30)
            process.send_signal(signal.SIGCONT)
            rest.touch()
            eventually(lambda: looks(pulse)[-1], 30)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_ended_process_has_no_activity() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    pulse = ProcessActivity(process.pid)
    assert looks(pulse, 2) == [False, False] and pulse.used_seconds is None
