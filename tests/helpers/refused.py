"""Refused starts of `windlass`, in a separate process and in this one, and their messages.

In this process, most modules are loaded only once.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest
from helpers.device import PLACE

from windlass.server.cli import main as cli

Done = subprocess.CompletedProcess[str]


def _foreign(name: str) -> bool:
    return name.startswith(("WINDLASS_", "_WINDLASS", "HF_"))


def program(*arguments: object, **environment: str) -> Done:
    """Run the program with these environment variables and no other settings."""
    inherited = {name: value for name, value in os.environ.items() if not _foreign(name)}
    command = [sys.executable, "-m", "windlass.server.cli.main", *map(str, arguments)]
    given = {**inherited, **PLACE, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=given, check=False)


def inside(*arguments: object, **variables: str) -> Done:
    """Run the program in this process."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors), pytest.MonkeyPatch.context() as patch:
        for name in filter(_foreign, list(os.environ)):
            patch.delenv(name)
        for name, value in {**PLACE, **variables}.items():
            patch.setenv(name, value)
        code = cli.run([str(argument) for argument in arguments])
    return Done(arguments, code, out.getvalue(), errors.getvalue())


def reason(done: Done) -> str:
    """Return the last line of a refused start without its prefix; earlier lines may show its progress."""
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr, done
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and done.stderr.count("error: ") == 1, done
    return last.removeprefix("error: ")
