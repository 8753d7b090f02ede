"""Imports without garbage collection, neither during them nor of the imported objects later."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys

import pytest

from windlass.engine.process_setup import gc_paused_imports

STARTS = """
import gc, sys
rounds = []
gc.callbacks.append(lambda phase, info: rounds.append(phase))
from windlass.engine.process_setup import gc_paused_imports
rounds.clear()
with gc_paused_imports():
    import windlass.server.application
    seen = len(rounds)
print(seen, gc.isenabled(), gc.get_freeze_count() > 100_000)
"""


def test_nothing_is_collected_while_modules_are_imported() -> None:
    done = subprocess.run([sys.executable, "-P", "-c", STARTS], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]


def test_it_is_collected_again_after_an_import_that_failed() -> None:
    with pytest.raises(ModuleNotFoundError), gc_paused_imports():
        assert not gc.isenabled()
        importlib.import_module("nothing_of_this_name")
    assert gc.isenabled()
