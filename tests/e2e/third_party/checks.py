"""Registration and execution of the checks of a script, which prints a line for each and ends with 1 if one fails.

    python SCRIPT URL MODEL NAME …

Checks whose names begin with one of these run, in an environment that contains their clients.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS[function.__name__] = function
    return function


def main() -> int:
    failed = 0
    for name, run in CHECKS.items():
        if not name.startswith(tuple(sys.argv[3:])):
            continue
        try:
            run()
            print(f"ok {name}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAILED {name}: {type(error).__name__}: {' '.join(str(error).split())[:600]}", flush=True)
            traceback.print_exc()
    return min(failed, 1)
